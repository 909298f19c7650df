"""The walks of the gated delta rule for Hopper, run on the CPU: what they compute, and whom they tell."""

from __future__ import annotations

from functools import partial

import kernels.compat.test_compat_gated_delta as checks
import pytest
import torch
from kernels.gated_delta.test_gated_delta_chunks import check_norms_of_queries
from rigs.kernels.batches import Layer, Row, make_batch
from rigs.kernels.gluon_on_cpu import OnCpu
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.recurrence_checks import check_against_reference, check_written_elsewhere, place_lines
from rigs.kernels.walks import ALIGNED, cut_rows
from rigs.kernels.waypoint_checks import check_waypoints, leave_states

chunk = pytest.importorskip("deltaline_kernels.gated_delta.chunk", reason="triton is not installed")
hopper_chunk = pytest.importorskip("deltaline_kernels.gated_delta.hopper_chunk", reason="triton is not installed")
hopper_ends = pytest.importorskip("deltaline_kernels.gated_delta.hopper_ends", reason="triton is not installed")

HALF = InterpretedPath("cpu", torch.float16)
WALKED = [Row(1), Row(200, replayed=2, half=1), Row(64, skipped=True), Row(128, to="nowhere")]
WALKED_PLACES = [(1, 64), (1, 192), (3, 128)]
ROWS = [Row(5, to="other"), Row(330, replayed=2, half=1), Row(0), Row(65, skipped=True), Row(64, fresh=True)]


@pytest.fixture(autouse=True)
def hopper_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "can_walk", lambda *_: True)
    monkeypatch.setattr(hopper_chunk, "walk_kernel", OnCpu(hopper_chunk.walk_kernel))
    monkeypatch.setattr(hopper_ends, "ends_kernel", OnCpu(hopper_ends.ends_kernel))


@pytest.mark.parametrize("length", [0, 64], ids=["whole", "parts"])
def test_walk_matches_the_reference(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_rows(monkeypatch, chunk, length)
    batch = make_batch(ROWS, HALF, Layer(H=1, HV=2, K=128, V=128), max_short=1, padding=ALIGNED)
    check_against_reference(batch, HALF, torch.float16)


@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no-norms"])
def test_outputs_are_divided_by_norms_of_queries(norms: bool) -> None:
    check_norms_of_queries(HALF, norms=norms)


def test_walk_reads_and_writes_lines_where_they_lie() -> None:
    layer = Layer(H=1, HV=2, K=64, V=256)
    batch, _ = place_lines(make_batch(ROWS, HALF, layer, max_short=1, padding=ALIGNED), 64)
    check_against_reference(batch, HALF, torch.float16)
    check_written_elsewhere(make_batch(ROWS, HALF, layer, max_short=1, padding=ALIGNED))


def test_walk_reads_tokens_where_they_lie() -> None:
    checks.test_chunk_matches_the_reference(HALF, "tiles-apart")


@pytest.mark.parametrize("length", [0, 64, 128], ids=["whole", "parts-of-64", "parts-of-128"])
def test_a_waypoint_is_what_the_tokens_before_it_leave(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts with a state of 16 bits, which is rounded where it is stored."""
    dtype = torch.bfloat16 if length else torch.float32
    cut_rows(monkeypatch, chunk, length)
    layer = Layer(H=1, HV=2, K=64, V=128)
    make = partial(make_batch, WALKED, HALF, layer, state_dtype=dtype, padding=ALIGNED)
    check_waypoints(make, HALF, partial(leave_states, HALF), WALKED, WALKED_PLACES)
