"""Graphs and streams of a GPU: a replay computes what launches compute; serving compiles and allocates nothing."""

from __future__ import annotations

import itertools
import json
import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from rigs.limits import make_limits
from rigs.line_batches import CHUNK, CONFIG, DTYPE, HIDDEN, MAX_DRAFT, NUM_LINES, PAGE_SIZE, WAIT_S, Sequences

from deltaline_kernels import Rows
from deltaline_server.batch import BatchResult, StepBatch, sound_rows
from deltaline_server.computing import make_executor
from deltaline_server.engine.batch_layout import fill_waypoints, num_waypoints
from deltaline_server.engine.engine import Engine
from deltaline_server.engine.executor import (
    CpuExecutor,
    Executor,
    Launched,
    Report,
    token_sizes,
)
from deltaline_server.engine.staging import DIRECT_BYTES
from deltaline_server.layers.state_pool import StateOptions, StatePool
from deltaline_server.layers.streams import StreamEnds
from deltaline_server.models.model import Model, ModelOptions, load_model

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
# A token has all of them, in an order of its own: of few, rounding would decide who is chosen.
EXPERTS = HYBRID | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}


class Launches(CpuExecutor):
    """An executor that launches kernel by kernel and waits: what the one with graphs is compared with."""

    def __init__(self, model: Model, pool: StatePool) -> None:
        super().__init__(model, pool)
        self.model, self.pool = model, pool

    def prepare(self, report: Report) -> None:
        pass

    def launch(self, batch: StepBatch) -> Launched:
        control = torch.from_numpy(batch.control).cuda()
        longest = int(np.diff(batch.control[0]).max(initial=0))
        # The kernels that a bucket of the same batch takes.
        waypoints = None
        if batch.waypoints is not None:
            table = np.empty(num_waypoints(batch.num_tokens, batch.control.shape[1] - 1), dtype=np.int32)
            fill_waypoints(table, batch, batch.num_short)
            waypoints = torch.from_numpy(table).cuda()
        rows = Rows(control, batch.num_short, 1 if longest == 1 else MAX_DRAFT, longest, waypoints=waypoints)
        hidden = torch.from_numpy(np.concatenate(batch.hidden).view(np.int16)).cuda().view(torch.bfloat16)
        new_pages = None if batch.new_pages is None else torch.from_numpy(batch.new_pages).cuda()
        output = self.model.forward(batch.span, hidden, rows, self.pool, new_pages=new_pages)
        returned = output if batch.wanted is None else output[torch.from_numpy(batch.wanted).cuda()]
        array = returned.view(torch.int16).cpu().numpy().view(DTYPE)
        finite = sound_rows(batch.control[0], token_sizes(output).cpu().numpy())
        return Launched(lambda: True, lambda: BatchResult(array, finite))


class Twins:
    """Two engines with the same weights, each with its own state: one replays graphs, the other launches."""

    def __init__(self, config: Path) -> None:
        spans = (range(2), range(2, 3))
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

    def sequences(self, seed: int) -> Sequences:
        """Sequences that both have."""
        return Sequences(seed, self.ends, self.num_pages, self.paged_spans)

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
    scope="module",
    params=[CONFIG, MAMBA2, HYBRID, STREAMS, EXPERTS],
    ids=["gated_delta_net", "mamba2", "hybrid", "streams", "experts"],
)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    config = tmp_path_factory.mktemp("model") / "config.json"
    config.write_text(json.dumps(request.param))
    twins = Twins(config)
    yield twins
    for engine in twins.engines:
        engine.close()


def close(result: BatchResult, expected: BatchResult) -> bool:
    difference = result.hidden.astype(np.float32) - expected.hidden.astype(np.float32)
    return bool(np.linalg.norm(difference) <= 1e-2 * np.linalg.norm(expected.hidden.astype(np.float32)))


@pytest.mark.gpu
def test_replays_compute_what_launches_compute(twins: Twins) -> None:
    sequences = twins.sequences(1)
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
    sequences = twins.sequences(2)
    batches = [sequences.batch(rows, verify=False) for rows in (1, 2, 4, 8, 16, 24) for _ in range(3)]
    for result, expected in zip(*twins.run(batches), strict=True):
        np.testing.assert_array_equal(result.hidden.view(np.uint16), expected.hidden.view(np.uint16))


@pytest.mark.gpu
def test_who_polls_launches_and_gets_what_launches_compute(twins: Twins) -> None:
    sequences = twins.sequences(9)
    batches = [sequences.batch(rows, span) for rows in (1, 3, 16, 24) for span in (0, 1)]
    for result, expected in zip(*twins.run(batches, polls=True), strict=True):
        assert result.finite.all() and close(result, expected)


@pytest.mark.gpu
def test_long_rows_are_replayed_and_too_many_rows_launched(twins: Twins) -> None:
    sequences = twins.sequences(3)
    batches = []
    for long in (5, 64, 65, 700, CHUNK):
        batches += [sequences.batch(6), sequences.batch(6, long=long), sequences.batch(NUM_LINES), sequences.batch(3)]
        batches += [sequences.batch(6, long=long, want=want) for want in ("last", "none")]
    for result, expected in zip(*twins.run(batches), strict=True):
        assert result.finite.all() and result.hidden.shape == expected.hidden.shape and close(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("want", ["all", "last"])
def test_pinned_memory_is_read_and_written_where_it_is(twins: Twins, want: str) -> None:
    sequences = twins.sequences(7)
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
    batch = twins.sequences(8).batch(7, want=want)
    count = batch.num_tokens if batch.wanted is None else len(batch.wanted)
    into = np.full((count, twins.ends[0].output_width), np.nan, dtype=DTYPE)
    (result,), (expected,) = twins.run([replace(batch, into=(into[:2], into[2:]))])
    assert result.is_placed and not len(result.hidden)
    assert close(replace(result, hidden=into), expected)


@pytest.mark.gpu
def test_a_row_that_is_not_finite_is_flagged_alone(twins: Twins) -> None:
    batch = twins.sequences(4).batch(5)
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


def row_of(span: int, hidden: NDArray[Any], read: int, write: int, position: int) -> StepBatch:
    """A batch of one row."""
    control = np.array([[0, len(hidden)], [read, 0], [write, 0], [len(hidden), 0], [0, 0], [0, 0], [position, 0]])
    return StepBatch(span, control.astype(np.int32), int(len(hidden) <= MAX_DRAFT), (hidden,), None)


@pytest.mark.gpu
def test_waypoints_are_left_by_replays_and_by_none_after_them(twins: Twins) -> None:
    """On a span without attention, where a line is all that there is of a state."""
    sequences = twins.sequences(8)
    prefill = sequences.batch(3, span=1, verify=False, long=200)
    begin, end = prefill.control[0, 2:].tolist()
    free = [line for line in range(1, NUM_LINES + 1) if line not in prefill.control[2, :-1]]
    prefill.waypoints = np.array([[2, 2], [64, 192], free[:2]], dtype=np.int32)
    hidden = np.concatenate(prefill.hidden)[begin:end]
    batches = [prefill, row_of(1, hidden[:64], 0, free[2], 0)]  # the second has no waypoints, and so leaves none
    # A token behind the first place, behind the same of one who stopped there, and behind the second place.
    batches += [row_of(1, hidden[64:65], line, free[3], 64) for line in (free[0], free[2])]
    batches.append(row_of(1, hidden[192:193], free[1], free[4], 192))
    results, expected = twins.run(batches)
    assert all(one.finite.all() and close(one, other) for one, other in zip(results, expected, strict=True))
    assert close(results[2], results[3]) and not close(results[2], results[4])


@pytest.mark.gpu
def test_serving_compiles_captures_and_allocates_nothing(twins: Twins) -> None:
    sequences = twins.sequences(5)
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
    assert before.captures > 40 and before.allocations > 0 and before.bytes > 0
    assert twins.progress[-1] == (before.captures, before.captures)


# None twice in a process.
VALUES = itertools.count(1)


@triton.jit  # type: ignore[untyped-decorator]
def store(x, VALUE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x, VALUE)


@pytest.mark.gpu
def test_what_is_compiled_while_serving_is_counted(twins: Twins) -> None:
    """Whatever was compiled before in this process, for another model too, is not compiled again."""
    before = twins.executors[0].counts().compilations
    store[(1,)](torch.zeros(1, device="cuda"), next(VALUES))
    assert twins.executors[0].counts().compilations == before + 1
