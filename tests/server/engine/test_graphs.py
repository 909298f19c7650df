"""Graphs and streams of a GPU: a replay computes what launches compute; serving compiles and allocates nothing."""

from __future__ import annotations

import itertools
import json
import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rigs.limits import make_limits

from deltaline_kernels import Rows
from deltaline_server.engine.batch_layout import Layout, fill_pages
from deltaline_server.engine.engine import Engine
from deltaline_server.engine.executor import (
    DeviceCounts,
    Executor,
    Launched,
    Report,
    token_sizes,
)
from deltaline_server.engine.graphs import Bucket, Graphs, make_buckets
from deltaline_server.engine.staging import DIRECT_BYTES, Copier
from deltaline_server.layers.state_pool import StateOptions, StatePool
from deltaline_server.layers.streams import StreamEnds
from deltaline_server.models.model import Model, ModelOptions, load_model
from deltaline_server.runtime import make_executor
from deltaline_server.step import BatchResult, StepBatch, sound_rows
from deltaline_server.tables.pages import PagePool

HIDDEN, MAX_DRAFT, NUM_LINES, CHUNK = 128, 4, 24, 4096
WAIT_S = 100.0
CONFIG = {
    "model_type": "qwen3_5_text",
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention"] * 3,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "head_dim": 64,
    "state_size": 64,
    "n_groups": 2,
}
HYBRID = CONFIG | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
}
# Spans that begin and end with one stream: what goes in is narrower, or wider, than what comes out.
STREAMS = HYBRID | {"hc_mult": 4}
PAGE_SIZE = 64
DTYPE = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(("rows", "draft"), [(1, 1), (1, 4), (6, 3), (64, 8), (100, 5)])
def test_every_batch_within_the_limits_has_a_bucket_and_a_small_one(rows: int, draft: int) -> None:
    chunk = 1000
    buckets = make_buckets(make_limits(short_rows=rows, long_rows=3, chunk_tokens=chunk), draft)
    assert len(set(buckets)) == len(buckets) < 60
    for short in range(1, rows + 1):
        decode = find(buckets, [1] * short, draft)
        assert decode.longest == 1 and decode.layout.tokens < 2 * short
        several = find(buckets, [draft] * short, draft)
        assert several.layout.tokens < max(4 * short * draft, 2 * 4)
    for tokens in (draft + 1, 256, 257, chunk):
        assert find(buckets, [tokens], draft).layout.tokens <= max(256 + rows, 2 * tokens)
        long = [tokens] if tokens < 3 * (draft + 1) else [draft + 1, draft + 1, tokens - 2 * (draft + 1)]
        for short_lengths in ([], [1] * rows, [draft] * rows):
            layout = find(buckets, [*short_lengths, *long], draft).layout
            assert layout.rows - layout.short_rows >= len(long) and layout.short_rows >= len(short_lengths)


@pytest.mark.parametrize("lengths", [[1] * 9, [1] * 8 + [200] * 4, [1040]], ids=["short", "rows", "tokens"])
def test_a_batch_beyond_the_limits_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="within the limits"):
        find(make_buckets(make_limits(short_rows=8, long_rows=3, chunk_tokens=1000), 4), lengths, 4)


def find(buckets: list[Bucket], lengths: list[int], draft: int, has_adapters: bool = False) -> Bucket:
    """The bucket of a batch with rows of these lengths."""
    graphs = object.__new__(Graphs)
    graphs._buckets = buckets
    graphs._decodes = {}
    control = np.zeros((7, len(lengths) + 1), dtype=np.int32)
    control[0, 1:] = np.cumsum(lengths)
    slots = np.full(len(lengths), -1, dtype=np.int32) if has_adapters else None
    return graphs.find(StepBatch(0, control, sum(n <= draft for n in lengths), (), None, adapter_places=slots))


@pytest.mark.parametrize("has_adapters", [False, True])
def test_the_pages_of_a_batch_lie_behind_its_fields(has_adapters: bool) -> None:
    layout = Layout(4, 9, 150, has_adapters, page_size=64)
    assert (layout.num_pages, Layout(4, 9, 5, page_size=64).num_pages) == (11, 5)
    assert layout.control_bytes == -(-(layout.field_bytes + 3 * 11 * 4) // 256) * 256
    without = replace(layout, page_size=0)
    assert (without.num_pages, without.control_bytes) == (0, -(-layout.field_bytes // 256) * 256)
    region = np.full((3, 11), 99, dtype=np.int32)
    fill_pages(region, np.array([[2, 3], [0, 7], [5, 6]], dtype=np.int32))
    assert region[:, :2].tolist() == [[2, 3], [0, 7], [5, 6]] and not region[:, 2:].any()


def test_buckets_of_a_model_with_pages_have_room_for_them() -> None:
    limits = make_limits(short_rows=100, long_rows=3, chunk_tokens=1000)
    plain, buckets = make_buckets(limits, 5), make_buckets(limits, 5, page_size=16)
    assert [replace(bucket, layout=replace(bucket.layout, page_size=0)) for bucket in buckets] == plain
    rng = np.random.default_rng(0)
    for bucket in buckets:
        layout = bucket.layout
        for _ in range(20):  # rows of random lengths at the worst positions: each begins a page with its first token
            cuts = sorted(rng.integers(0, layout.tokens + 1, layout.rows - 1).tolist())
            lengths = np.diff([0, *cuts, layout.tokens])
            assert (-(-lengths // 16)).sum() <= layout.num_pages


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 21) + 5, 10_000_003])
def test_copies_of_any_size_are_whole(size: int) -> None:
    source, target = np.random.default_rng(0).integers(0, 256, (2, size), dtype=np.uint8)
    copier = Copier()
    copier.copy(target, source)
    copier.close()
    np.testing.assert_array_equal(target, source)


class Launches:
    """An executor that launches kernel by kernel and waits: what the one with graphs is compared with."""

    is_asynchronous = False

    def __init__(self, model: Model, pool: StatePool) -> None:
        self.model, self.pool = model, pool

    def prepare(self, report: Report) -> None:
        pass

    def launch(self, batch: StepBatch) -> Launched:
        control = torch.from_numpy(batch.control).cuda()
        longest = int(np.diff(batch.control[0]).max(initial=0))
        # The kernels that a bucket of the same batch takes.
        rows = Rows(control, batch.num_short, 1 if longest == 1 else MAX_DRAFT, longest)
        hidden = torch.from_numpy(np.concatenate(batch.hidden).view(np.int16)).cuda().view(torch.bfloat16)
        new_pages = None if batch.new_pages is None else torch.from_numpy(batch.new_pages).cuda()
        output = self.model.forward(batch.span, hidden, rows, self.pool, new_pages=new_pages)
        returned = output if batch.wanted is None else output[torch.from_numpy(batch.wanted).cuda()]
        array = returned.view(torch.int16).cpu().numpy().view(DTYPE)
        finite = sound_rows(batch.control[0], token_sizes(output).cpu().numpy())
        return Launched(lambda: True, lambda: BatchResult(array, finite))

    def zero(self, lines: NDArray[np.int64]) -> None:
        self.pool.zero(lines)

    def is_lost(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def counts(self) -> DeviceCounts:
        return DeviceCounts()


class Twins:
    """Two engines with the same weights, each with its own state: one replays graphs, the other launches."""

    def __init__(self, config: Path, num_spans: int = 2) -> None:
        spans = (range(2), range(2, 3))[:num_spans]
        self.executors: list[Executor] = []
        self.engines = []
        self.progress: list[tuple[int, int]] = []
        stream_ends = StreamEnds.BOTH if "hc_mult" in json.loads(config.read_text()) else StreamEnds.NONE
        for replays in (True, False):
            options = ModelOptions(torch.device("cuda"), random_init=config, dtype=torch.bfloat16, spans=spans)
            model = load_model(replace(options, stream_ends=stream_ends))
            pool = model.make_pool(StateOptions(NUM_LINES, MAX_DRAFT, page_size=PAGE_SIZE, limit_bytes=1 << 28))
            self.num_pages = 0 if pool.kv is None else pool.kv.num_pages
            self.paged_spans, self.ends = model.paged_spans, model.ends
            limits = make_limits(short_rows=NUM_LINES, long_rows=2, chunk_tokens=CHUNK)
            executor = make_executor(model, pool, limits) if replays else Launches(model, pool)
            engine = Engine(executor, model.device)
            engine.start()
            engine.prepare(lambda done, total: self.progress.append((done, total))).result(WAIT_S)
            self.executors.append(executor)
            self.engines.append(engine)

    def run(
        self, batches: list[StepBatch], engines: Sequence[Engine] = (), polls: bool = False
    ) -> list[list[BatchResult]]:
        """Submit all batches to each engine, at once unless this thread polls; return each one's results in order."""
        results = []
        for engine in engines or self.engines:
            done: queue.SimpleQueue[BatchResult] = queue.SimpleQueue()
            for batch in batches:
                engine.submit(batch, done.put, polls)
                while polls and engine.poll():
                    pass
            results.append([done.get(timeout=WAIT_S) for _ in batches])
        return results


@pytest.fixture(
    scope="module", params=[CONFIG, MAMBA2, HYBRID, STREAMS], ids=["gated_delta_net", "mamba2", "hybrid", "streams"]
)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    config = tmp_path_factory.mktemp("model") / "config.json"
    config.write_text(json.dumps(request.param))
    twins = Twins(config)
    yield twins
    for engine in twins.engines:
        engine.close()


class Sequences:
    """The host's side of as many sequences as there are lines: makes batches that a scheduler could make."""

    def __init__(self, seed: int, twins: Twins | None = None) -> None:
        """twins: what is to run the batches; where it has attention, every line gets the same share of the pages."""
        self.rng = np.random.default_rng(seed)
        self.paged_spans = frozenset[int]() if twins is None else twins.paged_spans
        self.widths = (HIDDEN, HIDDEN) if twins is None else tuple(end.input_width for end in twins.ends)
        self.position = np.zeros((2, NUM_LINES + 1), dtype=int)
        self.pages: PagePool | None = None
        if twins is not None and twins.num_pages:
            self.pages = PagePool(
                num_pages=twins.num_pages,
                page_size=PAGE_SIZE,
                max_context=twins.num_pages // NUM_LINES * PAGE_SIZE,
                num_lines=NUM_LINES,
                spans=self.paged_spans,
            )
        self.used = np.zeros((2, NUM_LINES + 1), dtype=bool)
        self.pending = np.zeros((2, NUM_LINES + 1), dtype=int)
        self.half = np.zeros((2, NUM_LINES + 1), dtype=int)

    def batch(self, num_rows: int, span: int = 0, verify: bool = True, long: int = 0, want: str = "all") -> StepBatch:
        rng = self.rng
        lines = rng.permutation(np.arange(1, NUM_LINES + 1))[:num_rows]
        verifies = rng.random(num_rows) < 0.5 if verify else np.zeros(num_rows, dtype=bool)
        lengths = np.where(verifies, rng.integers(1, MAX_DRAFT + 1, num_rows), 1)
        if long:
            lengths[-1], verifies[-1] = long, False
        control = np.zeros((7, num_rows + 1), dtype=np.int32)
        control[0, 1:] = np.cumsum(lengths)
        control[1, :-1] = np.where(self.used[span, lines], lines, 0)
        control[2, :-1] = lines
        control[3, :-1] = np.where(verifies, 0, lengths)
        control[4, :-1] = rng.integers(0, self.pending[span, lines] + 1)
        control[5, :-1] = self.half[span, lines]
        new_pages = self.place(control, span, lines, lengths, verifies)
        self.used[span, lines] = True
        self.pending[span, lines] = np.where(verifies, lengths, 0)
        self.half[span, lines] ^= verifies
        hidden = rng.standard_normal((control[0, -1], self.widths[span])).astype(DTYPE)
        wanted = None
        if want != "all":
            wanted = control[0, 1:].astype(np.int64) - 1 if want == "last" else np.zeros(0, dtype=np.int64)
        pieces = tuple(np.split(hidden, sorted(rng.integers(0, len(hidden) + 1, 2).tolist())))
        return StepBatch(span, control, num_rows - (1 if long else 0), pieces, wanted, new_pages=new_pages)

    def place(
        self,
        control: NDArray[np.int32],
        span: int,
        lines: NDArray[np.int64],
        lengths: NDArray[np.int64],
        verifies: NDArray[np.bool_],
    ) -> NDArray[np.int32] | None:
        """Write the rows' positions; return the pages that begin within them, None where the span has none.

        A line that would be too long begins anew.
        """
        position = self.position[span, lines] + control[4, :-1]
        if self.pages is not None:
            is_over = position + lengths > self.pages.max_context
            control[1, :-1][is_over] = control[4, :-1][is_over] = position[is_over] = 0
        control[6, :-1] = position
        self.position[span, lines] = position + np.where(verifies, 0, lengths)
        if self.pages is None or span not in self.paged_spans:
            return None
        self.pages.grant(lines, position + lengths)
        return self.pages.begun(control[2, :-1], control[6, :-1], lengths.astype(np.int32))


def close(result: BatchResult, expected: BatchResult) -> bool:
    difference = result.hidden.astype(np.float32) - expected.hidden.astype(np.float32)
    return bool(np.linalg.norm(difference) <= 1e-2 * np.linalg.norm(expected.hidden.astype(np.float32)))


@pytest.mark.gpu
def test_replays_compute_what_launches_compute(twins: Twins) -> None:
    sequences = Sequences(1, twins)
    sizes = itertools.product(range(1, 17), (False, True), ("all", "last", "none"), (0, 1))
    batches = [sequences.batch(rows, span, verify, want=want) for rows, verify, want, span in sizes]
    replayed, launched = twins.run(batches)
    for batch, result, expected in zip(batches, replayed, launched, strict=True):
        assert not result.failed and result.finite.all() and expected.finite.all()
        assert result.hidden.shape == expected.hidden.shape
        assert close(result, expected), batch.control
        assert min(result.copy_in_s, result.copy_out_s) >= 0 < result.compute_s
    norms = [float(np.linalg.norm(result.hidden.astype(np.float32))) for result in replayed if result.hidden.size]
    assert min(norms) > 0.1


@pytest.mark.gpu
def test_a_full_bucket_is_bitwise_what_launches_compute(twins: Twins) -> None:
    sequences = Sequences(2, twins)
    batches = [sequences.batch(rows, verify=False) for rows in (1, 2, 4, 8, 16, 24) for _ in range(3)]
    for result, expected in zip(*twins.run(batches), strict=True):
        np.testing.assert_array_equal(result.hidden.view(np.uint16), expected.hidden.view(np.uint16))


@pytest.mark.gpu
def test_who_polls_launches_and_gets_what_launches_compute(twins: Twins) -> None:
    sequences = Sequences(9, twins)
    batches = [sequences.batch(rows, span) for rows in (1, 3, 16, 24) for span in (0, 1)]
    for result, expected in zip(*twins.run(batches, polls=True), strict=True):
        assert result.finite.all() and close(result, expected)


@pytest.mark.gpu
def test_long_rows_are_replayed_and_too_many_rows_launched(twins: Twins) -> None:
    sequences = Sequences(3, twins)
    batches = []
    for long in (5, 64, 65, 700, CHUNK):
        batches += [sequences.batch(6), sequences.batch(6, long=long), sequences.batch(NUM_LINES), sequences.batch(3)]
        batches += [sequences.batch(6, long=long, want=want) for want in ("last", "none")]
    for result, expected in zip(*twins.run(batches), strict=True):
        assert result.finite.all() and result.hidden.shape == expected.hidden.shape and close(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("want", ["all", "last"])
def test_pinned_memory_is_read_and_written_where_it_is(twins: Twins, want: str) -> None:
    sequences = Sequences(7, twins)
    batch = sequences.batch(1, long=1500, want=want)
    (hidden,) = (np.concatenate(batch.hidden),)
    count = len(hidden) if batch.wanted is None else len(batch.wanted)
    source = torch.from_numpy(hidden.view(np.int16)).pin_memory().numpy()
    target = torch.zeros(1500, twins.ends[0].output_width, dtype=torch.int16).pin_memory().numpy()
    into = target.view(DTYPE)[:count]
    pieces = tuple(np.array_split(into, 2)) if want == "all" else (into,)
    pinned = replace(batch, hidden=(source.view(DTYPE),), into=pieces)
    (result,), (expected,) = twins.run([pinned])
    large = into.nbytes >= DIRECT_BYTES
    assert result.is_placed == large == (want == "all")
    assert close(replace(result, hidden=into) if large else result, expected)
    assert (target.any() == large) and (source == hidden.view(np.int16)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("want", ["all", "last"])
def test_a_small_batch_is_put_where_its_client_wants_it(twins: Twins, want: str) -> None:
    """Whether that is pinned or not: one replay copies it to the slot's own memory."""
    batch = Sequences(8, twins).batch(7, want=want)
    count = batch.num_tokens if batch.wanted is None else len(batch.wanted)
    into = np.full((count, twins.ends[0].output_width), np.nan, dtype=DTYPE)
    (result,), (expected,) = twins.run([replace(batch, into=(into[:2], into[2:]))])
    assert result.is_placed and not len(result.hidden)
    assert close(replace(result, hidden=into), expected)


@pytest.mark.gpu
def test_a_row_that_is_not_finite_is_flagged_alone(twins: Twins) -> None:
    batch = Sequences(4, twins).batch(5)
    hidden = np.concatenate(batch.hidden)
    hidden[batch.control[0, 2], 3] = np.nan
    for engine in twins.engines:  # the lines that this batch writes are not used afterwards without being zeroed
        engine.zero_lines(np.arange(1, NUM_LINES + 1))
    fresh = batch.control.copy()
    fresh[1, :-1], fresh[4, :-1] = 0, 0
    for results in twins.run([replace(batch, control=fresh, hidden=(hidden,))]):
        assert results[0].finite.tolist() == [True, True, False, True, True]
    for engine in twins.engines:
        engine.zero_lines(np.arange(1, NUM_LINES + 1))


@pytest.mark.gpu
def test_serving_compiles_captures_and_allocates_nothing(twins: Twins) -> None:
    sequences = Sequences(5, twins)
    rng = np.random.default_rng(6)
    before = twins.executors[0].counts()
    batches = []
    for _ in range(400):
        long = int(rng.integers(MAX_DRAFT + 1, CHUNK + 1)) if rng.random() < 0.2 else 0
        rows = int(rng.integers(1 + bool(long), NUM_LINES + 1))
        want = ("all", "last", "none")[rng.integers(3)]
        batches.append(sequences.batch(rows, int(rng.integers(2)), bool(rng.random() < 0.5), long, want))
    (results,) = twins.run(batches, twins.engines[:1])
    assert all(result.finite.all() for result in results)
    assert twins.executors[0].counts() == before
    assert before.captures > 40 and before.compilations > 0 and before.allocations > 0 and before.bytes > 0
    assert twins.progress[-1] == (before.captures, before.captures)
