"""Lines of states on their way: few operations however many layers there are, and every bit where the plain packing has
it, whichever kinds of layers and spans are mixed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rigs.packed_states import LayerArrays, LineArrays, SpanArrays, TokenArrays, pack, unpack
from rigs.states import ATTENTION, GATED_DELTA, KDA, LATENTS, MAMBA, MAX_DRAFT, SCAN, SHORT_CONV, random_words
from torch.utils._python_dispatch import TorchDispatchMode

from deltaline_server.layers.kv_cache import KvState
from deltaline_server.layers.shapes import GatedDeltaNetShape, MixerShape
from deltaline_server.layers.state_pool import LayerState, StateOptions, StatePool
from deltaline_server.snapshots.device import transfer as module
from deltaline_server.snapshots.device.transfer import StatePlace, StateTransfer
from deltaline_server.snapshots.layout import SpanProgress, StateLayer, StateLayout, state_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGE, NUM_LINES = 16, 6
Array = np.ndarray[Any, Any]


class Operations(TorchDispatchMode):
    """Counts what would be launched, and does none of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_launched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or func is torch.ops.aten.lift_fresh.default:
            return func(*args, **kwargs or {})
        self.num_launched += 1
        return args[0]


@pytest.mark.parametrize("num_spans", [1, 48], ids=["one span", "a span per layer"])
@pytest.mark.parametrize(
    ("progress", "most"),
    [(SpanProgress(1, 8192), 14), (SpanProgress(1, 8192, replay=4, draft_half=1, records_0=2, records_1=4), 28)],
    ids=["as a prefill leaves it", "with drafts of both halves"],
)
def test_a_state_of_48_layers_is_few_operations(progress: SpanProgress, most: int, num_spans: int) -> None:
    """At the size of a model of 27 billion parameters, whose lines take 154 MB or more: in memory that is none."""
    shape = GatedDeltaNetShape(16, 48, 128, 128, 4)
    layers = tuple(StateLayer(i, i % num_spans, shape) for i in range(48))
    layout = StateLayout(layers, num_spans, itemsize=2, state_itemsize=4, max_draft=8)
    options = StateOptions(num_lines=2, max_draft=8)
    pool = StatePool([shape] * 48, options, dtype=torch.bfloat16, device=torch.device("meta"))
    transfer, spans = StateTransfer(layout, range(48), pool), [progress] * num_spans
    memory = np.zeros(state_bytes(layout.sections(spans)), dtype=np.uint8)
    place, no_commits = StatePlace((1,) * num_spans, np.zeros(0, dtype=np.int32)), np.zeros((0, 3), dtype=np.int64)
    with Operations() as operations:
        transfer.gather(spans, place, no_commits, memory)
        num_gathering = operations.num_launched
        transfer.scatter(spans, place, memory)
    assert num_gathering <= most
    assert operations.num_launched - num_gathering <= most + 2  # conv lines and drafts are zeroed


def drawn_layout(rng: np.random.Generator) -> tuple[StateLayout, list[int]]:
    """Layers of any kinds in any spans, and their numbers in the order in which a pool has them."""
    kinds: list[MixerShape] = [
        GATED_DELTA,
        replace(GATED_DELTA, num_value_heads=2),
        KDA,
        SCAN,
        MAMBA,
        SHORT_CONV,
        ATTENTION,
        LATENTS,
    ]
    num_layers, num_spans = int(rng.integers(1, 14)), int(rng.integers(1, 4))
    numbers = sorted(rng.choice(20, num_layers, replace=False).tolist())
    weights = rng.dirichlet(np.full(len(kinds), 0.5))
    layers = tuple(
        StateLayer(number, int(rng.integers(num_spans)), kinds[rng.choice(len(kinds), p=weights)]) for number in numbers
    )
    order = rng.permutation(num_spans).tolist()
    in_pool = [layer.number for layer in sorted(layers, key=lambda layer: order[layer.span])]
    return StateLayout(layers, num_spans, 2, 4, MAX_DRAFT, max_tokens=500), in_pool


def drawn_progress(rng: np.random.Generator, num_spans: int) -> list[SpanProgress]:
    """How far each span is, often as far as the one before."""
    found, position = [SpanProgress(1, int(rng.integers(100)), num_commits=int(rng.integers(3)))], 0
    for span in range(num_spans):
        half, kept, other = (int(rng.integers(most + 1)) for most in (1, MAX_DRAFT, MAX_DRAFT))
        drafts: dict[str, int] = {"draft_half": half, f"records_{half}": kept, f"records_{1 - half}": other}
        if span == 0:
            found[0] = replace(found[0], replay=int(rng.integers(kept + 1)), **drafts)
            position = found[0].position
        elif rng.random() < 0.6:
            found.append(replace(found[-1], num_commits=0))
        else:
            found.append(SpanProgress(1, position, **drafts))
    return found


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def filled_pool(shapes: list[MixerShape], rng: np.random.Generator, device: str) -> StatePool:
    """A pool with any bits everywhere, but for the null line."""
    options = StateOptions(NUM_LINES, MAX_DRAFT, page_size=PAGE)
    pool = StatePool(shapes, options, dtype=torch.bfloat16, device=torch.device(device))
    for state in pool.layers:
        is_lines = isinstance(state, LayerState)
        for tensor in state.tensors if is_lines else (state.k_pages, state.v_pages):
            bits = random_words(rng, tuple(tensor.shape), tensor.itemsize)
            words(tensor).copy_(torch.from_numpy(bits.view(f"<i{tensor.itemsize}")))
            if is_lines:
                tensor[0].zero_()
    return pool


def copied(state: LayerState | KvState) -> list[Array]:
    """All bits of a layer's state."""
    tensors = state.tensors if isinstance(state, LayerState) else (state.k_pages, state.v_pages)
    return [words(tensor).cpu().numpy().view(f"<u{tensor.itemsize}").copy() for tensor in tensors]


def held(state: list[Array], line: int, pages: Array) -> LayerArrays:
    """Views of a line, or copies of the tokens on pages."""
    if len(state) == 3:
        return LineArrays(*(tensor[line] for tensor in state))
    return TokenArrays(*(tensor[pages].reshape(-1, *tensor.shape[2:]) for tensor in state))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(24))
def test_any_layers_and_spans_are_packed_and_come_back(seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(module, "PIECE_BYTES", int(rng.choice([1, 3000, 1 << 25])))
    layout, numbers = drawn_layout(rng)
    layers = {layer.number: layer for layer in layout.layers}
    pool = filled_pool([layers[number].shape for number in numbers], rng, device)
    spans = drawn_progress(rng, layout.num_spans)
    sections = layout.sections(spans)
    commits = rng.integers(0, 1 << 40, (spans[0].num_commits, 3))
    # Often the spans have one line, and some were never begun.
    lines = rng.choice([0, 1, 2, 3], layout.num_spans, p=[0.1, 0.5, 0.2, 0.2])
    num_pages = -(-spans[0].position // PAGE)
    pages, new_pages = np.split(rng.permutation(2 * num_pages).astype(np.int32) + 1, 2)
    place = StatePlace(tuple(lines.tolist()), pages)
    new_place = StatePlace(tuple(np.where(lines, lines + 3, 0).tolist()), new_pages)
    memory, expected = (np.full(state_bytes(sections), fill, dtype=np.uint8) for fill in (0xEE, 0xDD))
    transfer = StateTransfer(layout, numbers, pool)

    transfer.gather(spans, place, commits, memory)
    if device == "cuda":
        torch.cuda.synchronize()
    bits = {number: copied(state) for number, state in zip(numbers, pool.layers, strict=True)}
    arrays = {number: held(state, lines[layers[number].span], pages) for number, state in bits.items()}
    pack(layout, sections, arrays, {0: SpanArrays(commits)}, expected)
    np.testing.assert_array_equal(memory, expected)

    transfer.scatter(spans, new_place, memory)
    targets = {number: held(state, new_place.lines[layers[number].span], new_pages) for number, state in bits.items()}
    unpack(layout, sections, memory, targets)
    for number, state in zip(numbers, pool.layers, strict=True):
        if isinstance(state, LayerState):
            for now, then in zip(copied(state), bits[number], strict=True):
                then[0] = 0  # nothing is written of spans that were never begun
                np.testing.assert_array_equal(now, then)
    again = np.full_like(memory, 0xCC)
    transfer.gather(spans, new_place, commits, again)
    if device == "cuda":
        torch.cuda.synchronize()
    np.testing.assert_array_equal(again, memory)


@pytest.mark.gpu
def test_lines_that_are_gigabytes_apart_are_copied_and_zeroed() -> None:
    """In a block of 6 GiB, whose bytes 32 bits can't count."""
    shape = GatedDeltaNetShape(16, 48, 128, 128, 4)
    layout = StateLayout(tuple(StateLayer(i, 0, shape) for i in range(4)), 1, 2, 4, max_draft=2)
    device = torch.device("cuda")
    pool = StatePool([shape] * 4, StateOptions(num_lines=500, max_draft=2), dtype=torch.bfloat16, device=device)
    transfer, spans = StateTransfer(layout, range(4), pool), [SpanProgress(1, 9, records_0=2, records_1=2)]
    generator = torch.Generator(device).manual_seed(0)
    blocks = [words(tensor) for block in pool.line_blocks for tensor in block.tensors]
    for block in blocks:
        for line in (1, 499, 500):
            block[:, line] = torch.randint(1, 30000, block[:, line].shape, generator=generator, device=device)
    state, beside = ([block[:, line].clone() for block in blocks] for line in (1, 499))
    memory, no_pages = np.empty(state_bytes(layout.sections(spans)), dtype=np.uint8), np.zeros(0, dtype=np.int32)
    transfer.gather(spans, StatePlace((1,), no_pages), np.zeros((0, 3), dtype=np.int64), memory)
    torch.cuda.synchronize()
    transfer.scatter(spans, StatePlace((500,), no_pages), memory)
    pool.zero(np.array([1, 3]))
    for block, expected, neighbour in zip(blocks, state, beside, strict=True):
        # A state with as many records as there can be holds all of its line.
        assert torch.equal(block[:, 500], expected)
        assert torch.equal(block[:, 499], neighbour) and not block[:, 1].any()
