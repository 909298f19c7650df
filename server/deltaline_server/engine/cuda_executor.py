"""Computing batches on a GPU: copy in, computation and copy out, replayed from graphs.

Of large batches each has a stream of its own: while one computes, the next is copied in and the one before copied out.
A small one is a single replay.
"""

from __future__ import annotations

import queue

import numpy as np
import torch
from numpy.typing import NDArray
from triton import knobs

from deltaline_server.engine.batch_layout import Layout
from deltaline_server.engine.copier import Copier
from deltaline_server.engine.executor import BatchLimits, DeviceCounts, Launched, Report
from deltaline_server.engine.graphs import Bucket, Graphs, make_buckets
from deltaline_server.engine.line_zeroing import LineZeroing
from deltaline_server.engine.staging import Slot
from deltaline_server.layers.state_pool import StatePool
from deltaline_server.models.model import Model
from deltaline_server.step import BatchResult, StepBatch

# One batch is copied in, one computed, one copied out.
NUM_SLOTS = 3


class CudaExecutor:
    """Streams, slots and graphs of one device, which is the current one of the thread that launches."""

    is_asynchronous = True

    def __init__(self, model: Model, pool: StatePool, limits: BatchLimits) -> None:
        self._model, self._pool = model, pool
        self._in, self._compute, self._out = (torch.cuda.Stream(model.device) for _ in range(3))
        self._copier = Copier()
        self._num_compiled = 0
        # Not the hook of jitted functions: for it Triton writes their constants as JSON, which modifiers are not.
        knobs.compilation.listener = self._count_compiled
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        page_size = 0 if pool.kv is None else pool.kv.page_size
        self._buckets = make_buckets(limits, pool.max_draft, model.adapters is not None, page_size)
        self._graphs = Graphs(model, pool, self._buckets)

    def prepare(self, report: Report) -> None:
        """Allocate the slots and capture the graphs, which compiles the kernels and takes the memory they need."""
        model = self._model
        layouts = [bucket.layout for bucket in self._buckets]
        sizes = model.ends, model.dtype, model.numpy_dtype
        # Whoever launches writes to them, and need not be in inference mode, which takes time to enter.
        with torch.inference_mode(False):
            slots = [Slot(layouts, *sizes, self._copier) for _ in range(NUM_SLOTS)]
        # What was allocated and zeroed so far was so on the stream that other threads use.
        torch.cuda.synchronize(model.device)
        with torch.cuda.stream(self._compute):
            self._graphs.capture(slots, report)
            self._zeroing = LineZeroing(self._pool)
        torch.cuda.synchronize(model.device)
        for slot in slots:
            self._free.put(slot)

    def launch(self, batch: StepBatch) -> Launched:
        bucket = self._graphs.find(batch)
        slot = self._free.get()
        try:
            if slot.carries(bucket.layout, batch.span):
                slot.write(batch, bucket.layout)
                torch.cuda.set_stream(self._compute)
                self._graphs.replay(slot, batch.span, bucket)
                slot.end(self._compute)
            else:
                self._launch_by_parts(slot, batch, bucket)
        except BaseException:
            self._free.put(slot)
            raise
        return Launched(slot.is_done, lambda: self._finish(slot, batch, bucket.layout))

    def _launch_by_parts(self, slot: Slot, batch: StepBatch, bucket: Bucket) -> None:
        """Copy in, compute and copy out, each on its stream."""
        torch.cuda.set_stream(self._in)
        wanted = slot.copy_in(batch, bucket.layout, self._in)
        torch.cuda.set_stream(self._compute)
        self._compute.wait_event(slot.events[1])
        slot.events[2].record(self._compute)
        self._graphs.replay(slot, batch.span, bucket)
        slot.select(batch, bucket.layout, wanted)
        slot.events[3].record(self._compute)
        torch.cuda.set_stream(self._out)
        self._out.wait_event(slot.events[3])
        slot.copy_out(batch, bucket.layout, self._out)

    def zero(self, lines: NDArray[np.int64]) -> None:
        torch.cuda.set_stream(self._compute)
        self._zeroing.zero(lines)

    def is_lost(self) -> bool:
        try:
            torch.cuda.synchronize(self._model.device)
        except Exception:
            return True
        return False

    def close(self) -> None:
        self._copier.close()

    def counts(self) -> DeviceCounts:
        memory = torch.cuda.memory_stats(self._model.device)
        return DeviceCounts(
            self._num_compiled,
            self._graphs.num_captured,
            memory.get("num_device_alloc", 0),
            memory.get("reserved_bytes.all.current", 0),
        )

    def _finish(self, slot: Slot, batch: StepBatch, layout: Layout) -> BatchResult:
        try:
            return slot.wait(batch, layout)
        finally:
            self._free.put(slot)

    def _count_compiled(self, **_: object) -> None:
        """What Triton calls after it has compiled a kernel or loaded it from its cache."""
        self._num_compiled += 1
