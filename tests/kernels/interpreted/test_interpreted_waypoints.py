"""Waypoints again, by the Triton kernels in Triton's interpreter: chunks of 16 and of 64, in tiles and with masks."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from kernels.gated_delta import test_gated_delta_chunks as delta
from kernels.mamba2 import test_mamba2_chunks as mamba2
from kernels.test_waypoints import (
    MAKERS,
    test_a_convolution_goes_on_from_its_waypoint,
    test_a_row_goes_on_from_its_waypoint,
)
from kernels.test_waypoints import test_a_waypoint_has_the_last_inputs_of_a_convolution as check_convolution
from rigs.kernels.batches import Layer, Row
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.scan_batches import ScanLayer, make_scan_batch
from rigs.kernels.walks import ALIGNED, cut_rows
from rigs.kernels.waypoint_checks import check_waypoints, check_waypoints_against_reference, leave_states

HALF = InterpretedPath("cpu", torch.float16)
WALKS: dict[str, Any] = {
    "delta": (delta.chunk, Layer(H=1, HV=2, K=64, V=64)),
    "mamba2": (mamba2.chunk, mamba2.SMALL),
}
# Fewer tokens: each takes the interpreter milliseconds.
FIRST = [Row(1), Row(150, replayed=2, half=1), Row(64, skipped=True)]
FEW, FEW_PLACES = [*FIRST, Row(64, fresh=True, to="other")], [(1, 128), (3, 64)]
MANY, MANY_PLACES = [*FIRST, Row(128, to="nowhere")], [(1, 64), (1, 128), (3, 128)]


@pytest.mark.parametrize(
    ("kind", "dtype"), [*product(WALKS, [torch.float32, torch.bfloat16]), ("kda", torch.bfloat16)], ids=str
)
def test_an_exact_waypoint_is_what_the_tokens_before_it_leave(
    exact_path: InterpretedPath, kind: str, dtype: torch.dtype
) -> None:
    build, layer = MAKERS[kind]
    make = partial(build, FEW, exact_path, layer(), state_dtype=dtype)
    check_waypoints(make, exact_path, partial(leave_states, exact_path), FEW, FEW_PLACES)
    check_waypoints_against_reference(make(), exact_path, FEW, FEW_PLACES, dtype)


def test_a_waypoint_between_two_tokens_is_what_those_before_it_leave(exact_path: InterpretedPath) -> None:
    """Of rows that go token by token: fewer of them, since each takes as long."""
    rows, places = [Row(1), Row(70, replayed=2, half=1), Row(64, fresh=True, to="other")], [(1, 64), (2, 64)]
    make = partial(make_scan_batch, rows, exact_path, ScanLayer(D=3), state_dtype=torch.bfloat16)
    check_waypoints(make, exact_path, partial(leave_states, exact_path), rows, places)
    check_waypoints_against_reference(make(), exact_path, rows, places, torch.bfloat16)


@pytest.mark.parametrize("padding", [ALIGNED, 3], ids=["tiles", "masks"])
@pytest.mark.parametrize("length", [0, 64, 128], ids=["whole", "parts-of-64", "parts-of-128"])
@pytest.mark.parametrize("kind", WALKS)
def test_a_waypoint_is_what_the_tokens_before_it_leave(
    kind: str, length: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts with a state of 16 bits, which is rounded where it is stored."""
    walk, layer = WALKS[kind]
    cut_rows(monkeypatch, walk, length)
    dtype = torch.bfloat16 if length else torch.float32
    make = partial(MAKERS[kind][0], MANY, HALF, layer, state_dtype=dtype, padding=padding)
    check_waypoints(make, HALF, partial(leave_states, HALF), MANY, MANY_PLACES)
    check_waypoints_against_reference(make(), HALF, MANY, MANY_PLACES, dtype if length else None)


def test_a_waypoint_of_kda_in_chunks_is_what_the_tokens_before_it_leave() -> None:
    make = partial(MAKERS["kda"][0], MANY, HALF)
    check_waypoints(make, HALF, partial(leave_states, HALF), MANY, MANY_PLACES)
    check_waypoints_against_reference(make(), HALF, MANY, MANY_PLACES)


def test_a_waypoint_has_the_last_inputs_of_a_convolution() -> None:
    check_convolution(HALF, 4)
