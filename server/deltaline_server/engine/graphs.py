"""CUDA graphs of batches: captured once per set of buffers, span and bucket, replayed for every batch that fits.

A bucket is so many short rows, long rows and tokens, with or without adapters; a batch is padded to it with rows that
are skipped. So a batch without adapters costs what it costs on a server without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from deltaline_kernels import Rows
from deltaline_server.batch import StepBatch
from deltaline_server.engine.batch_layout import Layout
from deltaline_server.engine.executor import Report, token_sizes
from deltaline_server.engine.staging import BatchBuffers
from deltaline_server.layers.state_pool import StatePool
from deltaline_server.models.model import Model
from deltaline_server.step import Limits

# Tokens of long rows of the smallest graph that has any.
FEWEST_LONG_TOKENS = 256
# From so many on a row that is alone has graphs between the powers of two: what is computed in vain would be felt.
MANY_TOKENS = 512
# Parts of the way from a power to the next: of the first, where what is left of a prompt behind stored state often
# lies, and of the others.
FIRST_PARTS, PARTS = 8, 4
# Tokens per short row of the smallest graph in which it may have several.
FEWEST_DRAFTS = 4
# Beside long rows graphs have all short rows that there may be, or one of so many: the others are computed in vain.
FEW_SHORT_SHARE = 8


@dataclass(frozen=True)
class Bucket:
    """What a graph holds: a layout, and the most tokens of a short row and of any row."""

    layout: Layout
    longest_short: int
    longest: int

    def holds(self, short: int, long: int, tokens: int, longest_short: int, longest: int) -> bool:
        """Tell whether so many rows and tokens fit."""
        layout = self.layout
        return (
            short <= layout.short_rows
            and long <= layout.rows - layout.short_rows
            and tokens <= layout.tokens
            and longest_short <= self.longest_short
            and longest <= self.longest
        )


def buckets_of(model: Model, pool: StatePool, limits: Limits) -> list[Bucket]:
    """The buckets for every batch of a model within the limits, as make_buckets orders them."""
    page_size = 0 if pool.kv is None else pool.kv.page_size
    return make_buckets(limits, pool.max_draft, model.adapters is not None, page_size)


def make_buckets(limits: Limits, max_draft: int, has_adapters: bool = False, page_size: int = 0) -> list[Bucket]:
    """The buckets for every batch within the limits, in the order in which they are to be tried.

    Short rows that decode: powers of two. Where they may have several tokens, each with so many that rows have 4, 8,
    ... max_draft. With long rows: powers of two of their tokens, without short rows, with few and with as many as there
    may be; and of one long row alone, which is what waits for its first output, sizes between the powers as well.
    has_adapters: batches may have adapters; they have buckets of their own, of the same sizes. page_size: tokens of a
    page, 0 where layers have none.
    """
    most = limits.short_rows
    row_counts = _powers(1, most)
    buckets = [Bucket(Layout(rows, rows, rows), 1, 1) for rows in row_counts]
    if max_draft > 1:
        for length in _powers(min(FEWEST_DRAFTS, max_draft), max_draft):
            buckets += [Bucket(Layout(rows, rows, rows * length), max_draft, max_draft) for rows in row_counts]
    for tokens in _powers(min(FEWEST_LONG_TOKENS, limits.chunk_tokens), limits.chunk_tokens):
        for short in sorted({0, -(-most // FEW_SHORT_SHARE), most}):
            # Of several rows nobody knows how long they are: all of the tokens may be one's.
            buckets += [
                Bucket(Layout(short, short + long, short + tokens), max_draft, tokens if long == 1 else short + tokens)
                for long in (1, limits.long_rows)
            ]
    buckets += [Bucket(Layout(0, 1, tokens), max_draft, tokens) for tokens in _parts(limits.chunk_tokens)]
    tokens = most * max_draft + limits.chunk_tokens
    buckets.append(Bucket(Layout(most, most + limits.long_rows, tokens), max_draft, tokens))
    buckets = [replace(bucket, layout=replace(bucket.layout, page_size=page_size)) for bucket in buckets]
    if has_adapters:
        buckets += [replace(bucket, layout=replace(bucket.layout, has_adapters=True)) for bucket in buckets]
    return sorted(set(buckets), key=lambda bucket: (bucket.layout.tokens, bucket.layout.rows))


def _powers(first: int, last: int) -> list[int]:
    """First, its doubles below last, and last."""
    counts = [first]
    while counts[-1] < last:
        counts.append(min(2 * counts[-1], last))
    return counts


def _parts(last: int) -> list[int]:
    """The sizes between powers of two, from MANY_TOKENS to last."""
    counts = []
    for power in _powers(MANY_TOKENS, max(MANY_TOKENS, last)):
        parts = FIRST_PARTS if power == MANY_TOKENS else PARTS
        counts += [power + power * i // parts for i in range(1, parts)]
    return [count for count in counts if count < last]


class Graphs:
    """Graphs by buffers, span and bucket. One stream replays them one after the other: they share their memory."""

    def __init__(self, model: Model, pool: StatePool, buckets: list[Bucket]) -> None:
        self._model, self._pool, self._buckets = model, pool, buckets
        self._graphs: dict[tuple[int, int, Bucket], torch.cuda.CUDAGraph] = {}
        # By their rows, and whether they have adapters: the usual batches, found at once.
        self._decodes: dict[tuple[int, bool], Bucket] = {}

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def capture(self, sets: Sequence[BatchBuffers], report: Report) -> None:
        """Capture each bucket of all buffers and spans, largest first, on the current stream, which replays them.

        Before its first capture a bucket is computed once by an abridged model, which launches all that is captured.
        """
        spans, stream = range(len(self._model.spans)), torch.cuda.current_stream()
        memory = torch.cuda.graph_pool_handle()
        total = len(sets) * len(spans) * len(self._buckets)
        abridged = self._model.abridged(self._pool)
        for bucket in reversed(self._buckets):
            for number, buffers in enumerate(sets):
                buffers.skip_rows(bucket.layout)  # what runs meanwhile touches no line
                for span in spans:
                    if number == 0:
                        # Compiles and loads, and lets libraries choose what they do once.
                        self._compute(abridged, buffers, span, bucket)
                    stream.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, memory, stream=stream, capture_error_mode="thread_local"):
                        self._compute(self._model, buffers, span, bucket)
                    self._graphs[id(buffers), span, bucket] = graph
                    report(len(self._graphs), total)

    def find(self, batch: StepBatch) -> Bucket:
        """Return the smallest bucket that holds a batch. Raises: ValueError when it is beyond the limits."""
        short, num_rows = batch.num_short, batch.control.shape[1] - 1
        sizes = short, num_rows - short, batch.num_tokens
        is_decode = sizes == (num_rows, 0, num_rows)  # of one token each, since no row is empty
        key = num_rows, batch.adapter_places is not None
        if is_decode and key in self._decodes:
            return self._decodes[key]
        if is_decode:
            longest_short = longest = 1
        else:
            lengths = np.diff(batch.control[0])
            longest_short, longest = int(lengths[:short].max(initial=0)), int(lengths.max(initial=0))
        for bucket in self._buckets:
            if bucket.layout.has_adapters == key[1] and bucket.holds(*sizes, longest_short, longest):
                if is_decode:
                    self._decodes[key] = bucket
                return bucket
        raise ValueError(
            "batch: expected one within the limits, got {} short rows, {} long rows, {} tokens".format(*sizes)
            + (", adapters" if key[1] else "")
        )

    def replay(self, buffers: BatchBuffers, span: int, bucket: Bucket) -> None:
        """Compute what the buffers' inputs hold into their outputs, on the current stream."""
        self._graphs[id(buffers), span, bucket].replay()

    def _compute(self, model: Model, buffers: BatchBuffers, span: int, bucket: Bucket) -> None:
        layout, stream = bucket.layout, torch.cuda.current_stream()
        carries = buffers.carries(layout, span)
        if carries:
            buffers.carry_in(layout, span, stream)
            buffers.events[2].record(stream)
        control, hidden, adapter_places, new_pages, waypoints = buffers.inputs(layout, span)
        rows = Rows(control, layout.short_rows, bucket.longest_short, bucket.longest, waypoints=waypoints)
        if span not in model.paged_spans:
            new_pages = None
        output = model.forward(span, hidden, rows, self._pool, adapter_places, new_pages)
        sizes, outputs = buffers.outputs(layout, span)
        outputs.copy_(output)
        sizes.copy_(token_sizes(output))
        if carries:
            buffers.events[3].record(stream)
            buffers.carry_out(layout, span)
