"""Long rows of 16-bit values: whole or in parts, in tiles or with masks, by either walk through their chunks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from rigs.kernels.batches import Layer, Row, make_batch
from rigs.kernels.graphs import check_replay
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import check_against_reference, check_far_lines, check_rows_are_apart
from rigs.kernels.recurrence_rows import LONG_ROWS
from rigs.kernels.tolerance import assert_close
from rigs.kernels.walks import ALIGNED, cut_rows, use_walk

chunk = pytest.importorskip("deltaline_kernels.gated_delta.chunk", reason="triton is not installed")

LAYERS = {
    "64-64": Layer(H=1, HV=1, K=64, V=64),
    "64-128": Layer(H=1, HV=1, K=64, V=128),
    "128-128-grouped": Layer(H=1, HV=2, K=128, V=128),
    "64-128-three-of-a-group": Layer(H=1, HV=3, K=64, V=128),
    "128-64": Layer(H=1, HV=1, K=128, V=64),
}


def in_parts(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    cut_rows(monkeypatch, chunk, length)


@pytest.mark.parametrize("walk", ["hopper", "triton"])
@pytest.mark.parametrize("length", [0, 64, 128])
@pytest.mark.parametrize("layer", LAYERS)
def test_chunks_match_the_reference(
    half_path: Path, layer: str, length: int, walk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch, length)
    ran = use_walk(monkeypatch, chunk, walk)
    batch = make_batch(LONG_ROWS, half_path, LAYERS[layer], max_short=1, padding=ALIGNED)
    check_against_reference(batch, half_path, half_path.dtype)
    # That of Hopper has 128 rows of a state at once.
    assert bool(ran) == (walk == "hopper" and LAYERS[layer].V % 128 == 0)


def check_norms_of_queries(path: Path, *, norms: bool) -> None:
    rows = [Row(70, replayed=2), Row(130)]
    batch = make_batch(rows, path, LAYERS["64-128"], max_short=1, padding=ALIGNED).with_queries(1.0, 0.0, 0.01, 16.0)
    # With outputs of about 1.
    batch.state.mul_(8.0)
    check_against_reference(batch if norms else batch.without_norms(), path, path.dtype)


@pytest.mark.parametrize("walk", ["hopper", "triton"])
@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no-norms"])
def test_outputs_are_divided_by_norms_of_queries(
    half_path: Path, norms: bool, walk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of which are zero, or as small as eps."""
    ran = use_walk(monkeypatch, chunk, walk)
    check_norms_of_queries(half_path, norms=norms)
    assert bool(ran) == (walk == "hopper")


def test_parts_leave_what_the_whole_row_leaves(half_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS["64-128"]
    whole = make_batch([Row(330, replayed=2)], half_path, layer, padding=ALIGNED)
    cut = whole.clone()
    in_parts(monkeypatch, 0)
    want = whole.run(half_path)
    in_parts(monkeypatch, 128)
    assert_close("o", cut.run(half_path), want, half_path.dtype)
    assert_close("state", cut.state, whole.state, half_path.dtype)


def test_parts_round_a_16_bit_state_once(half_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 64)
    rows = [Row(150, replayed=1), Row(65)]
    batch = make_batch(rows, half_path, LAYERS["64-128"], state_dtype=torch.bfloat16, padding=ALIGNED)
    check_against_reference(batch, half_path, torch.bfloat16)


@pytest.mark.parametrize("length", [0, 64])
def test_row_in_chunks_does_not_depend_on_its_neighbours(
    half_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that share its last tile."""
    in_parts(monkeypatch, length)
    rows = [Row(30), Row(100, replayed=1), Row(65, fresh=True), Row(64)]
    check_rows_are_apart(lambda: make_batch(rows, half_path, LAYERS["64-128"], padding=ALIGNED), rows, half_path)


@pytest.mark.parametrize("walk", ["hopper", "triton"])
def test_lines_lie_anywhere(half_path: Path, walk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_walk(monkeypatch, chunk, walk)
    rows, half = [Row(1), Row(130, replayed=2)], torch.bfloat16
    batch = make_batch(rows, half_path, LAYERS["64-128"], max_short=1, state_dtype=half, padding=ALIGNED)
    check_far_lines(batch, half_path, partial(in_parts, monkeypatch))


def test_chunks_run_in_a_cuda_graph(half_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 128)
    batch = make_batch([Row(300)], half_path, LAYERS["64-128"], padding=ALIGNED)
    check_replay(lambda: [batch.run(half_path)], [batch.state], lambda: None)
