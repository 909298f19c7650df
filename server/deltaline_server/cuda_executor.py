"""Computing batches on a GPU: copy in, computation and copy out on streams of their own, replayed from graphs.

While one batch computes, the next is copied in and the one before copied out. Knows the model, its state and slots; no
threads and no queue (engine.py).
"""

from __future__ import annotations

import queue

import numpy as np
import torch
from numpy.typing import NDArray
from triton import knobs

from deltaline_server.executor import BatchLimits, DeviceCounts, Finish, Report, make_rows, trial_batch
from deltaline_server.graphs import Graphs, compute, make_buckets
from deltaline_server.model import Model
from deltaline_server.staging import Layout, Slot
from deltaline_server.state_pool import StatePool
from deltaline_server.step import BatchResult, StepBatch

# One batch computes while the next is copied in, or the one before is copied out.
NUM_SLOTS = 2
# Memory that is kept ready beyond what the trial batches took: batches of sizes between theirs are cut differently.
SPARE_BYTES, SPARE_BLOCKS = 1 << 20, 64


class CudaExecutor:
    """Streams, slots and graphs of one device, which is the current one of the thread that launches."""

    is_asynchronous = True

    def __init__(self, model: Model, pool: StatePool, limits: BatchLimits, graph_rows: int) -> None:
        """graph_rows: the most short rows of a batch that is replayed from a graph, 0 for none."""
        self._model, self._pool, self._limits = model, pool, limits
        self._in, self._compute, self._out = (torch.cuda.Stream(model.device) for _ in range(3))
        self._num_compiled = 0
        knobs.runtime.jit_post_compile_hook = self._count_compiled
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._graphs = Graphs(model, pool, make_buckets(limits, min(graph_rows, limits.rows), pool.max_draft))

    def prepare(self, report: Report) -> None:
        """Allocate the slots, compile the kernels, reserve the memory of the largest batches, capture the graphs."""
        model = self._model
        slots = [Slot(self._limits, model.hidden_size, model.dtype, model.numpy_dtype) for _ in range(NUM_SLOTS)]
        for slot in slots:
            self._free.put(slot)
        # What was allocated and zeroed so far was so on the stream that other threads use.
        torch.cuda.synchronize(model.device)
        for span in range(len(model.spans)):
            for lengths in _trials(self._limits, self._pool.max_draft):
                self.launch(trial_batch(model, self._pool, span, lengths))()
        with torch.cuda.stream(self._compute):
            spare = [torch.empty(SPARE_BYTES, dtype=torch.uint8, device=model.device) for _ in range(SPARE_BLOCKS)]
            del spare
            self._graphs.capture(slots, report)
        torch.cuda.synchronize(model.device)

    def launch(self, batch: StepBatch) -> Finish:
        slot = self._free.get()
        try:
            layout = self._begin(slot, batch)
        except BaseException:
            self._free.put(slot)
            raise

        def finish() -> BatchResult:
            try:
                return slot.wait(batch, layout)
            finally:
                self._free.put(slot)

        return finish

    def zero(self, lines: NDArray[np.int64]) -> None:
        with torch.cuda.stream(self._compute):
            self._pool.zero(lines)

    def is_lost(self) -> bool:
        try:
            torch.cuda.synchronize(self._model.device)
        except Exception:
            return True
        return False

    def counts(self) -> DeviceCounts:
        memory = torch.cuda.memory_stats(self._model.device)
        return DeviceCounts(
            self._num_compiled,
            self._graphs.num_captured,
            memory.get("num_device_alloc", 0),
            memory.get("reserved_bytes.all.current", 0),
        )

    def _count_compiled(self, **_: object) -> None:
        """What Triton calls after it has compiled a kernel or loaded it from its cache."""
        self._num_compiled += 1

    def _begin(self, slot: Slot, batch: StepBatch) -> Layout:
        """Let the streams take a batch through its stages; return how it lies in the slot."""
        lengths, short = np.diff(batch.control[0]), batch.num_short
        longest_short, longest = int(lengths[:short].max(initial=0)), int(lengths.max(initial=0))
        bucket = None
        if self._graphs.num_captured:
            bucket = self._graphs.find(short, len(lengths) - short, batch.num_tokens, longest_short, longest)
        layout = Layout.of(batch) if bucket is None else bucket.layout
        torch.cuda.set_stream(self._in)
        wanted = slot.copy_in(batch, layout)
        torch.cuda.set_stream(self._compute)
        self._compute.wait_event(slot.events[1])
        slot.events[2].record()
        if bucket is None:
            rows = make_rows(batch, slot.inputs(layout)[0], self._pool.max_draft)
            compute(self._model, self._pool, batch.span, rows, slot, layout)
        else:
            self._graphs.replay(slot, batch.span, bucket)
        slot.select(layout, wanted)
        slot.events[3].record()
        torch.cuda.set_stream(self._out)
        self._out.wait_event(slot.events[3])
        slot.copy_out(batch, layout)
        return layout


def _trials(limits: BatchLimits, max_draft: int) -> list[list[int]]:
    """Rows' lengths of batches that need every kernel that a batch can need, the largest first."""
    rows, chunk, long = limits.rows, limits.chunk_tokens, max_draft + 1
    half = chunk // 2
    tails = [[], [chunk], [long], [half, chunk - half], [long] * (chunk // long)]
    batches = []
    for lengths in tails:
        tail = [n for n in lengths if n >= long][:rows]
        room = rows - len(tail)
        batches += [[*short[:room], *tail] for short in ([], [1], [1, max_draft], [1] * room, [max_draft] * room)]
    return sorted((batch for batch in batches if batch), key=sum, reverse=True)
