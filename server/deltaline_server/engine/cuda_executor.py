"""Computing batches on a GPU: copy in, computation and copy out, replayed from graphs.

Of large batches each has a stream of its own: while one computes, the next is copied in and the one before copied out.
A small one is a single replay.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from triton import knobs

from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.engine.batch_layout import Layout
from deltaline_server.engine.executor import DeviceCounts, Launched, Report
from deltaline_server.engine.graphs import Bucket, Graphs
from deltaline_server.engine.staging import BatchBuffers, Copier
from deltaline_server.layers.kv_cache import COPIES
from deltaline_server.layers.state_pool import StatePool
from deltaline_server.models.model import Model
from deltaline_server.tables.lines import NULL_LINE
from deltaline_server.tables.pages import PagesPlaced

# One batch is copied in, one computed, one copied out.
NUM_BUFFERS = 3
# Lines that one replay of a graph zeroes, and whose rows of the table of pages are written at once.
LINES = 64
# Entries of rows of the table that cross at once: more than 64 KiB from memory that is not pinned would be waited for.
ENTRIES = 1 << 14


class LineZeroing:
    """A graph that zeroes the lines that a tensor on the device names."""

    def __init__(self, pool: StatePool) -> None:
        """Capture it on the current stream, which is also to replay it."""
        self._pool = pool
        with torch.inference_mode(False):  # threads write to it that are not in that mode
            self._lines = torch.full((LINES,), NULL_LINE, dtype=torch.int64, device=pool.device)
        pool.zero_at(self._lines)  # the null line is zero anyway
        stream = torch.cuda.current_stream()
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            pool.zero_at(self._lines)

    def zero(self, lines: NDArray[np.int64]) -> None:
        """Begin to zero lines on the current stream; `lines` may change once this returns.

        Raises IndexError if one is not a line, before any is zeroed.
        """
        self._pool.check_lines(lines)
        for begin in range(0, len(lines), LINES):
            part = lines[begin : begin + LINES]
            named = np.full(LINES, NULL_LINE, dtype=np.int64)
            named[: len(part)] = part
            # From memory that is not pinned: it is read before this returns, and nothing is waited for.
            self._lines.copy_(torch.from_numpy(named), non_blocking=True)
            self._graph.replay()


class PagePlacing:
    """Writes rows of the table of pages and copies pages in all layers, through memory that is allocated once."""

    def __init__(self, pool: StatePool) -> None:
        """Allocate it, and do both once on the current stream, with the null line and page 0, which is nobody's."""
        assert pool.page_table is not None
        self._pool, width = pool, pool.page_table.shape[1]
        with torch.inference_mode(False):  # threads write to it that are not in that mode
            self._lines = torch.zeros(LINES, dtype=torch.int64, device=pool.device)
            self._rows = torch.zeros(max(ENTRIES, width), dtype=torch.int32, device=pool.device)
            self._copies = torch.zeros(2, COPIES, dtype=torch.int64, device=pool.device)
            self._beside = [block.new_empty(len(block), COPIES, *block.shape[2:]) for block in pool.page_blocks]
        nothing = np.zeros((2, 1), dtype=np.int64)
        self.place(PagesPlaced(nothing[0], np.zeros((1, 1), dtype=np.int32), nothing))

    def place(self, placed: PagesPlaced) -> None:
        """Begin to write and copy on the current stream. Raises IndexError if a line is none, before anything is."""
        self._pool.check_lines(placed.lines)
        width = placed.pages.shape[1]
        count = min(LINES, max(1, len(self._rows) // max(width, 1))) if width else 0
        for begin in range(0, len(placed.lines), count) if count else ():
            lines, rows = placed.lines[begin : begin + count], placed.pages[begin : begin + count]
            to_lines, to_rows = self._lines[: len(lines)], self._rows[: rows.size].view(rows.shape)
            # From memory that is not pinned: it is read before this returns.
            to_lines.copy_(torch.from_numpy(lines), non_blocking=True)
            to_rows.copy_(torch.from_numpy(rows), non_blocking=True)
            self._pool.place_rows(to_lines, to_rows)
        for begin in range(0, placed.copies.shape[1], COPIES):
            part = placed.copies[:, begin : begin + COPIES]
            named = np.zeros((2, COPIES), dtype=np.int64)
            named[:, : part.shape[1]] = part
            self._copies.copy_(torch.from_numpy(named), non_blocking=True)
            self._pool.copy_pages(self._copies, self._beside)


class CudaExecutor:
    """Streams, buffers and graphs of one device, which is the current one of the thread that launches."""

    is_asynchronous = True
    is_gone = False

    def __init__(self, model: Model, pool: StatePool, buckets: list[Bucket]) -> None:
        """buckets: those of all batches that will be launched."""
        self._model, self._pool = model, pool
        self._in, self._compute, self._out, self._beside = (torch.cuda.Stream(model.device) for _ in range(4))
        self._copier = Copier()
        # It asks for many copies and waits for them, which batches must not.
        self._transfers = ThreadPoolExecutor(1, thread_name_prefix="transfer")
        self._num_compiled = 0
        # Not the hook of jitted functions: for it Triton writes their constants as JSON, which modifiers are not.
        knobs.compilation.listener = self._count_compiled
        self._free: queue.SimpleQueue[BatchBuffers] = queue.SimpleQueue()
        self._buckets = buckets
        self._graphs = Graphs(model, pool, buckets)

    def prepare(self, report: Report) -> None:
        """Allocate the buffers and capture the graphs, which compiles the kernels and takes the memory they need."""
        model = self._model
        layouts = [bucket.layout for bucket in self._buckets]
        sizes = model.ends, model.dtype, model.numpy_dtype
        # Whoever launches writes to them, and need not be in inference mode, which takes time to enter.
        with torch.inference_mode(False):
            sets = [BatchBuffers(layouts, *sizes, self._copier) for _ in range(NUM_BUFFERS)]
        # What was allocated and zeroed so far was so on the stream that other threads use.
        torch.cuda.synchronize(model.device)
        with torch.cuda.stream(self._compute):
            self._graphs.capture(sets, report)
            self._zeroing = LineZeroing(self._pool)
            self._placing = None if self._pool.page_table is None else PagePlacing(self._pool)
        torch.cuda.synchronize(model.device)
        for buffers in sets:
            self._free.put(buffers)

    def launch(self, batch: StepBatch) -> Launched:
        bucket = self._graphs.find(batch)
        buffers = self._free.get()
        try:
            if buffers.carries(bucket.layout, batch.span):
                buffers.write(batch, bucket.layout)
                torch.cuda.set_stream(self._compute)
                self._graphs.replay(buffers, batch.span, bucket)
                buffers.end(self._compute)
            else:
                self._launch_by_parts(buffers, batch, bucket)
        except BaseException:
            self._free.put(buffers)
            raise
        return Launched(buffers.is_done, lambda: self._finish(buffers, batch, bucket.layout))

    def _launch_by_parts(self, buffers: BatchBuffers, batch: StepBatch, bucket: Bucket) -> None:
        """Copy in, compute and copy out, each on its stream."""
        torch.cuda.set_stream(self._in)
        wanted = buffers.copy_in(batch, bucket.layout, self._in)
        torch.cuda.set_stream(self._compute)
        self._compute.wait_event(buffers.events[1])
        buffers.events[2].record(self._compute)
        self._graphs.replay(buffers, batch.span, bucket)
        buffers.select(batch, bucket.layout, wanted)
        buffers.events[3].record(self._compute)
        torch.cuda.set_stream(self._out)
        self._out.wait_event(buffers.events[3])
        buffers.copy_out(batch, bucket.layout, self._out)

    def zero(self, lines: NDArray[np.int64]) -> None:
        torch.cuda.set_stream(self._compute)
        self._zeroing.zero(lines)

    def place_pages(self, placed: PagesPlaced) -> None:
        torch.cuda.set_stream(self._compute)
        if self._placing is None:
            raise ValueError("pages: expected none, as this model has no attention layers")
        self._placing.place(placed)

    def transfer(self, work: Callable[[], None]) -> Future[None]:
        before = torch.cuda.Event()
        before.record(self._compute)
        return self._transfers.submit(self._transfer, before, work)

    def _transfer(self, before: torch.cuda.Event, work: Callable[[], None]) -> None:
        with torch.inference_mode(), torch.cuda.device(self._model.device), torch.cuda.stream(self._beside):
            self._beside.wait_event(before)
            try:
                work()
            finally:  # what was begun may not go on behind whoever waits
                self._beside.synchronize()

    def is_lost(self) -> bool:
        try:
            torch.cuda.synchronize(self._model.device)
        except Exception:
            return True
        return False

    def close(self) -> None:
        self._transfers.shutdown()
        self._copier.close()

    def counts(self) -> DeviceCounts:
        memory = torch.cuda.memory_stats(self._model.device)
        return DeviceCounts(
            self._num_compiled,
            self._graphs.num_captured,
            memory.get("num_device_alloc", 0),
            memory.get("reserved_bytes.all.current", 0),
        )

    def _finish(self, buffers: BatchBuffers, batch: StepBatch, layout: Layout) -> BatchResult:
        try:
            return buffers.wait(batch, layout)
        finally:
            self._free.put(buffers)

    def _count_compiled(self, **_: object) -> None:
        """What Triton calls after it has compiled a kernel or loaded it from its cache."""
        self._num_compiled += 1
