"""Long rows of KDA of 16-bit values: whole or in parts, by the kernels for Hopper or the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels.kda.test_kda import make_correlated
from rigs.kernels.batches import Row
from rigs.kernels.graphs import check_replay
from rigs.kernels.kda_batches import KdaLayer, make_kda_batch
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import check_against_reference, check_rows_are_apart, same_bits
from rigs.kernels.recurrence_rows import LONG_ROWS
from rigs.kernels.tolerance import assert_close
from rigs.kernels.walks import ALIGNED, cut_rows

chunk = pytest.importorskip("deltaline_kernels.kda.chunk", reason="triton is not installed")
hopper_chunk = pytest.importorskip("deltaline_kernels.kda.hopper_chunk", reason="triton is not installed")
transform = pytest.importorskip("deltaline_kernels.kda.transform", reason="triton is not installed")

SMALL = KdaLayer(H=1, HV=1, K=64, V=64)
LAYERS = {
    "64-64": SMALL,
    "64-64-bounded": replace(SMALL, lower_bound=-5.0),
    "128-128-grouped": KdaLayer(H=1, HV=2, K=128, V=128),
    "128-64-bounded": KdaLayer(H=1, HV=1, K=128, V=64, lower_bound=-5.0),
    "64-128-weaker-bound": KdaLayer(H=1, HV=1, K=64, V=128, lower_bound=-20.0),
}


def use_kernels(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    if kernels == "triton":
        for module in (chunk, transform):
            monkeypatch.setattr(module, "fits_hopper", lambda *_: False)
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")


@pytest.mark.parametrize("kernels", ["hopper", "triton"])
@pytest.mark.parametrize("length", [0, 64, 128])
@pytest.mark.parametrize("layer", LAYERS)
def test_chunks_match_the_reference(
    half_path: Path, layer: str, length: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_rows(monkeypatch, chunk, length)
    use_kernels(monkeypatch, kernels)
    batch = make_kda_batch(LONG_ROWS, half_path, LAYERS[layer], max_short=1, padding=ALIGNED)
    check_against_reference(batch, half_path, half_path.dtype)


@pytest.mark.parametrize("gate", [-60.0, 0.0, 1000.0], ids=["no-decay", "usual", "decay-of-1000"])
@pytest.mark.parametrize("layer", ["64-64", "64-64-bounded"])
def test_chunks_are_right_for_correlated_keys(half_path: Path, layer: str, gate: float) -> None:
    batch = make_correlated(make_kda_batch([Row(200)], half_path, LAYERS[layer], max_short=1, padding=ALIGNED))
    batch.a[::3, ::2] = gate
    check_against_reference(batch, half_path, half_path.dtype)


@pytest.mark.parametrize("bound", [None, -0.02], ids=["softplus", "bounded"])
def test_pairs_that_are_far_apart_count(half_path: Path, bound: float | None) -> None:
    """With weak decays, and queries and keys that share a direction: of usual ones nothing far away is seen."""
    layer = replace(SMALL, lower_bound=bound)
    batch = make_kda_batch([Row(120, fresh=True)], half_path, layer, max_short=1, padding=ALIGNED)
    batch.qkv[:, : 2 * layer.K] += 1.0
    if bound is None:
        batch.a.sub_(6.0)
    check_against_reference(batch, half_path, half_path.dtype)


def test_every_length_matches_the_reference(half_path: Path) -> None:
    """Of rows beside each other: what a row's last chunk holds behind its end is another row's."""
    rows = [Row(length, replayed=length % 3) for length in (*range(60, 70), 127, 128, 129, 191, 200, 0, 2)]
    check_against_reference(
        make_kda_batch(rows, half_path, SMALL, max_short=1, padding=ALIGNED), half_path, half_path.dtype
    )


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", ["128-128-grouped", "64-128-weaker-bound"])
def test_rows_of_many_heads_are_those_of_few_to_the_bit(
    half_path: Path, layer: str, state_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk through whole rows of many heads has more rows of the state in a program."""
    use_kernels(monkeypatch, "hopper")
    cut_rows(monkeypatch, chunk, 0)
    few = make_kda_batch(LONG_ROWS, half_path, LAYERS[layer], max_short=1, padding=ALIGNED, state_dtype=state_dtype)
    many = few.clone()
    want = few.run(half_path)
    monkeypatch.setattr(hopper_chunk, "MANY_HEADS", 1)
    assert same_bits(many.run(half_path), want)
    assert same_bits(many.state, few.state)


def test_parts_leave_what_the_whole_row_leaves(half_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_kda_batch([Row(330, replayed=2)], half_path, SMALL, padding=ALIGNED)
    cut = whole.clone()
    cut_rows(monkeypatch, chunk, 0)
    want = whole.run(half_path)
    cut_rows(monkeypatch, chunk, 128)
    assert_close("o", cut.run(half_path), want, half_path.dtype)
    assert_close("state", cut.state, whole.state, half_path.dtype)


@pytest.mark.parametrize("length", [0, 64])
def test_row_in_chunks_does_not_depend_on_its_neighbours(
    half_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that share its last tile."""
    cut_rows(monkeypatch, chunk, length)
    rows = [Row(30), Row(100, replayed=1), Row(65, fresh=True), Row(64)]
    check_rows_are_apart(lambda: make_kda_batch(rows, half_path, SMALL, padding=ALIGNED), rows, half_path)


def test_chunks_run_in_a_cuda_graph(half_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_rows(monkeypatch, chunk, 128)
    batch = make_kda_batch([Row(300)], half_path, SMALL, padding=ALIGNED)
    check_replay(lambda: [batch.run(half_path)], [batch.state], lambda: None)
