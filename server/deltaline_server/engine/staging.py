"""Batch buffers: pinned and device memory through which batches and their outputs cross between host and GPU.

They belong to one batch from its launch until its result is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaline_kernels.rows import NUM_FIELDS
from deltaline_server.batch import BatchResult, StepBatch, sound_rows
from deltaline_server.engine.batch_layout import (
    NUM_PAGE_FIELDS,
    Layout,
    fill_adapters,
    fill_control,
    fill_pages,
    fill_waypoints,
)
from deltaline_server.step import SpanShapes

# Most bytes that cross either way with a graph's own copies: within the time that asking for copies one by one takes.
CARRIED_BYTES = 1 << 20
# Below this size a copy takes less time than finding out whether the array is pinned.
DIRECT_BYTES = 1 << 16
# Views of the memory that are remembered.
MOST_PARTS = 1024
# Arrays from this size on are copied by several threads; for smaller ones, waking these takes longer.
LARGE_BYTES, COPY_THREADS = 1 << 21, 4


class Copier:
    """Copies between arrays of the host, large ones with several threads at once."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy")

    def copy(self, target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        """Copy bytes `[n]`; mutates `target`."""
        if len(target) < LARGE_BYTES:
            target[:] = source
            return
        part = -(-len(target) // COPY_THREADS)
        begins = range(0, len(target), part)
        waiting = [self._pool.submit(np.copyto, target[i : i + part], source[i : i + part]) for i in begins[1:]]
        np.copyto(target[:part], source[:part])
        for done in waiting:
            done.result()

    def close(self) -> None:
        self._pool.shutdown()


class Inputs(NamedTuple):
    """What a batch gives the layers, on the device.

    control int32 `[7, rows + 1]`, hidden `[T, width]`; where the layout has them adapter_places int32 `[rows]`,
    new_pages int32 `[3, pages]` and waypoints int32 (Rows.waypoints), else None.
    """

    control: Tensor
    hidden: Tensor
    adapter_places: Tensor | None
    new_pages: Tensor | None
    waypoints: Tensor | None


class BatchBuffers:
    """Memory of one batch in flight, allocated once, and the events that time its stages.

    Inbound: control int32 `[7, rows + 1]`, with the places of adapters `[8, rows + 1]`, pages int32 `[3, pages]` and
    waypoints int32 where the layout has some, then hidden `[T, width]`; outbound: sizes fp32 `[T]`, then outputs
    `[T, width]`, each as wide as the span has it. Events: 0 and 1 around the copy in, 2 and 3 around the computation, 4
    after the copy out.

    A batch comes and goes in one of two ways. `copy_in`, `select` and `copy_out` ask for copies of just its bytes, from
    and to pinned memory of clients where there is some. If they `carries` its layout, `write` and `end` go around a
    graph that captured `carry_in` and `carry_out`, copies of the whole layout: one call of the driver in place of
    fifteen. Either way `wait` takes the result.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        ends: Sequence[SpanShapes],
        dtype: torch.dtype,
        numpy_dtype: np.dtype[Any],
        copier: Copier,
    ) -> None:
        """Allocate what batches of these layouts need on the current CUDA device. ends: of each span."""
        self._copier = copier
        self._ends, self._dtype, self._numpy_dtype = ends, dtype, numpy_dtype
        tokens = max(layout.tokens for layout in layouts)
        input_bytes = tokens * max(span.input_bytes for span in ends)
        output_bytes = tokens * max(span.output_bytes for span in ends)
        self._inbound = _Crossing(max(layout.control_bytes for layout in layouts) + input_bytes)
        self._outbound = _Crossing(max(layout.size_bytes for layout in layouts) + output_bytes)
        self._wanted = _Crossing(tokens * 8)
        self._selected = torch.empty(output_bytes, dtype=torch.uint8, device="cuda")
        # External: a capture makes them nodes of its graph.
        self.events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(5)]
        self._is_carried = self._is_placed = False

    def inputs(self, layout: Layout, span: int) -> Inputs:
        """What a batch of this layout and span is computed from."""
        begin, device = layout.control_bytes, self._inbound.device
        fields = device[: layout.field_bytes].view(torch.int32).view(layout.fields)
        ends = self._ends[span]
        hidden = device[begin : begin + layout.tokens * ends.input_bytes].view(self._dtype)
        adapter_places = fields[NUM_FIELDS, :-1] if layout.has_adapters else None
        pages = device[_page_bytes(layout)].view(torch.int32).view(NUM_PAGE_FIELDS, -1) if layout.num_pages else None
        waypoints = device[_waypoint_bytes(layout)].view(torch.int32) if layout.num_waypoints else None
        return Inputs(fields[:NUM_FIELDS], hidden.view(-1, ends.input_width), adapter_places, pages, waypoints)

    def outputs(self, layout: Layout, span: int) -> tuple[Tensor, Tensor]:
        """Sizes and outputs of a batch of this layout and span on the device."""
        begin, ends = layout.size_bytes, self._ends[span]
        sizes = self._outbound.device[: layout.tokens * 4].view(torch.float32)
        output = self._outbound.device[begin : begin + layout.tokens * ends.output_bytes].view(self._dtype)
        return sizes, output.view(-1, ends.output_width)

    def skip_rows(self, layout: Layout) -> None:
        """Let every row of a layout be skipped: on both sides, the device's on the current stream."""
        inbound = self._inbound.array
        fields = inbound[: layout.field_bytes].view(np.int32).reshape(layout.fields)
        fields[:] = 0
        fields[1:3] = -1
        fields[NUM_FIELDS:] = -1  # no adapter
        inbound[_page_bytes(layout)] = 0  # page 0 of the null line, which is its already
        inbound[_waypoint_bytes(layout)].view(np.int32)[:] = -1
        self._inbound.send(0, layout.control_bytes)

    def carries(self, layout: Layout, span: int) -> bool:
        """Tell whether graphs of this layout copy in and out by themselves: those of few tokens, short rows alone."""
        ends = self._ends[span]
        inbound = layout.control_bytes + layout.tokens * ends.input_bytes
        outbound = layout.size_bytes + layout.tokens * ends.output_bytes
        return layout.rows == layout.short_rows and max(inbound, outbound) <= CARRIED_BYTES

    def write(self, batch: StepBatch, layout: Layout) -> None:
        """Write a batch to the host's memory, from where `carry_in` copies it."""
        self._write_fields(batch, layout)
        end = layout.control_bytes
        for piece in batch.hidden:
            first, end = end, end + piece.nbytes
            self._copier.copy(self._inbound.array[first:end], piece.view(np.uint8).reshape(-1))
        self._is_carried = True

    def carry_in(self, layout: Layout, span: int, stream: torch.cuda.Stream) -> None:
        """Copy all inputs of a layout to the device on a stream, the current one, which captures it."""
        self.events[0].record(stream)
        self._inbound.send(0, layout.control_bytes + layout.tokens * self._ends[span].input_bytes)
        self.events[1].record(stream)

    def carry_out(self, layout: Layout, span: int) -> None:
        """Copy all outputs of a layout to the host on the current stream, which captures it."""
        self._outbound.receive(0, layout.size_bytes + layout.tokens * self._ends[span].output_bytes)

    def end(self, stream: torch.cuda.Stream) -> None:
        """Mark the end of a batch on a stream.

        The event is not a part of the graph: until that one's turn came, it would tell of the batch before.
        """
        self.events[4].record(stream)

    def copy_in(self, batch: StepBatch, layout: Layout, stream: torch.cuda.Stream) -> Tensor | None:
        """Copy a batch to `inputs` on a stream, the current one; return its wanted tokens, int64."""
        inbound, begin = self._inbound, layout.control_bytes
        self._is_carried = False
        self._write_fields(batch, layout)
        filled, end = 0, begin
        pinned = []
        for piece in batch.hidden:
            first, end = end, end + piece.nbytes
            source = _as_pinned(piece)
            if source is None:
                self._copier.copy(inbound.array[first:end], piece.view(np.uint8).reshape(-1))
            else:
                pinned.append((filled, first, end, source))
                filled = end
        wanted = None
        if batch.wanted is not None:
            wanted = self._wanted.array[: batch.wanted.nbytes].view(np.int64)
            wanted[:] = batch.wanted
        self.events[0].record(stream)  # given the stream: looking up the current one takes longer
        # What lies in pinned memory goes from where it is; all else by way of these, neighbours at once.
        for before, first, last, source in pinned:
            inbound.send(before, first)
            inbound.device[first:last].copy_(source, non_blocking=True)
        inbound.send(filled, end)
        sent = None if wanted is None else self._wanted.send(0, wanted.nbytes).view(torch.int64)
        self.events[1].record(stream)
        return sent

    def select(self, batch: StepBatch, layout: Layout, wanted: Tensor | None) -> None:
        """Gather the wanted outputs on the current stream, behind the computation."""
        if wanted is not None and len(wanted):
            outputs = self.outputs(layout, batch.span)[1]
            selected = self._selected[: len(wanted) * self._ends[batch.span].output_bytes].view(self._dtype)
            torch.index_select(outputs, 0, wanted, out=selected.view(len(wanted), -1))

    def copy_out(self, batch: StepBatch, layout: Layout, stream: torch.cuda.Stream) -> None:
        """Begin to copy sizes and the wanted outputs to the host on a stream, the current one.

        Outputs go to these memory, or straight to batch.into if all of that is pinned.
        """
        outbound, begin, token_bytes = self._outbound, layout.size_bytes, self._ends[batch.span].output_bytes
        places = [_as_pinned(into) for into in batch.into]
        self._is_placed = bool(places) and all(place is not None for place in places)
        if self._is_placed:
            outbound.receive(0, batch.num_tokens * 4)
            outputs, first = self._selected, 0
            if batch.wanted is None:
                outputs = self.outputs(layout, batch.span)[1].view(-1).view(torch.uint8)
            for place in places:
                assert place is not None
                place.copy_(outputs[first : first + len(place)], non_blocking=True)
                first += len(place)
        elif batch.wanted is None:
            outbound.receive(0, begin + batch.num_tokens * token_bytes)
        else:
            outbound.receive(0, batch.num_tokens * 4)
            end = begin + len(batch.wanted) * token_bytes
            if begin < end:
                outbound.tensor[begin:end].copy_(self._selected[: end - begin], True)
        self.end(stream)

    def is_done(self) -> bool:
        """Whether the copy out is over."""
        return bool(self.events[4].query())

    def wait(self, batch: StepBatch, layout: Layout) -> BatchResult:
        """Wait for the copy out and return the result, whose arrays are the caller's."""
        self.events[4].synchronize()
        sizes = self._outbound.array[: batch.num_tokens * 4].view(np.float32)
        hidden = self._take_outputs(batch, layout)
        events = self.events
        return BatchResult(
            hidden,
            sound_rows(batch.control[0], sizes),
            copy_in_s=events[0].elapsed_time(events[1]) / 1e3,
            compute_s=events[2].elapsed_time(events[3]) / 1e3,
            copy_out_s=events[3].elapsed_time(events[4]) / 1e3,
            is_placed=self._is_placed,
        )

    def _write_fields(self, batch: StepBatch, layout: Layout) -> None:
        """Write the control of a batch's rows to the host's memory.

        Rows of the layout that the batch has not have no token and are skipped.
        """
        inbound = self._inbound.array
        fields = inbound[: layout.field_bytes].view(np.int32).reshape(layout.fields)
        fill_control(fields[:NUM_FIELDS], batch, layout)
        if batch.adapter_places is not None:
            fill_adapters(fields[NUM_FIELDS], batch.adapter_places, batch.num_short, layout)
        if batch.new_pages is not None:
            fill_pages(inbound[_page_bytes(layout)].view(np.int32).reshape(NUM_PAGE_FIELDS, -1), batch.new_pages)
        if layout.num_waypoints:
            fill_waypoints(inbound[_waypoint_bytes(layout)].view(np.int32), batch, layout.short_rows)

    def _take_outputs(self, batch: StepBatch, layout: Layout) -> NDArray[Any]:
        """The outputs `[wanted, width]` from the host's memory, none if they lie in batch.into, where a carried batch's
        are put."""
        ends, wanted = self._ends[batch.span], batch.wanted
        num_returned = batch.num_tokens if wanted is None or self._is_carried else len(wanted)
        returned = self._outbound.array[layout.size_bytes :][: num_returned * ends.output_bytes]
        if self._is_carried:
            if wanted is not None:
                returned = returned.reshape(-1, ends.output_bytes)[wanted].reshape(-1)
            self._is_placed = bool(batch.into)
            first = 0
            for into in batch.into:
                self._copier.copy(into.view(np.uint8).reshape(-1), returned[first : first + into.nbytes])
                first += into.nbytes
        if self._is_placed:
            returned = returned[:0]
        hidden = np.empty((len(returned) // ends.output_bytes, ends.output_width), self._numpy_dtype)
        self._copier.copy(hidden.view(np.uint8).reshape(-1), returned)
        return hidden


class _Crossing:
    """Pinned bytes, as a tensor and as an array, beside as many on the device."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        self.array: NDArray[np.uint8] = self.tensor.numpy()
        self.device = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self._made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def send(self, begin: int, end: int) -> Tensor:
        """Begin to copy these bytes to the device; return them there."""
        host, device = self._parts(begin, end)
        if begin < end:
            device.copy_(host, non_blocking=True)
        return device

    def receive(self, begin: int, end: int) -> None:
        """Begin to copy these bytes to the host."""
        if begin < end:
            host, device = self._parts(begin, end)
            host.copy_(device, non_blocking=True)

    def _parts(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """These bytes on both sides: made once for each, since the same sizes come again and again."""
        parts = self._made.get((begin, end))
        if parts is None:
            if len(self._made) == MOST_PARTS:
                self._made.clear()
            parts = self._made[begin, end] = self.tensor[begin:end], self.device[begin:end]
        return parts


def _as_pinned(array: NDArray[Any]) -> Tensor | None:
    """The bytes of an array if it is large and lies in pinned memory, as regions of shared memory do."""
    # Arrays over messages can't be written, and torch warns about such.
    if array.nbytes < DIRECT_BYTES or not array.flags.writeable:
        return None
    tensor = torch.from_numpy(array.view(np.uint8).reshape(-1))
    return tensor if tensor.is_pinned() else None


def _page_bytes(layout: Layout) -> slice:
    """Where the pages of a batch lie among the inbound bytes."""
    begin = layout.field_bytes
    return slice(begin, begin + NUM_PAGE_FIELDS * layout.num_pages * 4)


def _waypoint_bytes(layout: Layout) -> slice:
    """Where the table of a batch's waypoints lies among the inbound bytes."""
    return slice(layout.waypoint_begin, layout.waypoint_begin + layout.num_waypoints * 4)
