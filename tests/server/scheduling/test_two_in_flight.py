"""Two batches in flight: what may overlap, when the second one is formed, and histories against a slow simple model.

Times come from an event loop whose clock jumps to the next event, so that loads of seconds run in no time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, MAX_DRAFT, PREFILL, VERIFY, Rig, checksum, outputs, reason, turns
from rigs.seeds import seeds

from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.errors import Reason
from deltaline_server.step import OutputRows, RowKind, RowOutcome, StepResult
from deltaline_server.tables.sequence import SequenceState


async def test_chunks_of_a_row_overlap_and_the_engine_copies_no_hidden_state() -> None:
    rig = Rig(eager=False, chunk_tokens=64)
    (a,) = rig.open()
    request = rig.request((a, PREFILL, 1, 0, -1, [float(i) for i in range(200)]))
    long = rig.submit(request)
    await turns(4)
    assert [batch.num_tokens for batch in rig.engine.batches] == [64, 64]
    assert rig.engine.batches[1].control[1, 0] == rig.engine.batches[1].control[2, 0]  # it reads what the first writes
    assert all(np.shares_memory(batch.hidden[0], request.hidden) for batch in rig.engine.batches)
    rig.engine.release()
    await long
    assert [batch.num_tokens for batch in rig.engine.batches] == [64, 64, 64, 8]


@pytest.mark.parametrize("how", ["not finite", "failed"])
async def test_what_runs_behind_a_chunk_that_went_wrong_is_discarded(how: str) -> None:
    rig = Rig(eager=False, chunk_tokens=64)
    a, b = rig.open(2)
    tokens = [1.0] * 200
    if how == "failed":
        rig.engine.fail_next = True
    else:
        tokens[3] = rig.engine.poison_token = 13.0
    long = rig.submit(rig.request((a, PREFILL, 1, 0, -1, tokens)))
    behind = rig.submit(rig.request((a, DECODE, 2, 200, -1, [2])))
    await turns(4)
    neighbour = rig.submit(rig.request((b, DECODE, 1, 0, -1, [5])))
    rig.engine.run()
    await turns(4)
    assert not long.done()  # its second chunk still writes the line
    assert rig.close(a) == [SequenceState.CLOSING]
    rig.engine.release()
    assert reason(await long) is Reason.STATE_POISONED
    assert reason(await behind) is Reason.PREDECESSOR_REFUSED
    assert outputs(await neighbour) == [5]
    await rig.scheduler.drained()
    assert rig.lines.num_used == 1 and [batch.num_tokens for batch in rig.engine.batches] == [64, 64, 1]
    rig.table.check_integrity()


async def test_a_poisoned_slot_takes_what_runs_on_its_other_span_with_it() -> None:
    rig = Rig(eager=False, spans=2)
    (a,) = rig.open()
    rig.engine.poison_token = 13.0
    bad = rig.submit(rig.request((a, DECODE, 1, 0, -1, [13]), span=0))
    other = rig.submit(rig.request((a, DECODE, 1, 0, -1, [2]), span=1))
    await turns(4)
    assert len(rig.engine.waiting) == 2
    rig.engine.run()
    await turns(4)
    assert reason(await bad) is Reason.STATE_POISONED and not other.done()
    rig.engine.run()
    assert reason(await other) is Reason.STATE_POISONED
    await turns(4)
    rig.table.check_integrity()


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its clock goes to the time of the next timer."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.now += timeout or 0.0
        return super().select(0)


class TimedEngine:
    """Takes its time on the jumping loop: a constant, so much per short row, and so much per token of long ones."""

    def __init__(self, loop: JumpingLoop) -> None:
        self._loop, self._free_s = loop, 0.0
        self.batches: list[tuple[int, int]] = []
        self.busy_s = 0.0

    def submit(self, batch: StepBatch, on_done: Callable[[BatchResult], None], polls: bool = False) -> None:
        long_tokens = int(batch.num_tokens - batch.control[0, batch.num_short])
        compute_s = 0.3e-3 * (batch.num_short > 0) + 3e-6 * batch.num_short + 1e-6 * long_tokens
        num_rows = batch.control.shape[1] - 1
        hidden = np.zeros((batch.num_tokens if batch.wanted is None else len(batch.wanted), 2), np.float32)
        result = BatchResult(hidden, np.ones(num_rows, bool), 0.0, compute_s, 0.0)
        self._free_s = max(self._free_s, self._loop.now + 0.15e-3) + compute_s  # the host needs 0.15 ms a batch
        self.batches.append((batch.num_short, long_tokens))
        self.busy_s += compute_s
        self._loop.call_at(self._free_s, on_done, result)

    def poll(self) -> bool:
        return False


class Load:
    """Closed-loop clients of a timed engine."""

    def __init__(self, slots: int = 1024, spans: int = 1) -> None:
        self.loop = JumpingLoop()
        self.engine = TimedEngine(self.loop)
        room: dict[str, Any] = {
            "queue_rows": 4096,
            "queue_bytes": 1 << 28,
            "reply_bytes": 1 << 28,
            "chunk_tokens": 2048,
        }
        self.num_spans = spans
        self.rig = Rig(slots=slots, spans=spans, **room, engine=self.engine, clock=self.loop.time)
        self.latencies: list[float] = []
        self.prefilled: dict[str, int] = {}

    async def decode(self, rows: int, until_s: float, delay_s: float, think_s: float) -> None:
        handles, step = self.rig.open(rows), 0
        await asyncio.sleep(delay_s)
        while self.loop.now < until_s:
            step += 1
            began_s = self.loop.now
            for span in range(self.num_spans):
                request = self.rig.request(*((h, DECODE, step, step - 1, -1, [1.0]) for h in handles), span=span)
                assert (await self.rig.submit(request)).outcome[0] == RowOutcome.EXECUTED
            self.latencies.append(self.loop.now - began_s)
            await asyncio.sleep(think_s)

    async def prefill(self, tokens: int, until_s: float, client: str = "") -> None:
        (handle,), step = self.rig.open(), 0
        hidden = np.zeros((tokens, 2), np.float32)
        while self.loop.now < until_s:
            for span in range(self.num_spans):
                request = self.rig.request(
                    (handle, PREFILL, step + 1, step * tokens, -1, []),
                    query_start_loc=np.array([0, tokens]),
                    hidden=hidden,
                    output=OutputRows.LAST,
                    client=client,
                    span=span,
                )
                await self.rig.submit(request)
            step += 1
            if self.loop.now < until_s:
                self.prefilled[client] = self.prefilled.get(client, 0) + tokens

    def run(self, *work: Coroutine[Any, Any, None]) -> None:
        async def all_of_it() -> None:
            await asyncio.gather(*work)

        self.loop.run_until_complete(all_of_it())
        self.loop.close()


def test_eight_closed_loop_clients_share_few_batches() -> None:
    load = Load()
    end_s = load.loop.now + 0.5
    load.run(*(load.decode(64, end_s, 0.05e-3 * i, 0.3e-3) for i in range(8)))
    sizes = [num_short for num_short, _ in load.engine.batches[20:-4]]
    assert np.mean(sizes) >= 0.45 * 512  # two groups that take turns
    assert load.engine.busy_s >= 0.9 * 0.5


def test_a_prefill_alone_runs_in_full_chunks_without_a_gap() -> None:
    load = Load()
    load.run(load.prefill(32768, load.loop.now + 0.5))
    assert {tokens for _, tokens in load.engine.batches} == {2048}
    assert load.engine.busy_s >= 0.98 * 0.5


@pytest.mark.parametrize("spans", [2, 4])
def test_decodes_on_each_span_beside_prefills_on_all_of_them_keep_their_latency(spans: int) -> None:
    alone, mixed = Load(spans=spans), Load(spans=spans)
    alone.run(alone.decode(64, alone.loop.now + 0.5, 0.0, 0.7e-3))
    end_s = mixed.loop.now + 1.0
    mixed.run(mixed.decode(64, end_s, 0.1, 0.7e-3), *(mixed.prefill(16384, end_s, str(i)) for i in range(spans)))
    p50, p99 = np.median(alone.latencies), np.quantile(mixed.latencies[20:], 0.99)
    assert p99 <= 6 * p50, (p99 / p50, sum(mixed.prefilled.values()))


def test_decodes_beside_endless_prefills_keep_their_latency_and_prefills_their_throughput() -> None:
    alone, mixed = Load(), Load()
    alone.run(alone.decode(64, alone.loop.now + 0.5, 0.0, 0.7e-3))
    end_s = mixed.loop.now + 1.0
    mixed.run(mixed.decode(64, end_s, 0.1, 0.7e-3), mixed.prefill(32768, end_s), mixed.prefill(32768, end_s))
    p50, p99 = np.median(alone.latencies), np.quantile(mixed.latencies[20:], 0.99)
    assert p99 <= 3 * (p50 + 0.3e-3)  # 0.3 ms: transport, which no simulated clock has
    assert mixed.prefilled[""] >= 0.7 * 1e6 * 0.95


def test_one_prefill_gets_its_share_beside_ten_of_another_client() -> None:
    load = Load()
    end_s = load.loop.now + 1.0
    load.run(load.prefill(8192, end_s, "few"), *(load.prefill(8192, end_s, "many") for _ in range(10)))
    assert load.prefilled["few"] >= 0.45 * sum(load.prefilled.values())


class History:
    """A (sequence, span): tokens and drafts as they will be once every step that was sent is executed."""

    def __init__(self) -> None:
        self.tokens: list[float] = []
        self.draft: list[float] = []
        self.step = 0
        self.sent: list[tuple[asyncio.Future[StepResult], list[float], list[float], list[float], list[float]]] = []

    def settle(self, outcomes: Counter[str]) -> bool:
        """Check the steps that are answered, in order; tell whether the sequence still lives."""
        while self.sent and self.sent[0][0].done():
            future, before, draft, base, new = self.sent.pop(0)
            why = reason(future.result())
            outcomes[why.name if why else "executed"] += 1
            if why is None:
                assert outputs(future.result()) == [checksum(base + new[: n + 1]) for n in range(len(new))]
                continue
            # What is behind a refused step is refused: nothing of it counts, and the sequence is where it was.
            reasons = [reason(behind.result()) for behind, *_ in self.sent]
            assert all(reasons)
            outcomes.update(refused.name for refused in reasons if refused)
            self.tokens, self.draft, self.step = before, draft, self.step - len(self.sent) - 1
            lives = why is not Reason.STATE_POISONED
            self.sent.clear()
            return lives
        return True


@pytest.mark.parametrize("seed", seeds(3))
async def test_random_histories_with_two_batches_in_flight(seed: int) -> None:
    """Steps in flight, cut rows, poison, deadlines, closes and a lack of pages: a row is executed with the right
    outputs, and with its own keys where the span keeps any, or refused."""
    rng = np.random.default_rng(seed)
    pages: dict[str, Any] = {"pages": 500, "paged_spans": (0,), "max_context": 900}
    rig = Rig(slots=6, spans=2, eager=False, chunk_tokens=128, queue_rows=256, **pages)
    rig.engine.poison_token = 99.0
    live: dict[int, list[History]] = {}
    outcomes: Counter[str] = Counter()
    most_in_flight = 0
    for _ in range(300):
        while rig.lines.num_used < 6:
            live[rig.open()[0]] = [History(), History()]
        if not live:  # all are closing
            rig.engine.run()
            await turns(4)
            continue
        handle = list(live)[rng.integers(len(live))]
        span = int(rng.integers(2))
        history = live[handle][span]
        if len(history.sent) < 4:
            kind = RowKind(int(rng.integers(1, 4)))
            lengths = {PREFILL: [3, 64, 300], DECODE: [1], VERIFY: range(1, MAX_DRAFT + 1)}
            count = int(rng.choice(lengths[kind]))
            new = [float(x) for x in rng.integers(1, 99, count)]
            if rng.random() < 0.02:
                new[-1] = 99.0
            before, draft, accepted = history.tokens, history.draft, -1
            if draft:
                accepted = int(rng.integers(len(draft) + 1))
            base = before + draft[: max(accepted, 0)]
            history.step += 1
            row = (handle, kind, history.step, len(base), accepted, new)
            deadline_s = rig.now + 1.0 if rng.random() < 0.1 else None
            future = rig.submit(rig.request(row, span=span, deadline_s=deadline_s))
            # A refused step commits nothing: `before` and `draft` are what it falls back to, `base` what it runs on.
            history.sent.append((future, before, draft, base, new))
            history.tokens, history.draft = (base, new) if kind is VERIFY else (base + new, [])
        rig.now += float(rng.choice([0.0, 0.0, 0.6]))
        most_in_flight = max(most_in_flight, len(rig.engine.waiting))
        if rig.engine.waiting and rng.random() < 0.5:
            rig.engine.run()
        for _ in range(int(rng.integers(4))):
            await asyncio.sleep(0)
        rig.table.check_integrity()
        for key in list(live):
            if not all(history.settle(outcomes) for history in live[key]) or rng.random() < 0.01:
                rig.close(key)
                del live[key]
    rig.engine.release()
    await asyncio.wait_for(rig.scheduler.drained(), 10)
    for histories in live.values():
        for history in histories:
            history.settle(outcomes)
            assert not history.sent
    load = rig.scheduler.load()
    assert load.queued_rows == load.queued_bytes == 0 and not rig.scheduler.has_failed
    assert most_in_flight == 2 and outcomes["executed"] > 100
    expected = {"QUEUE_DEADLINE", "PREDECESSOR_REFUSED", "STATE_POISONED", "PAGES_EXHAUSTED", "CONTEXT_EXCEEDED"}
    assert expected <= set(outcomes)
