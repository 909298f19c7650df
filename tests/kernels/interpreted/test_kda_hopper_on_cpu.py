"""The walk of KDA for Hopper, run on the CPU: what it computes, not how it waits."""

from __future__ import annotations

from functools import partial

import kernels.kda.test_kda_chunks as checks
import pytest
import torch
from rigs.kernels.batches import Row
from rigs.kernels.gluon_on_cpu import OnCpu
from rigs.kernels.kda_batches import KdaLayer, make_kda_batch
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.recurrence_checks import check_against_reference, check_rows_are_apart, check_written_elsewhere
from rigs.kernels.walks import ALIGNED, cut_rows
from rigs.kernels.waypoint_checks import check_waypoints, leave_states

chunk = pytest.importorskip("deltaline_kernels.kda.chunk", reason="triton is not installed")
hopper_chunk = pytest.importorskip("deltaline_kernels.kda.hopper_chunk", reason="triton is not installed")
transform = pytest.importorskip("deltaline_kernels.kda.transform", reason="triton is not installed")
hopper_transform = pytest.importorskip("deltaline_kernels.kda.hopper_transform", reason="triton is not installed")

HALF = InterpretedPath("cpu", torch.float16)
LAYER = KdaLayer(H=1, HV=2, K=64, V=64)
WALKED = [Row(1), Row(200, replayed=2, half=1), Row(64, skipped=True), Row(128, to="nowhere")]
WALKED_PLACES = [(1, 64), (1, 192), (3, 128)]
ROWS = [Row(5, to="other"), Row(150, replayed=2, half=1), Row(0), Row(65, skipped=True), Row(64, fresh=True)]


@pytest.fixture(autouse=True)
def hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunk, transform):
        monkeypatch.setattr(module, "fits_hopper", lambda *_: True)
    monkeypatch.setattr(hopper_transform, "pair_kernel", OnCpu(hopper_transform.pair_kernel))
    monkeypatch.setattr(hopper_chunk, "walk_kernel", OnCpu(hopper_chunk.walk_kernel))


@pytest.mark.parametrize("length", [0, 64], ids=["whole", "parts"])
def test_walk_matches_the_reference(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_rows(monkeypatch, chunk, length)
    layer = KdaLayer(H=1, HV=2, K=128, V=64, lower_bound=-5.0)
    batch = make_kda_batch(ROWS, HALF, layer, max_short=1, padding=ALIGNED)
    check_against_reference(batch, HALF, torch.float16)


@pytest.mark.parametrize("K", [64, 128])
def test_walk_of_many_heads_matches_the_reference(K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs have 128 rows of the state."""
    monkeypatch.setattr(hopper_chunk, "MANY_HEADS", 1)
    layer = KdaLayer(H=1, HV=2, K=K, V=256)
    check_against_reference(make_kda_batch(ROWS, HALF, layer, max_short=1, padding=ALIGNED), HALF, torch.float16)
    make = partial(make_kda_batch, WALKED, HALF, layer, padding=ALIGNED)
    check_waypoints(make, HALF, partial(leave_states, HALF), WALKED, WALKED_PLACES)


@pytest.mark.parametrize(("bound", "dtype"), [(None, torch.float16), (-0.02, torch.bfloat16)])
def test_pairs_that_are_far_apart_count(bound: float | None, dtype: torch.dtype) -> None:
    checks.test_pairs_that_are_far_apart_count(InterpretedPath("cpu", dtype), bound)


def test_walk_writes_lines_where_they_lie() -> None:
    check_written_elsewhere(make_kda_batch(ROWS, HALF, LAYER, max_short=1, padding=ALIGNED))


@pytest.mark.parametrize("length", [0, 64], ids=["whole", "parts"])
def test_row_in_chunks_does_not_depend_on_its_neighbours(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that share its last tile."""
    cut_rows(monkeypatch, chunk, length)
    rows = [Row(30), Row(100, replayed=1), Row(65, fresh=True), Row(64)]
    check_rows_are_apart(lambda: make_kda_batch(rows, HALF, LAYER, padding=ALIGNED), rows, HALF)


@pytest.mark.parametrize("length", [0, 64, 128], ids=["whole", "parts-of-64", "parts-of-128"])
def test_a_waypoint_is_what_the_tokens_before_it_leave(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts with a state of 16 bits, which is rounded where it is stored."""
    dtype = torch.bfloat16 if length else torch.float32
    cut_rows(monkeypatch, chunk, length)
    make = partial(make_kda_batch, WALKED, HALF, LAYER, state_dtype=dtype, padding=ALIGNED)
    check_waypoints(make, HALF, partial(leave_states, HALF), WALKED, WALKED_PLACES)
