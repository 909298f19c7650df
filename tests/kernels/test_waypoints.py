"""Waypoints: what rows leave in other lines on their way, in every recurrence and in the convolution."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from rigs.kernels.batches import Layer, Row, make_batch
from rigs.kernels.compiled import compile_launches, on_meta
from rigs.kernels.graphs import check_replay, no_waits
from rigs.kernels.kda_batches import KdaLayer, make_kda_batch
from rigs.kernels.mamba_batches import MambaLayer, make_mamba_batch
from rigs.kernels.paths import Path
from rigs.kernels.scan_batches import ScanLayer, make_scan_batch
from rigs.kernels.tolerance import assert_close
from rigs.kernels.walks import ALIGNED, cut_rows, use_walk
from rigs.kernels.waypoint_checks import (
    PLACES,
    ROWS,
    check_going_on,
    check_waypoints,
    check_waypoints_against_reference,
    leave_inputs,
    leave_states,
    place,
)
from torch import Tensor

from deltaline_kernels import causal_conv1d, causal_conv1d_reference

MAKERS: dict[str, Any] = {
    "delta": (make_batch, Layer),
    "kda": (make_kda_batch, KdaLayer),
    "mamba1": (make_scan_batch, ScanLayer),
    "mamba2": (make_mamba_batch, MambaLayer),
}
FAMILIES = {"delta": "gated_delta", "mamba2": "mamba2"}
# All recurrences, and those that walk through long rows in two ways.
ALL = pytest.mark.parametrize("kind", MAKERS)
WALKED = pytest.mark.parametrize("kind", FAMILIES)
STATES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def make_walked(
    kind: str, size: int, path: Path, dtype: torch.dtype, padding: int = ALIGNED, rows: Sequence[Row] = ROWS
) -> Callable[[], Any]:
    """Return what makes batches of heads with keys of `size`, whose values fill the blocks of a walk."""
    build, _ = MAKERS[kind]
    layer = Layer(H=1, HV=2, K=size, V=128) if kind == "delta" else MambaLayer(H=2, P=64, S=size)
    return partial(build, rows, path, layer, state_dtype=dtype, padding=padding)


def find_chunk(kind: str) -> Any:
    """Return the family's module of long rows."""
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module(f"deltaline_kernels.{FAMILIES[kind]}.chunk")


@ALL
@STATES
def test_a_waypoint_is_what_the_tokens_before_it_leave(path: Path, kind: str, dtype: torch.dtype) -> None:
    build, _ = MAKERS[kind]
    check_waypoints(partial(build, ROWS, path, state_dtype=dtype), path, partial(leave_states, path))


@ALL
def test_waypoints_match_the_reference(path: Path, kind: str) -> None:
    build, _ = MAKERS[kind]
    check_waypoints_against_reference(build(ROWS, path), path)


@ALL
def test_a_row_goes_on_from_its_waypoint(path: Path, kind: str) -> None:
    build, _ = MAKERS[kind]
    check_going_on(partial(build, path=path), path, partial(leave_states, path))


def test_a_convolution_goes_on_from_its_waypoint(path: Path) -> None:
    check_going_on(partial(make_batch, path=path), path, partial(leave_inputs, path))


@pytest.mark.parametrize("width", [2, 4, 6])
def test_a_waypoint_has_the_last_inputs_of_a_convolution(path: Path, width: int) -> None:
    check_waypoints(partial(make_batch, ROWS, path, Layer(W=width)), path, partial(leave_inputs, path))
    batch, lines = place(make_batch(ROWS, path, Layer(W=width)), ROWS, PLACES, path.device)
    want = batch.lines.clone()
    causal_conv1d_reference(batch.qkv, batch.weight, batch.bias, want, batch.rows)
    leave_inputs(path, batch)
    assert torch.equal(batch.lines.nan_to_num(7.0), want.nan_to_num(7.0))
    # The columns of drafts are left alone.
    assert batch.lines[lines, width - 1 :].isnan().all() and not batch.lines[lines, : width - 1].isnan().any()


def test_a_table_that_is_too_short_is_refused(path: Path) -> None:
    rows = [Row(70), Row(130)]
    few = torch.full((4,), -1, dtype=torch.int32, device=path.device)
    delta, scan, mamba = make_batch(rows, path), make_scan_batch(rows, path), make_mamba_batch(rows, path)
    plan = replace(delta.rows, waypoints=few)
    message = "^waypoints: expected at least 5 entries, a chunk's each of 200 tokens, got 4"
    for batch in (delta.replaced(rows=plan), scan.replaced(rows=plan), mamba.replaced(rows=plan)):
        with pytest.raises(ValueError, match=message):
            batch.run_public()
    with pytest.raises(ValueError, match=message):
        causal_conv1d(delta.qkv, delta.weight, delta.bias, delta.lines, plan)


def test_outputs_of_a_convolution_may_be_split(path: Path) -> None:
    batch, _ = place(make_batch(ROWS, path), ROWS, PLACES, path.device)
    split = batch.clone()
    want, lines = leave_inputs(path, batch)
    parts = path.conv_split(split.qkv, split.weight, split.bias, split.lines, split.rows, (16, 16, 16))
    # The outputs of short rows come from another kernel where they are not split.
    assert_close("y", torch.cat(parts, dim=1), want, path.dtype)
    assert torch.equal(split.lines.nan_to_num(7.0), lines.nan_to_num(7.0))


@pytest.mark.parametrize("walk", ["hopper", "triton"])
@pytest.mark.parametrize("length", [0, 64, 128], ids=["whole", "parts-of-64", "parts-of-128"])
@STATES
@pytest.mark.parametrize("size", [64, 128])
@WALKED
def test_a_waypoint_of_a_walk_is_what_the_tokens_before_it_leave(
    half_path: Path, kind: str, size: int, dtype: torch.dtype, length: int, walk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By either walk through chunks, whole rows and parts."""
    chunk = find_chunk(kind)
    cut_rows(monkeypatch, chunk, length)
    ran = use_walk(monkeypatch, chunk, walk)
    # A row in parts replays in another kernel than one in a single part, which may differ in the last bit.
    rows = [replace(row, replayed=0) for row in ROWS] if length else ROWS
    make = make_walked(kind, size, half_path, dtype, rows=rows)
    check_waypoints(make, half_path, partial(leave_states, half_path), rows)
    replaying = make_walked(kind, size, half_path, dtype)()
    check_waypoints_against_reference(replaying, half_path, dtype=max(dtype, half_path.dtype, key=_coarseness))
    assert bool(ran) == (walk == "hopper")


@WALKED
def test_waypoints_of_large_heads_and_of_apart_tokens(half_path: Path, kind: str) -> None:
    """Where no walk for Hopper is: keys of 256, and tokens that begin anywhere."""
    for size, padding in ((256, ALIGNED), (64, 3)):
        check_waypoints(
            make_walked(kind, size, half_path, torch.float32, padding), half_path, partial(leave_states, half_path)
        )


@pytest.mark.parametrize("walk", ["hopper", "triton"])
@WALKED
def test_a_row_of_tiles_goes_on_from_its_waypoint(
    half_path: Path, kind: str, walk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = find_chunk(kind)
    cut_rows(monkeypatch, chunk, 0)
    use_walk(monkeypatch, chunk, walk)

    def make(rows: Sequence[Row]) -> Any:
        return make_walked(kind, 64, half_path, torch.float32, rows=rows)()

    check_going_on(make, half_path, partial(leave_states, half_path))


@WALKED
def test_a_long_row_leaves_waypoints_in_its_own_parts(half_path: Path, kind: str) -> None:
    """Thousands of tokens, cut as the kernel cuts them, against the reference token by token."""
    rows = [Row(4500, replayed=2)]
    batch = make_walked(kind, 64, half_path, torch.float32, rows=rows)()
    check_waypoints_against_reference(batch, half_path, rows, [(0, done) for done in range(512, 4500, 512)])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@WALKED
def test_a_graph_follows_the_table(kind: str) -> None:
    """Captured with waypoints at some places, replayed with others, and with none; the host waits for nothing."""
    path = Path("cuda", torch.bfloat16)
    batch, lines = place(make_walked(kind, 64, path, torch.float32)(), ROWS, PLACES, path.device)
    table = batch.rows.waypoints
    assert table is not None
    first = table.clone()
    with no_waits():
        batch.run(path)
    placed = torch.nonzero(torch.isin(first, torch.tensor(lines, device=path.device)))[:, 0]
    other = torch.full_like(first, -1)
    other[placed] = first[placed].flip(0)
    other[placed[0]] = -1

    def convolve() -> list[Tensor]:
        return [leave_inputs(path, batch)[0]] if kind == "delta" else []

    mutated = [batch.state, *([batch.lines] if kind == "delta" else [])]
    for entries in (other, torch.full_like(first, -1)):
        table.copy_(first)
        check_replay(lambda: [batch.run(path), *convolve()], mutated, partial(table.copy_, entries))


@pytest.mark.gpu
@WALKED
def test_waypoints_compile_nothing_while_serving(kind: str) -> None:
    """Whatever their number, and wherever their table begins."""
    from deltaline_kernels.conv1d.prefill import prefill_kernel

    walks = importlib.import_module(f"deltaline_kernels.{FAMILIES[kind]}.hopper_chunk")
    kernels = [walks.walk_kernel, prefill_kernel]

    def variants() -> int:
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    path = Path("cuda", torch.bfloat16)
    for num_short in range(6):
        rows = [Row(1)] * num_short + ROWS[1:]
        places = [(i + num_short - 1, done) for i, done in PLACES[:num_short]]
        batch, _ = place(make_walked(kind, 64, path, torch.float32, rows=rows)(), rows, places, path.device)
        batch.run(path)
        if kind == "delta":
            leave_inputs(path, batch)
        if num_short == 1:
            before = variants()
    assert variants() == before > 0


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none")
@WALKED
def test_a_walk_takes_no_more_shared_memory_for_waypoints(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for a Hopper GPU; where there are no waypoints they are no argument."""
    monkeypatch.setattr(find_chunk(kind), "can_walk", lambda *_: False)
    name = {"delta": "_advance", "mamba2": "_walk"}[kind]
    plain = make_walked(kind, 64, Path("cpu", torch.bfloat16), torch.float32)()
    placed, _ = place(plain, ROWS, PLACES, "cpu")
    found = [compile_walk(monkeypatch, batch, name) for batch in (plain, placed)]
    assert [kernel.src.signature["waypoints"] for kernel in found] == ["constexpr", "*i32"]
    assert found[0].metadata.shared == found[1].metadata.shared


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none")
@WALKED
def test_a_walk_for_hopper_compiles_with_waypoints(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_chunk(kind)
    batch, _ = place(make_walked(kind, 64, Path("cpu", torch.bfloat16), torch.float32)(), ROWS, PLACES, "cpu")
    assert compile_walk(monkeypatch, batch, "walk_kernel").src.signature["waypoints"] == "*i32"


def compile_walk(monkeypatch: pytest.MonkeyPatch, batch: Any, name: str) -> Any:
    """Return the compiled kernel of that name which the batch would launch."""
    moved = batch.replaced(**{field.name: on_meta(getattr(batch, field.name)) for field in fields(batch)})
    (found,) = (made for made in compile_launches(monkeypatch, moved.run_public) if made.metadata.name == name)
    return found


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
