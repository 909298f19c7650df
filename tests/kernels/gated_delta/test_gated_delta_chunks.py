"""Long rows of 16-bit values: whole or in parts, in tiles or with masks, by either walk through their chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.gated_delta.test_gated_delta import check_against_reference
from rigs.kernels.batches import Batch, Layer, Row, make_batch, plan_rows
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close

from deltaline_kernels.gated_delta.inputs import DeltaHeads, DeltaInputs
from deltaline_kernels.rows import StateLines

chunk = pytest.importorskip("deltaline_kernels.gated_delta.chunk", reason="triton is not installed")
plan = pytest.importorskip("deltaline_kernels.gated_delta.plan")
launch = pytest.importorskip("deltaline_kernels.gated_delta.launch", reason="triton is not installed")

# Values between the tokens of qkv: with 8 they begin at multiples of 16 bytes and tiles are copied whole.
ALIGNED = 8
LAYERS = {
    "64-64": Layer(H=1, HV=1, K=64, V=64),
    "128-128-grouped": Layer(H=1, HV=2, K=128, V=128),
    "64-128-three-of-a-group": Layer(H=1, HV=3, K=64, V=128),
    "128-64": Layer(H=1, HV=1, K=128, V=64),
}
ROWS = [
    Row(5),
    Row(200, replayed=3, half=1),
    Row(64, fresh=True),
    Row(0),
    Row(70, skipped=True),
    Row(129, to="other", replayed=2),
    Row(128, to="nowhere"),
    Row(1, replayed=1),
    Row(400),
]


@pytest.fixture(params=[pytest.param(dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16)])
def half_path(request: pytest.FixtureRequest) -> Path:
    """The dtypes of 16 bits on a GPU; the interpreter has a fixture of its own."""
    return Path("cuda", request.param)


def in_parts(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Cut rows into parts of `length` tokens; 0 leaves them whole."""

    def choose(_heads: object, _num_rows: int, _num_tokens: int, max_length: int) -> object:
        num_parts = -(-max_length // length) if length else 1
        return plan.RowSplits(max(num_parts, 1), length or max(max_length, 1))

    monkeypatch.setattr(chunk, "choose_plan", choose)


def use_walk(monkeypatch: pytest.MonkeyPatch, walk: str) -> list[str]:
    """Let only the one walk run; what is returned says in the end which one did."""
    ran: list[str] = []
    if walk == "triton":
        monkeypatch.setattr(chunk, "can_walk", lambda *_: False)
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    launch_walk = chunk.launch_walk

    def spy(*args: Any, **kwargs: Any) -> None:
        ran.append("hopper")
        launch_walk(*args, **kwargs)

    monkeypatch.setattr(chunk, "launch_walk", spy)
    return ran


@pytest.mark.parametrize("walk", ["hopper", "triton"])
@pytest.mark.parametrize("length", [0, 64, 128])
@pytest.mark.parametrize("layer", LAYERS)
def test_chunks_match_the_reference(
    half_path: Path, layer: str, length: int, walk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch, length)
    ran = use_walk(monkeypatch, walk)
    batch = make_batch(ROWS, half_path, LAYERS[layer], max_short=1, padding=ALIGNED)
    check_against_reference(batch, half_path, half_path.dtype)
    assert bool(ran) == (walk == "hopper")


def test_parts_leave_what_the_whole_row_leaves(half_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(H=1, HV=1, K=64, V=64)
    whole = make_batch([Row(330, replayed=2)], half_path, layer, padding=ALIGNED)
    cut = whole.clone()
    in_parts(monkeypatch, 0)
    want = whole.run_delta(half_path)
    in_parts(monkeypatch, 128)
    assert_close("o", cut.run_delta(half_path), want, half_path.dtype)
    assert_close("state", cut.state, whole.state, half_path.dtype)


def test_parts_round_a_16_bit_state_once(half_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 64)
    rows = [Row(150, replayed=1), Row(65)]
    batch = make_batch(rows, half_path, LAYERS["64-64"], state_dtype=torch.bfloat16, padding=ALIGNED)
    check_against_reference(batch, half_path, torch.bfloat16)


@pytest.mark.parametrize("length", [0, 64])
def test_row_in_chunks_does_not_depend_on_its_neighbours(
    half_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with NaN in the tokens of all others, also those that share its last tile."""
    in_parts(monkeypatch, length)
    layer = LAYERS["64-64"]
    rows = [Row(30), Row(100, replayed=1), Row(65, fresh=True), Row(64)]
    whole = make_batch(rows, half_path, layer, padding=ALIGNED)
    want = whole.run_delta(half_path)
    again = make_batch(rows, half_path, layer, padding=ALIGNED)
    assert torch.equal(again.run_delta(half_path), want)
    start = 0
    for i, row in enumerate(rows):
        alone = only_row(make_batch(rows, half_path, layer, padding=ALIGNED), rows, i)
        others = torch.ones(alone.qkv.shape[0], dtype=torch.bool, device=half_path.device)
        others[start : start + row.length] = False
        for tokens in (alone.qkv, alone.a, alone.b):
            tokens[others] = torch.nan
        got = alone.run_delta(half_path)
        assert torch.equal(got[~others], want[~others])
        assert not got[others].any()
        assert torch.equal(alone.state[2 * i + 1], whole.state[2 * i + 1])
        start += row.length


def only_row(batch: Batch, rows: list[Row], i: int) -> Batch:
    """Return the batch with all rows skipped but row i."""
    kept = [row if i == j else replace(row, skipped=True) for j, row in enumerate(rows)]
    return replace(batch, rows=plan_rows(kept, batch.layer.M, batch.qkv.device.type))


@pytest.mark.parametrize("walk", ["hopper", "triton"])
def test_lines_lie_anywhere(half_path: Path, walk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2^31 values of the state, for tokens, chunks and parts; with lines counted from 0, as engines do."""
    use_walk(monkeypatch, walk)
    layer, half = LAYERS["64-64"], torch.bfloat16
    rows = [Row(1), Row(130, replayed=2)]
    batch = make_batch(rows, half_path, layer, max_short=1, state_dtype=half, padding=ALIGNED)
    near = batch.clone()
    outputs = near.run_delta(half_path)
    far = 2**31 // (layer.V * layer.K) + 7
    ours = slice(far - 1, far - 1 + batch.state.shape[0])
    pool = torch.zeros(ours.stop, *batch.state.shape[1:], dtype=half, device=half_path.device)
    drafts = torch.zeros(ours.stop, *batch.drafts.shape[1:], device=half_path.device)
    drafts[ours] = batch.drafts
    control = batch.rows.control.clone()
    control[1:3] = torch.where(control[1:3] > 0, control[1:3] + far, control[1:3])
    placed = replace(batch.rows, control=control)
    heads = DeltaHeads(layer.H, layer.HV, layer.K, layer.V, layer.K**-0.5, 1e-6)
    for length in (0, 64):
        in_parts(monkeypatch, length)
        pool[ours] = batch.state
        o = torch.empty_like(outputs)
        inputs = DeltaInputs(batch.qkv, batch.a, batch.b, batch.A_log, batch.dt_bias, heads)
        launch.gated_delta_triton(inputs, StateLines(pool, drafts, shift=1), placed, o)
        assert_close("o", o, outputs, half_path.dtype)
        assert_close("state", pool[ours], near.state, half)


def test_chunks_run_in_a_cuda_graph(half_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 128)
    batch = make_batch([Row(300)], half_path, LAYERS["64-64"], padding=ALIGNED)
    before = batch.state.clone()
    want = batch.run_delta(half_path)
    after = batch.state.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = batch.run_delta(half_path)
    batch.state.copy_(before)
    graph.replay()
    assert torch.equal(got, want)
    assert torch.equal(batch.state.nan_to_num(7.0), after.nan_to_num(7.0))
