"""States put into the canonical layout and taken out of it: bit by bit, whatever lies beside what was written."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.packed_states import LayerArrays, LineArrays, SpanArrays, TokenArrays, pack, unpack
from rigs.states import (
    ATTENTION,
    GATED_DELTA,
    KDA,
    LATENTS,
    LAYOUT,
    MAMBA,
    MAX_DRAFT,
    MOVED,
    SCAN,
    SHORT_CONV,
    SNAPSHOT,
    random_words,
)

from deltaline_server.layers.shapes import MixerShape, RecurrentShape
from deltaline_server.snapshots.layout import (
    VERSION,
    Part,
    SpanProgress,
    StateLayer,
    StateLayout,
    conv_parts,
    state_bytes,
)

SPANS = {
    0: SpanArrays(np.array([[60, 0, 3], [64, 1, 0]]), bytes(range(77))),
    1: SpanArrays(np.array([[60, 0, 3]])),
}


def make_arrays(shape: MixerShape, seed: int = 0) -> LayerArrays:
    """A layer with something everywhere, also where its owner has not written."""
    rng = np.random.default_rng(seed)
    if not isinstance(shape, RecurrentShape):
        size = 100, shape.num_kv_heads, shape.head_dim
        return TokenArrays(random_words(rng, size, 2), random_words(rng, size, 2))
    return LineArrays(
        random_words(rng, (shape.conv_width - 1 + MAX_DRAFT, shape.conv_channels), 2),
        random_words(rng, shape.state, 4),
        random_words(rng, (2, MAX_DRAFT, shape.record), 4),
    )


def make_layers(seed: int = 0) -> dict[int, LayerArrays]:
    return {layer.number: make_arrays(layer.shape, seed + layer.number) for layer in LAYOUT.layers}


def packed(spans: tuple[SpanProgress, ...], layers: dict[int, LayerArrays]) -> NDArray[np.uint8]:
    sections = LAYOUT.sections(spans)
    memory = np.full(state_bytes(sections), 0xAA, dtype=np.uint8)
    pack(LAYOUT, sections, layers, SPANS, memory)
    return memory


def written(arrays: LayerArrays, progress: SpanProgress, shape: MixerShape) -> list[NDArray[Any]]:
    """What a layer's owner has written, as copies in which the rest is zero."""
    if isinstance(arrays, TokenArrays):
        tokens = [arrays.keys.copy(), arrays.values.copy()]
        for array in tokens:
            array[progress.position + progress.pending :] = 0
        return tokens
    assert isinstance(shape, RecurrentShape)
    conv, drafts = arrays.conv.copy(), arrays.drafts.copy()
    conv[shape.conv_width - 1 + progress.records[progress.draft_half] :] = 0
    for half, records in enumerate(progress.records):
        drafts[half, records:] = 0
    return [conv, arrays.recurrent, drafts]


@pytest.mark.parametrize("spans", [SNAPSHOT, MOVED], ids=["snapshot", "moved"])
def test_what_was_written_comes_back_and_the_rest_is_zero(spans: tuple[SpanProgress, ...]) -> None:
    layers, back = make_layers(), make_layers(100)
    memory = packed(spans, layers)
    found = unpack(LAYOUT, LAYOUT.sections(spans), memory, back)
    for layer in LAYOUT.layers:
        expected = written(layers[layer.number], spans[layer.span], layer.shape)
        for one, other in zip(expected, vars(back[layer.number]).values(), strict=True):
            np.testing.assert_array_equal(one, other)
    if spans is MOVED:
        assert [found[i].reply for i in (0, 1)] == [SPANS[0].reply, b""]
        assert all((found[i].commits == SPANS[i].commits).all() for i in (0, 1))
    else:
        assert all(each.reply == b"" and each.commits.shape == (0, 3) for each in found.values())


def test_no_byte_of_what_was_not_written_gets_in() -> None:
    layers = make_layers()
    again = {number: replace(arrays) for number, arrays in layers.items()}
    for layer in LAYOUT.layers:
        values = written(layers[layer.number], SNAPSHOT[layer.span], layer.shape)
        again[layer.number] = type(layers[layer.number])(*values)
    assert (packed(SNAPSHOT, layers) == packed(SNAPSHOT, again)).all()
    sections = LAYOUT.sections(SNAPSHOT)
    memory = packed(SNAPSHOT, layers)
    between = [memory[each.offset + each.num_bytes : each.end] for each in sections]
    assert any(len(each) for each in between) and not any(each.any() for each in between)


KINDS = ["gated_delta", "kda", "mamba1", "mamba2", "short_conv", "attention", "latents"]


@pytest.mark.parametrize("shape", [GATED_DELTA, KDA, SCAN, MAMBA, SHORT_CONV, ATTENTION, LATENTS], ids=KINDS)
def test_a_rank_s_part_is_what_a_server_of_that_share_packs(shape: Any) -> None:
    progress = [SpanProgress(position=33, replay=1, records_0=3)]

    def layout_of(one: MixerShape) -> StateLayout:
        return StateLayout((StateLayer(0, 0, one),), 1, 2, 4, MAX_DRAFT)

    layout, half = layout_of(shape), layout_of(shape.shard(2))
    sections, parts = layout.sections(progress), half.sections(progress)
    whole = make_arrays(shape)
    memory = np.zeros(state_bytes(sections), dtype=np.uint8)
    pack(layout, sections, {0: whole}, {}, memory)
    for rank in range(2):
        rank_memory = np.zeros(state_bytes(parts), dtype=np.uint8)
        pack(half, parts, {0: share_of(whole, shape, rank)}, {}, rank_memory)
        for section, part in zip(sections, parts, strict=True):
            offset, count = section.share(rank, 2)
            assert count == part.num_bytes
            assert (memory[offset : offset + count] == rank_memory[part.offset : part.offset + count]).all(), part


def share_of(arrays: LayerArrays, shape: Any, rank: int) -> LayerArrays:
    """What one of two ranks has of a layer, cut by what its channels mean."""

    def cut(values: NDArray[Any], parts: list[tuple[int, int]]) -> NDArray[Any]:
        """Of the parts of each row, heads and channels of all of them; both have the one head that there is."""
        cuts = np.split(values, np.cumsum([size for _, size in parts])[:-1], axis=-1)
        halves = (
            part if count == 1 else np.split(part, 2, axis=-1)[rank]
            for part, (count, _) in zip(cuts, parts, strict=True)
        )
        return np.concatenate(list(halves), axis=-1)

    if isinstance(arrays, TokenArrays):
        head = rank % arrays.keys.shape[1]  # both have the one of latents
        return TokenArrays(arrays.keys[:, head : head + 1], arrays.values[:, head : head + 1])
    heads = shape.num_value_heads // 2
    return LineArrays(
        cut(arrays.conv, [(count, count * size) for _, count, size in conv_parts(shape)]),
        arrays.recurrent[rank * heads : (rank + 1) * heads],
        cut(
            arrays.drafts,
            [
                (shape.num_key_heads, shape.key_channels),
                (shape.num_value_heads, shape.value_channels),
                (shape.num_value_heads, shape.num_value_heads * shape.head_gates),
            ]
            if shape.record
            else [(2, 0)],
        ),
    )


def test_the_bytes_are_those_of_their_version() -> None:
    """Files are read by the layout: what changes these digests has to change VERSION too."""
    digests = [hashlib.sha256(packed(spans, make_layers()).data).hexdigest()[:16] for spans in (SNAPSHOT, MOVED)]
    assert (VERSION, digests) == (2, ["b49fc137a05d8093", "f785f74ca5b8d148"])


def test_of_a_short_convolution_its_line_is_all_there_is() -> None:
    layout = StateLayout((StateLayer(0, 0, SHORT_CONV),), 1, 2, 4, MAX_DRAFT)
    [section] = layout.sections([SpanProgress(position=33, replay=1, records_0=3)])
    assert (section.part, section.shape) == (Part.CONV_X, (2, SHORT_CONV.conv_width - 1 + 3, 16))


def test_of_latents_each_token_has_one_row() -> None:
    layout = StateLayout((StateLayer(0, 0, LATENTS),), 1, 2, 4, MAX_DRAFT)
    [section] = layout.sections([SpanProgress(position=33)])
    assert (section.part, section.shape, section.num_bytes) == (Part.KEYS, (1, 33, 20 + 4), 2 * 33 * 24)


def test_the_channels_of_mamba2_are_x_then_b_then_c() -> None:
    assert [part for part, _, _ in conv_parts(MAMBA)] == [Part.CONV_X, Part.CONV_B, Part.CONV_C]
    assert [part for part, _, _ in conv_parts(GATED_DELTA)] == [Part.CONV_Q, Part.CONV_K, Part.CONV_V]
