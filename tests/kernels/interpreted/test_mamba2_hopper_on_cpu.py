"""The walk of Mamba2 for Hopper, run on the CPU: what it computes, not how it waits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernels.mamba2.test_mamba2_chunks import LAYERS, SMALL, in_parts
from rigs.kernels.batches import Row
from rigs.kernels.gluon_on_cpu import OnCpu
from rigs.kernels.mamba_batches import MambaLayer, make_mamba_batch
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.recurrence_checks import check_against_reference, check_written_elsewhere, place_lines
from rigs.kernels.walks import ALIGNED
from rigs.kernels.waypoint_checks import check_waypoints, leave_states

chunk = pytest.importorskip("deltaline_kernels.mamba2.chunk", reason="triton is not installed")
hopper_chunk = pytest.importorskip("deltaline_kernels.mamba2.hopper_chunk", reason="triton is not installed")

HALF = InterpretedPath("cpu", torch.float16)
WALKED = [Row(1), Row(200, replayed=2, half=1), Row(64, skipped=True), Row(128, to="nowhere")]
WALKED_PLACES = [(1, 64), (1, 192), (3, 128)]
ROWS = [
    Row(5, to="other"),
    Row(290, replayed=2, half=1),
    Row(0),
    Row(65, skipped=True),
    Row(64, fresh=True),
    Row(129, to="nowhere"),
    Row(128),
]


@pytest.fixture(autouse=True)
def hopper_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "can_walk", lambda *_: True)
    monkeypatch.setattr(hopper_chunk, "walk_kernel", OnCpu(hopper_chunk.walk_kernel))


@pytest.mark.parametrize("many_blocks", [1, 256], ids=["pairs", "single"])
@pytest.mark.parametrize("length", [0, 64, 128], ids=["whole", "parts-of-64", "parts-of-128"])
def test_walk_matches_the_reference(length: int, many_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, length)
    monkeypatch.setattr(hopper_chunk, "MANY_BLOCKS", many_blocks)
    batch = make_mamba_batch(ROWS, HALF, SMALL, max_short=1, padding=ALIGNED)
    check_against_reference(batch, HALF, torch.float16)


@pytest.mark.parametrize("many_blocks", [1, 256], ids=["pairs", "single"])
@pytest.mark.parametrize(
    "layer",
    [LAYERS["heads-of-64-states-of-128"], MambaLayer(H=3, P=128, S=128), MambaLayer(H=4, G=4, P=64, S=64)],
    ids=["groups", "wide-heads", "group-per-head"],
)
def test_walk_of_other_sizes_matches_the_reference(
    layer: MambaLayer, many_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch, 0)
    monkeypatch.setattr(hopper_chunk, "MANY_BLOCKS", many_blocks)
    batch = make_mamba_batch([Row(300), Row(70)], HALF, layer, max_short=1, padding=ALIGNED)
    check_against_reference(batch, HALF, torch.float16)


def test_walk_rounds_a_16_bit_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 64)
    rows = [Row(150, replayed=1), Row(65)]
    batch = make_mamba_batch(rows, HALF, SMALL, state_dtype=torch.bfloat16, padding=ALIGNED)
    check_against_reference(batch, HALF, torch.bfloat16)


def test_walk_reads_and_writes_lines_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 0)
    batch, _ = place_lines(make_mamba_batch(ROWS, HALF, SMALL, max_short=1, padding=ALIGNED), 64)
    check_against_reference(batch, HALF, torch.float16)
    check_written_elsewhere(make_mamba_batch(ROWS, HALF, SMALL, max_short=1, padding=ALIGNED))


@pytest.mark.parametrize("many_blocks", [1, 256], ids=["pairs", "single"])
@pytest.mark.parametrize("length", [0, 64, 128], ids=["whole", "parts-of-64", "parts-of-128"])
def test_a_waypoint_is_what_the_tokens_before_it_leave(
    length: int, many_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts with a state of 16 bits, which is rounded where it is stored."""
    monkeypatch.setattr(hopper_chunk, "MANY_BLOCKS", many_blocks)
    dtype = torch.bfloat16 if length else torch.float32
    in_parts(monkeypatch, length)
    make = partial(make_mamba_batch, WALKED, HALF, SMALL, state_dtype=dtype, padding=ALIGNED)
    check_waypoints(make, HALF, partial(leave_states, HALF), WALKED, WALKED_PLACES)
