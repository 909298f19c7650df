"""A state that went through the canonical layout continues bit by bit as the sequence that it is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.packed_states import LayerArrays, LineArrays, TokenArrays, pack, unpack
from rigs.small_models import (
    EXPERTS,
    FALCON,
    GATED_DELTA_NET,
    HIDDEN,
    HYBRID,
    KIMI,
    LFM2,
    LFM2_MOE,
    MAMBA1,
    MAMBA2,
    NEMOTRON,
    ZAMBA,
)
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_server.layers.kv_cache import KvState
from deltaline_server.layers.state_pool import LayerState, StateOptions, StatePool
from deltaline_server.models.model import Model, ModelOptions, load_model
from deltaline_server.snapshots.layout import SpanProgress, StateLayer, StateLayout, state_bytes

CPU = torch.device("cpu")
MAX_DRAFT, PAGE, NUM_PAGES = 4, 16, 4
FAMILIES = {"gated_delta": GATED_DELTA_NET, "mamba1": MAMBA1, "mamba2": MAMBA2, "hybrid": HYBRID, "experts": EXPERTS}
FAMILIES |= {"nemotron": NEMOTRON, "falcon": FALCON, "zamba": ZAMBA, "lfm2": LFM2, "lfm2_moe": LFM2_MOE, "kimi": KIMI}
# Tokens of a prefill, and of the verify behind it, of which so many are accepted.
PREFILL, VERIFY = 37, 3


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FAMILIES[request.param]))
    return load_model(ModelOptions(CPU, random_init=path, dtype=torch.bfloat16))


def run(model: Model, pool: StatePool, line: int, position: int, count: int, **fields: int) -> Tensor:
    """Run tokens that follow from their position on a line, from its half 1 where a verify was before."""
    generator = torch.Generator().manual_seed(position)
    hidden = torch.randn(count, HIDDEN, generator=generator).to(model.dtype)
    values = {"read_line": line if position else 0, "num_committed": count, "num_replayed": 0, "draft_half": 0} | fields
    lists: dict[str, Any] = {name: [value] for name, value in values.items()}
    rows = Rows.build([count], write_line=[line], position=[position], max_short=MAX_DRAFT, device=CPU, **lists)
    return model.forward(0, hidden, rows, pool)


def words(tensor: Tensor) -> Any:
    """The tensor's own memory as unsigned integers."""
    kind = {2: torch.uint16, 4: torch.uint32}[tensor.itemsize]
    return tensor.view(kind).numpy()


def line_arrays(state: LayerState | KvState, line: int, tokens: int) -> LayerArrays:
    """A line's own memory, or copies of the tokens on its pages."""
    if isinstance(state, LayerState):
        return LineArrays(*(words(tensor[line]) for tensor in state.tensors))
    pages = state.page_table[line, : -(-tokens // PAGE)].long()
    return TokenArrays(*(words(part[pages].flatten(0, 1)[:tokens]) for part in (state.k_pages, state.v_pages)))


def put_tokens(state: KvState, line: int, arrays: TokenArrays) -> None:
    pages = state.page_table[line, :NUM_PAGES].long()
    parts = ((state.k_pages, arrays.keys), (state.v_pages, arrays.values))
    for part, values in parts[: 1 if state.v_pages is state.k_pages else 2]:  # of latents they are the same
        padded = np.zeros((part[pages].flatten(0, 1).shape[0], *values.shape[1:]), dtype=values.dtype)
        padded[: len(values)] = values
        words(part)[pages] = padded.reshape(len(pages), PAGE, *values.shape[1:])


@pytest.mark.parametrize("accepted", [None, 0, 2, 3], ids=lambda count: f"accepted_{count}")
def test_a_stored_state_continues_as_its_sequence(model: Model, accepted: int | None) -> None:
    pool = model.make_pool(StateOptions(num_lines=2, max_draft=MAX_DRAFT, page_size=PAGE))
    if pool.page_table is not None:
        pool.page_table[1, :NUM_PAGES] = torch.arange(1, NUM_PAGES + 1)
        pool.page_table[2, :NUM_PAGES] = torch.arange(2 * NUM_PAGES, NUM_PAGES, -1)
    run(model, pool, 1, 0, PREFILL)
    progress = SpanProgress(step=1, position=PREFILL)
    if accepted is not None:
        run(model, pool, 1, PREFILL, VERIFY, num_committed=0)
        progress = SpanProgress(2, PREFILL + accepted, 0, accepted, draft_half=1, records_1=accepted)
    layout = StateLayout(
        tuple(StateLayer(number, 0, shape) for number, shape in enumerate(model.shapes)), 1, 2, 4, MAX_DRAFT
    )
    sections = layout.sections([progress])
    memory = np.full(state_bytes(sections), 0xFF, dtype=np.uint8)
    tokens = progress.num_tokens
    pack(layout, sections, {i: line_arrays(state, 1, tokens) for i, state in enumerate(pool.layers)}, {}, memory)

    for state in pool.layers:  # poisoned: what is not put back would be seen
        if isinstance(state, LayerState):
            for tensor in state.tensors:
                tensor[2] = float("nan")
        else:
            for part in (state.k_pages, state.v_pages):
                part[state.page_table[2, :NUM_PAGES].long()] = float("nan")
    back = {i: line_arrays(state, 2, tokens) for i, state in enumerate(pool.layers)}
    unpack(layout, sections, memory, back)
    for i, state in enumerate(pool.layers):
        arrays = back[i]
        if isinstance(arrays, TokenArrays):
            put_tokens(state, 2, arrays)

    position, replay, half = progress.position, progress.replay, progress.draft_half
    for count in (1, 5, 1):
        outputs = [run(model, pool, line, position, count, num_replayed=replay, draft_half=half) for line in (1, 2)]
        assert torch.equal(*outputs) and not outputs[0].isnan().any()
        position, replay = position + count, 0
