"""What a buffers's inbound memory holds after a copy, with the host's memory in place of pinned and of the device's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deltaline_server.batch import StepBatch
from deltaline_server.engine.batch_layout import Layout
from deltaline_server.engine.staging import CARRIED_BYTES, BatchBuffers, Copier
from deltaline_server.step import SpanShapes

HIDDEN, TOKENS = 8, 150
DTYPE = np.dtype(ml_dtypes.bfloat16)
# One as wide at its end as where it begins, one that begins streams, one that ends them.
SPANS = [SpanShapes(HIDDEN, 2), SpanShapes(HIDDEN, 2, 0, 4), SpanShapes(HIDDEN, 2, 4, 0)]
SHORT = Layout(6, 6, TOKENS, has_adapters=True, page_size=16)
LAYOUTS = [Layout(4, 6, TOKENS, has_adapters, page_size) for has_adapters in (False, True) for page_size in (0, 16)]


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchBuffers]:
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, **_: empty(*size, dtype=dtype))
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, **_: zeros(*size, dtype=dtype))
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None, elapsed_time=lambda other: 0.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    copier = Copier()
    yield BatchBuffers([*LAYOUTS, SHORT], SPANS, torch.bfloat16, DTYPE, copier)
    copier.close()


def make_batch(rng: np.random.Generator, layout: Layout, span: int = 0) -> StepBatch:
    """Three short rows and a long one, with what the layout has room for."""
    control = np.zeros((7, 5), dtype=np.int32)
    control[0, 1:] = np.cumsum([1, 3, 2, 100])
    control[1:, :-1] = rng.integers(0, 50, (6, 4))
    hidden = rng.standard_normal((106, SPANS[span].input_width)).astype(DTYPE)
    slots = np.array([1, -1, 0, 2], dtype=np.int32) if layout.has_adapters else None
    pages = rng.integers(1, 99, (3, 7)).astype(np.int32) if layout.page_size else None
    waypoints = np.array([[3], [64], [17]], dtype=np.int32) if layout.num_waypoints else None
    return StepBatch(span, control, 3, (hidden[:50], hidden[50:]), None, (), 0, slots, pages, waypoints)


def test_a_batch_comes_as_its_layout_says(buffers: BatchBuffers) -> None:
    rng, stream = np.random.default_rng(0), Any
    for layout in LAYOUTS * 2:  # each also over what others left
        batch = make_batch(rng, layout)
        buffers.copy_in(batch, layout, stream)  # type: ignore[arg-type]
        control, hidden, adapter_slots, new_pages, waypoints = buffers.inputs(layout, 0)
        assert waypoints is not None and waypoints.tolist() == [-1] * 4 + [17] + [-1] * 3
        assert control[:, :3].tolist() == batch.control[:, :3].tolist()
        assert control[1:, 4].tolist() == batch.control[1:, 3].tolist()
        assert control[1:3, [3, 5]].tolist() == [[-1, -1], [-1, -1]], "rows that the batch has not are skipped"
        assert hidden[:106].view(torch.int16).tolist() == np.concatenate(batch.hidden).view(np.int16).tolist()
        assert (adapter_slots is None) == (not layout.has_adapters) and (new_pages is None) == (not layout.page_size)
        if adapter_slots is not None:
            assert adapter_slots.tolist() == [1, -1, 0, -1, 2, -1]
        if new_pages is not None and batch.new_pages is not None:
            assert new_pages.shape == (3, layout.num_pages) == (3, 15)
            assert new_pages[:, :7].tolist() == batch.new_pages.tolist() and not new_pages[:, 7:].any()


def test_a_span_without_pages_leaves_their_region_alone(buffers: BatchBuffers) -> None:
    layout, rng = LAYOUTS[1], np.random.default_rng(1)
    batch = make_batch(rng, layout)
    batch.new_pages = None
    buffers.copy_in(batch, layout, Any)  # type: ignore[arg-type]
    assert buffers.inputs(layout, 0).control[:, :3].tolist() == batch.control[:, :3].tolist()


def test_graphs_of_short_rows_with_few_bytes_are_carried(buffers: BatchBuffers) -> None:
    assert buffers.carries(SHORT, 0) and not any(buffers.carries(layout, 0) for layout in LAYOUTS)
    tokens = CARRIED_BYTES // SPANS[0].input_bytes
    for span, wide in enumerate((1, 4, 4)):  # the wider end counts
        fits = Layout(6, 6, tokens // wide * 3 // 4)
        assert buffers.carries(fits, span) and not buffers.carries(replace(fits, tokens=tokens // wide), span)


def test_a_batch_that_is_carried_comes_as_its_layout_says(buffers: BatchBuffers) -> None:
    rng = np.random.default_rng(6)
    for _ in range(2):  # also over what the first one left
        batch = make_batch(rng, SHORT)
        batch.num_short = 4
        buffers.write(batch, SHORT)
        buffers.carry_in(SHORT, 0, Any)  # type: ignore[arg-type]
        control, _, adapter_slots, new_pages, waypoints = buffers.inputs(SHORT, 0)
        assert waypoints is None, "decodes pay nothing for them"
        assert control[:, :4].tolist() == batch.control[:, :4].tolist()
        assert control[1:3, 4:].tolist() == [[-1] * 3] * 2 and control[0, 4:].tolist() == [106] * 3
        assert adapter_slots is not None and adapter_slots.tolist() == [1, -1, 0, 2, -1, -1]
        assert new_pages is not None and batch.new_pages is not None
        assert new_pages[:, :7].tolist() == batch.new_pages.tolist() and not new_pages[:, 7:].any()


def test_skipped_rows_are_so_on_both_sides(buffers: BatchBuffers) -> None:
    buffers.copy_in(make_batch(np.random.default_rng(4), LAYOUTS[3]), LAYOUTS[3], Any)  # type: ignore[arg-type]
    buffers.skip_rows(LAYOUTS[3])
    waypoints = buffers.inputs(LAYOUTS[3], 0).waypoints
    assert waypoints is not None and (waypoints == -1).all()
    buffers.write(make_batch(np.random.default_rng(4), SHORT), SHORT)
    buffers.skip_rows(SHORT)
    for _ in range(2):  # what is sent later is what is there
        control, _, adapter_slots, new_pages, _ = buffers.inputs(SHORT, 0)
        assert (control[1:3] == -1).all() and not control[0].any() and not control[3:].any()
        assert adapter_slots is not None and (adapter_slots == -1).all()
        assert new_pages is not None and not new_pages.any()
        buffers.carry_in(SHORT, 0, Any)  # type: ignore[arg-type]


class Way:
    """Takes batches of a span through the same buffers, with random outputs in place of what layers would compute."""

    def __init__(self, buffers: BatchBuffers, span: int, wanted: list[int] | None) -> None:
        self.buffers, self.span, self.wanted = buffers, span, wanted
        self.rng = np.random.default_rng(3)

    def make(self, layout: Layout) -> StepBatch:
        batch = make_batch(self.rng, layout, self.span)
        batch.wanted = None if self.wanted is None else np.array(self.wanted, dtype=np.int64)
        return batch

    def compute(self, batch: StepBatch, layout: Layout) -> NDArray[np.int16]:
        """Check that the hidden states came; return what goes back, as bits."""
        hidden, ends = self.buffers.inputs(layout, self.span).hidden, SPANS[self.span]
        assert hidden.shape == (TOKENS, ends.input_width)
        assert hidden[:106].view(torch.int16).tolist() == np.concatenate(batch.hidden).view(np.int16).tolist()
        sizes, outputs = self.buffers.outputs(layout, self.span)
        assert (sizes.shape, outputs.shape) == ((TOKENS,), (TOKENS, ends.output_width))
        sizes[:] = 1.0
        outputs.copy_(torch.from_numpy(self.rng.standard_normal(outputs.shape)))
        made: NDArray[np.int16] = outputs[:106].view(torch.int16).numpy().copy()
        return made if self.wanted is None else made[self.wanted]

    def by_parts(self) -> None:
        layout = LAYOUTS[0]
        batch = self.make(layout)
        sent = self.buffers.copy_in(batch, layout, Any)  # type: ignore[arg-type]
        expected = self.compute(batch, layout)
        self.buffers.select(batch, layout, sent)
        self.buffers.copy_out(batch, layout, Any)  # type: ignore[arg-type]
        result = self.buffers.wait(batch, layout)
        assert not result.is_placed and result.finite.all()
        np.testing.assert_array_equal(result.hidden.view(np.int16), expected)

    def carried(self, is_placed: bool) -> None:
        """By its graph; placed: to memory of clients, in two pieces."""
        batch = self.make(SHORT)
        batch.num_short = 4
        num_outputs = 106 if self.wanted is None else len(self.wanted)
        into = np.full((num_outputs, SPANS[self.span].output_width), np.nan, dtype=DTYPE)
        batch.into = (into[:1], into[1:]) if is_placed else ()
        self.buffers.write(batch, SHORT)
        self.buffers.carry_in(SHORT, self.span, Any)  # type: ignore[arg-type]
        expected = self.compute(batch, SHORT)
        self.buffers.carry_out(SHORT, self.span)
        result = self.buffers.wait(batch, SHORT)
        assert result.is_placed == is_placed and result.finite.all()
        assert not is_placed or result.hidden.shape == (0, SPANS[self.span].output_width)
        np.testing.assert_array_equal((into if is_placed else result.hidden).view(np.int16), expected)


@pytest.mark.parametrize("wanted", [None, [0, 3, 105], []], ids=["all", "some", "none"])
@pytest.mark.parametrize("span", range(len(SPANS)))
def test_what_is_wanted_comes_back_whichever_way_batches_take_in_turns(
    buffers: BatchBuffers, span: int, wanted: list[int] | None
) -> None:
    way = Way(buffers, span, wanted)
    way.by_parts()
    for is_placed in (False, True):
        way.carried(is_placed)
        way.by_parts()


@pytest.mark.parametrize("size", [0, 1 << 20, (1 << 21) + 5])
def test_copies_of_any_size_are_whole(size: int) -> None:
    source, target = np.random.default_rng(0).integers(0, 256, (2, size), dtype=np.uint8)
    copier = Copier()
    copier.copy(target, source)
    copier.close()
    np.testing.assert_array_equal(target, source)
