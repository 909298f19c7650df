"""Mamba2: long rows of 16-bit values, whole or in parts, in tiles or with masks, by either walk through chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from rigs.kernels.batches import Row, plan_rows
from rigs.kernels.graphs import check_replay
from rigs.kernels.mamba_batches import MambaLayer, make_mamba_batch
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import (
    check_against_reference,
    check_far_lines,
    check_pieces,
    check_rows_are_apart,
)
from rigs.kernels.recurrence_rows import LONG_ROWS
from rigs.kernels.tolerance import assert_close
from rigs.kernels.walks import ALIGNED, cut_rows, use_walk
from rigs.kernels.waypoint_checks import ROWS, check_waypoints_against_reference

plan = pytest.importorskip("deltaline_kernels.mamba2.plan")
chunk = pytest.importorskip("deltaline_kernels.mamba2.chunk", reason="triton is not installed")

LAYERS = {
    "heads-of-64-states-of-64": MambaLayer(H=2, P=64, S=64),
    "heads-of-64-states-of-128": MambaLayer(H=4, G=2, P=64, S=128),
    "heads-of-128-states-of-128": MambaLayer(H=3, P=128, S=128),
    "heads-of-64-states-of-256": MambaLayer(H=1, P=64, S=256),
    "heads-of-64-states-of-16": MambaLayer(H=1, P=64, S=16),
    "heads-of-32-states-of-128": MambaLayer(H=2, P=32, S=128),
    "heads-of-80-states-of-96": MambaLayer(H=2, G=2, P=80, S=96),
}
SMALL = LAYERS["heads-of-64-states-of-64"]
# Those that the walk for Hopper takes.
FITTING = list(LAYERS)[:3]


def in_parts(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """In parts of `length` tokens, whose ends are found in pieces of a chunk each; 0: whole."""
    cut_rows(monkeypatch, chunk, length)
    monkeypatch.setattr(plan, "SHORTEST_PART", plan.CHUNK)


@pytest.mark.parametrize("walk", ["hopper", "hopper-pairs", "triton"])
@pytest.mark.parametrize("length", [0, 64, 128])
@pytest.mark.parametrize("layer", LAYERS)
def test_chunks_match_the_reference(
    half_path: Path, layer: str, length: int, walk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if walk != "triton" and layer not in FITTING:
        pytest.skip("does not fit")
    if walk == "hopper-pairs":
        monkeypatch.setattr(pytest.importorskip("deltaline_kernels.mamba2.hopper_chunk"), "MANY_BLOCKS", 1)
    in_parts(monkeypatch, length)
    ran = use_walk(monkeypatch, chunk, walk)
    batch = make_mamba_batch(LONG_ROWS, half_path, LAYERS[layer], max_short=1, padding=ALIGNED)
    check_against_reference(batch, half_path, half_path.dtype)
    assert bool(ran) == (walk != "triton")


@pytest.mark.parametrize("length", [0, 64])
def test_pairs_of_blocks_leave_waypoints(half_path: Path, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("deltaline_kernels.mamba2.hopper_chunk"), "MANY_BLOCKS", 1)
    in_parts(monkeypatch, length)
    use_walk(monkeypatch, chunk, "hopper")
    layer = LAYERS["heads-of-64-states-of-128"]
    check_waypoints_against_reference(make_mamba_batch(ROWS, half_path, layer, padding=ALIGNED), half_path)


@pytest.mark.parametrize("walk", ["hopper", "triton"])
def test_long_rows_are_those_of_single_tokens(half_path: Path, walk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of tokens, in the kernel's own parts, against the kernel that decodes."""
    use_walk(monkeypatch, chunk, walk)
    rows = [Row(3000, replayed=2), Row(0, to="other"), Row(4999, fresh=True)]
    layer = LAYERS["heads-of-64-states-of-128"]
    chunked = make_mamba_batch(rows, half_path, layer, padding=ALIGNED)
    # Slow decays, so that what a chunk gets wrong is remembered.
    chunked.A_log.fill_(-5.0)
    serial = replace(chunked.clone(), rows=plan_rows(rows, 5000, half_path.device))
    want = serial.run(half_path)
    assert_close("y", chunked.run(half_path), want, half_path.dtype)
    assert_close("state", chunked.state, serial.state, half_path.dtype)


def test_parts_leave_what_the_whole_row_leaves(half_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_mamba_batch([Row(330, replayed=2)], half_path, SMALL, padding=ALIGNED)
    cut = whole.clone()
    in_parts(monkeypatch, 0)
    want = whole.run(half_path)
    in_parts(monkeypatch, 128)
    assert_close("y", cut.run(half_path), want, half_path.dtype)
    assert_close("state", cut.state, whole.state, half_path.dtype)


@pytest.mark.parametrize("walk", ["hopper", "triton"])
def test_calls_leave_what_one_call_leaves(half_path: Path, walk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is cut where chunks are, and where they are not."""
    use_walk(monkeypatch, chunk, walk)
    check_pieces(
        make_mamba_batch([Row(700)], half_path, SMALL, padding=ALIGNED), half_path, [0, 128, 256, 330, 333, 334, 700]
    )


def test_parts_round_a_16_bit_state_once(half_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 64)
    rows = [Row(150, replayed=1), Row(65)]
    batch = make_mamba_batch(rows, half_path, SMALL, state_dtype=torch.bfloat16, padding=ALIGNED)
    check_against_reference(batch, half_path, torch.bfloat16)


@pytest.mark.parametrize("length", [0, 64])
def test_row_in_chunks_does_not_depend_on_its_neighbours(
    half_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that share its last tile."""
    in_parts(monkeypatch, length)
    rows = [Row(30), Row(100, replayed=1), Row(65, fresh=True), Row(64)]
    check_rows_are_apart(lambda: make_mamba_batch(rows, half_path, SMALL, padding=ALIGNED), rows, half_path)


def test_an_empty_row_in_the_middle_leaves_the_next_one_alone(half_path: Path) -> None:
    """A peer's bug: what stood before the chunks of an empty sequence was taken for the first chunk of all."""
    layer = LAYERS["heads-of-64-states-of-128"]
    rows = [Row(200), Row(0), Row(300), Row(0, to="other"), Row(100, fresh=True)]
    batch = make_mamba_batch(rows, half_path, layer, max_short=1, padding=ALIGNED)
    check_against_reference(batch, half_path, half_path.dtype)


@pytest.mark.parametrize("walk", ["hopper", "triton"])
def test_lines_lie_anywhere(half_path: Path, walk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_walk(monkeypatch, chunk, walk)
    rows, half = [Row(65), Row(130, replayed=2)], torch.bfloat16
    batch = make_mamba_batch(rows, half_path, SMALL, max_short=1, state_dtype=half, padding=ALIGNED)
    check_far_lines(batch, half_path, partial(in_parts, monkeypatch))


@pytest.mark.parametrize("walk", ["hopper", "triton"])
def test_tokens_lie_anywhere(half_path: Path, walk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2^31 values of xBC: the last tokens of a row so long are those of a row that starts behind the rest."""
    in_parts(monkeypatch, 0)
    use_walk(monkeypatch, chunk, walk)
    layer = SMALL
    wide = 8192
    num_tokens = 2**31 // wide + 200
    tail = make_mamba_batch([Row(150)], half_path, layer, max_short=1, padding=ALIGNED)
    wanted = tail.clone()
    want = wanted.run(half_path)
    xBC = torch.empty(num_tokens, wide, dtype=half_path.dtype, device=half_path.device)[:, : layer.channels]
    xBC[-150:] = tail.xBC
    dt = torch.empty(num_tokens, layer.H, dtype=half_path.dtype, device=half_path.device)
    dt[-150:] = tail.dt
    rows = plan_rows([Row(num_tokens - 150, skipped=True), Row(150)], 1, half_path.device)
    control = rows.control.clone()
    # The one row has the lines that it has alone.
    control[1:3, 1] = tail.rows.control[1:3, 0]
    far = replace(tail, xBC=xBC, dt=dt, rows=replace(rows, control=control))
    assert torch.equal(far.run(half_path)[-150:], want)
    assert torch.equal(far.state[1], wanted.state[1])


def test_chunks_run_in_a_cuda_graph(half_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 128)
    batch = make_mamba_batch([Row(300)], half_path, SMALL, padding=ALIGNED)
    check_replay(lambda: [batch.run(half_path)], [batch.state], lambda: None)
