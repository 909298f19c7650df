"""The walk of Mamba2 for Hopper, run on the CPU: what it computes, not how it waits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from kernels.mamba2.test_mamba2_chunks import LAYERS, SMALL, in_parts
from rigs.kernels.batches import Row
from rigs.kernels.gluon_on_cpu import Tiles, run_on_cpu
from rigs.kernels.mamba_batches import MambaLayer, make_mamba_batch
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.recurrence_checks import check_against_reference, check_written_elsewhere, place_lines
from rigs.kernels.walks import ALIGNED
from rigs.kernels.waypoint_checks import check_waypoints, leave_states
from torch import Tensor

from deltaline_kernels.device.row_splits import RowSplits
from deltaline_kernels.mamba2.inputs import MambaInputs
from deltaline_kernels.rows import Rows, StateLines

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


def walk_on_cpu(
    inputs: MambaInputs,
    lines: StateLines,
    rows: Rows,
    y: Tensor,
    steps: Tensor,
    ends: Tensor,
    plan: RowSplits,
    *,
    padding: int,
) -> None:
    """Do what `launch_walk` does."""
    xBC, heads = inputs.xBC, inputs.heads
    told: dict[str, Any] = {
        "xBC": xBC,
        "x_tiles": Tiles(xBC, heads.channels, xBC.stride(0)),
        "s_tiles": Tiles(xBC, heads.channels, xBC.stride(0)),
        "y_tiles": Tiles(y, heads.value_channels, heads.value_channels),
        "steps": steps,
        "D": inputs.D,
        "lines": lines.arguments(rows, y)[0],
        "ends": ends,
        "y": y,
        "control": rows.control,
        "control_stride": rows.control.stride(0),
        "num_parts": plan.num_parts,
        "part_length": plan.part_length,
        "xBC_stride": xBC.stride(0),
        "waypoints": rows.waypoints,
        **inputs.sizes,
        "BLOCK_P": chunk.BLOCK_P,
        "CHUNK": chunk.CHUNK,
        "PADDING": padding,
        "HAS_D": True,
        **lines.constants,
        "STAGES": hopper_chunk.STAGES,
        "WARPS": hopper_chunk.WARPS,
    }
    programs = rows.num_rows * plan.num_parts * heads.num_heads * (heads.head_dim // chunk.BLOCK_P)
    run_on_cpu(hopper_chunk.walk_kernel, programs, told)


@pytest.fixture(autouse=True)
def hopper_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "can_walk", lambda *_: True)
    monkeypatch.setattr(chunk, "launch_walk", walk_on_cpu)


@pytest.mark.parametrize("length", [0, 64, 128], ids=["whole", "parts-of-64", "parts-of-128"])
def test_walk_matches_the_reference(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, length)
    batch = make_mamba_batch(ROWS, HALF, SMALL, max_short=1, padding=ALIGNED)
    check_against_reference(batch, HALF, torch.float16)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(
    "layer",
    [LAYERS["heads-of-64-states-of-128"], MambaLayer(H=3, P=128, S=128), MambaLayer(H=4, G=4, P=64, S=64)],
    ids=["groups", "wide-heads", "group-per-head"],
)
def test_walk_of_other_sizes_matches_the_reference(
    layer: MambaLayer, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch, 0)
    monkeypatch.setattr(hopper_chunk, "STAGES", stages)
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


@pytest.mark.parametrize("length", [0, 64, 128], ids=["whole", "parts-of-64", "parts-of-128"])
def test_a_waypoint_is_what_the_tokens_before_it_leave(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts with a state of 16 bits, which is rounded where it is stored."""
    dtype = torch.bfloat16 if length else torch.float32
    in_parts(monkeypatch, length)
    make = partial(make_mamba_batch, WALKED, HALF, SMALL, state_dtype=dtype, padding=ALIGNED)
    check_waypoints(make, HALF, partial(leave_states, HALF), WALKED, WALKED_PLACES)
