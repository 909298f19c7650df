"""States gathered from a pool and scattered into it: the bytes of the plain packing, and every bit back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.packed_states import LayerArrays, LineArrays, SpanArrays, TokenArrays, pack
from rigs.small_models import FALCON, GATED_DELTA_NET, HYBRID, KIMI, LFM2, MAMBA1, MAMBA2, NEMOTRON

from deltaline_server.layers.kv_cache import KvState
from deltaline_server.layers.state_pool import LayerState, StateOptions, StatePool
from deltaline_server.models.model import Model, ModelOptions, load_model
from deltaline_server.snapshots.device import transfer as module
from deltaline_server.snapshots.device.transfer import StatePlace, StateTransfer, staging_bytes
from deltaline_server.snapshots.layout import SpanProgress, StateLayout, state_bytes
from deltaline_server.snapshots.tiers import layer_numbers, make_layout

MAX_DRAFT, PAGE = 4, 16
MODELS: dict[str, tuple[dict[str, Any], tuple[range, ...] | None]] = {
    "gated_delta_net": (GATED_DELTA_NET, None),
    "mamba1": (MAMBA1, None),
    "mamba2": (MAMBA2, None),
    "hybrid": (HYBRID, None),
    "short convolutions": (LFM2, None),
    "latents": (KIMI, None),
    "layers without a state": (NEMOTRON, None),
    "two states in a layer": (FALCON, (range(1, 2), range(0, 1))),
    "spans in another order": (
        HYBRID | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
        (range(2, 4), range(0, 2)),
    ),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COMMITS = np.array([[30, 0, 3], [33, 1, 0]])


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, device: str, tmp_path: Path) -> Model:
    config, spans = MODELS[request.param]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options = ModelOptions(torch.device(device), random_init=path, dtype=torch.bfloat16, spans=spans, max_context=160)
    return load_model(options)


def filled_pool(model: Model) -> StatePool:
    """A pool with other bits everywhere, but for the null line."""
    pool = model.make_pool(StateOptions(num_lines=4, max_draft=MAX_DRAFT, page_size=PAGE))
    generator = torch.Generator(model.device).manual_seed(1)
    for state in pool.layers:
        for tensor in state.tensors if isinstance(state, LayerState) else (state.k_pages, state.v_pages):
            first = 1 if isinstance(state, LayerState) else 0
            tensor[first:] = torch.randn(tensor[first:].shape, generator=generator, device=model.device)
    return pool


def words(tensor: torch.Tensor) -> Any:
    return tensor.cpu().view({2: torch.uint16, 4: torch.uint32}[tensor.itemsize]).numpy()


def arrays(state: LayerState | KvState, line: int, pages: Any) -> LayerArrays:
    """Copies of a line, or of the tokens on pages."""
    if isinstance(state, LayerState):
        return LineArrays(*(words(tensor[line]) for tensor in state.tensors))
    of_pages = torch.from_numpy(pages.astype(np.int64)).to(state.k_pages.device)
    return TokenArrays(*(words(part[of_pages].flatten(0, 1)) for part in (state.k_pages, state.v_pages)))


def progress_of(position: int, spans: int) -> list[SpanProgress]:
    first = SpanProgress(1, position, replay=2, draft_half=1, records_1=2, num_commits=len(COMMITS))
    return [first, SpanProgress(1, position)][:spans]


def gathered(model: Model, pool: StatePool, layout: StateLayout, spans: Any, place: StatePlace) -> Any:
    memory = np.full(state_bytes(layout.sections(spans)), 0xEE, dtype=np.uint8)
    mover = StateTransfer(layout, layer_numbers(model), pool)
    mover.gather(spans, place, COMMITS, memory)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    assert (mover.commits(spans, memory) == COMMITS).all()
    return memory


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece_bytes", [32 << 20, 5000], ids=["at once", "in pieces"])
@pytest.mark.parametrize("position", [37, 32], ids=["a page that is not full", "full pages"])
def test_what_is_gathered_is_packed_and_comes_back(
    model: Model, position: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    pool = filled_pool(model)
    layout, numbers = make_layout(model, pool), layer_numbers(model)
    assert numbers == [layer.number for layer in layout.layers]
    # The same states as layers that have one each.
    plain = replace(layout, layers=tuple(replace(layer, number=i) for i, layer in enumerate(layout.layers)))
    spans = progress_of(position, len(model.spans))
    pages = np.array([5, 2, 7] if position > 32 else [5, 2], dtype=np.int32)
    lines = (2, 3)[: len(spans)]
    memory = gathered(model, pool, layout, spans, StatePlace(lines, pages))
    span_of = {layer.number: layer.span for layer in plain.layers}
    layers = dict(enumerate(pool.layers))
    before = {number: arrays(state, lines[span_of[number]], pages) for number, state in layers.items()}
    expected = np.full_like(memory, 0xDD)
    pack(plain, plain.sections(spans), before, {0: SpanArrays(COMMITS)}, expected)
    np.testing.assert_array_equal(memory, expected)

    new_pages = np.array([9, 1, 4], dtype=np.int32)[: len(pages)]
    StateTransfer(layout, numbers, pool).scatter(spans, StatePlace((1, 1)[: len(spans)], new_pages), memory)
    for state in layers.values():
        if isinstance(state, LayerState):
            assert not state.tensors[0][0].any()
        elif position % PAGE:
            assert not state.k_pages[new_pages[-1], position % PAGE :].any()
    again = gathered(model, pool, layout, spans, StatePlace((1, 1)[: len(spans)], new_pages))
    np.testing.assert_array_equal(again, memory)
    untouched = {number: arrays(state, lines[span_of[number]], pages) for number, state in layers.items()}
    for number, one in untouched.items():
        for left, right in zip(vars(one).values(), vars(before[number]).values(), strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("device", ["cpu"])
def test_what_was_never_begun_is_not_written(model: Model) -> None:
    pool = filled_pool(model)
    layout, spans = make_layout(model, pool), [SpanProgress()] * len(model.spans)
    place = StatePlace((0,) * len(spans), np.zeros(0, dtype=np.int32))
    memory = np.full(state_bytes(layout.sections(spans)), 0xEE, dtype=np.uint8)
    mover = StateTransfer(layout, layer_numbers(model), pool)
    mover.gather(spans, place, np.zeros((0, 3), dtype=np.int64), memory)
    assert not memory.any()
    mover.scatter(spans, place, np.full_like(memory, 0xEE))
    for state in pool.layers:
        if isinstance(state, LayerState):
            assert not any(tensor[0].any() for tensor in state.tensors)


@pytest.mark.parametrize("device", ["cpu"])
def test_what_is_zero_beside_what_was_written(model: Model) -> None:
    """Columns and records that a state does not hold are zero in its line, whatever was there."""
    pool = filled_pool(model)
    layout, numbers = make_layout(model, pool), layer_numbers(model)
    spans = [SpanProgress(1, 5)] * len(model.spans)
    pages = np.array([3], dtype=np.int32)
    lines = (2,) * len(spans)
    memory = np.zeros(state_bytes(layout.sections(spans)), dtype=np.uint8)
    mover = StateTransfer(layout, numbers, pool)
    mover.gather(spans, StatePlace(lines, pages), np.zeros((0, 3), dtype=np.int64), memory)
    mover.scatter(spans, StatePlace((1,) * len(spans), np.array([6], dtype=np.int32)), memory)
    for state in pool.layers:
        if isinstance(state, LayerState):
            columns = state.conv.shape[1] - MAX_DRAFT
            assert torch.equal(state.conv[1, :columns], state.conv[2, :columns])
            assert not state.conv[1, columns:].any() and not state.drafts[1].any()


@pytest.mark.parametrize("device", ["cpu"])
def test_its_memory_is_as_large_as_is_told(model: Model) -> None:
    pool = filled_pool(model)
    layout = make_layout(model, pool)
    mover = StateTransfer(layout, layer_numbers(model), pool)
    tensors = [value for value in vars(mover).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) == staging_bytes(layout, pool.kv)
