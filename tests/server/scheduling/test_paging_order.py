"""Pages under steps in flight on several spans, failures, closes, deadlines: every batch finds its rows' own keys."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, PREFILL, VERIFY, Rig, reason
from rigs.seeds import seeds

from deltaline_server.errors import Reason
from deltaline_server.step import RowKind, StepResult
from deltaline_server.tables.sequence import SequenceState

SPANS, DRAFTS = 3, 3
Tail = tuple[int, int, int]
"""Step, position and pending drafts of a sequence on a span, once all that was sent is done."""


class Traffic:
    """Sequences of which every span gets steps of its own, several of them in flight."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.rig = Rig(pages=90, slots=6, spans=SPANS, paged_spans=(0, 2), max_context=270, eager=False, long_rows=2)
        self.rig.engine.drafts = defaultdict(list)  # of a verify that failed there are none
        self.handles: list[int] = []
        self.met: Counter[Reason | None] = Counter()

    def end(self, handle: int) -> None:
        self.handles.remove(handle)
        self.rig.close(handle)

    def tails(self) -> dict[tuple[int, int], Tail]:
        """Where the sequences stand while nothing is in flight; those that were poisoned end."""
        found = {}
        told = self.rig.table.describe(self.rig.table.server_epoch, np.array(self.handles, dtype=np.uint64))
        for handle, description in zip(list(self.handles), told, strict=True):
            if description.state is not SequenceState.OPEN or self.rng.random() < 0.1:
                self.end(handle)
            for span, at in enumerate(description.spans):
                found[handle, span] = at.step, at.position, at.pending_tokens
        return found

    def send(self, tails: dict[tuple[int, int], Tail]) -> tuple[asyncio.Future[StepResult], int]:
        """Send the next step of some sequences on a span, now and then a wrong one or one that comes too late."""
        rng, span, rows = self.rng, int(self.rng.integers(SPANS)), []
        for handle in rng.permutation(np.array(self.handles, dtype=np.uint64))[: rng.integers(1, 7)].tolist():
            step, position, pending = tails[handle, span]
            # The same of a verify at this position, whatever the span.
            accepted = 1 + (handle + position) % pending if pending else -1
            position += max(accepted, 0) + (rng.random() < 0.03)
            kind = (PREFILL, DECODE, VERIFY)[int(rng.integers(3))]
            count = {PREFILL: int(rng.integers(1, 150)), DECODE: 1, VERIFY: DRAFTS}[kind]
            rows.append((handle, RowKind(kind), step + 1, position, accepted, rng.integers(1, 99, count).tolist()))
            is_verify = kind is VERIFY
            tails[handle, span] = step + 1, position + (0 if is_verify else count), count * is_verify
        deadline_s = self.rig.now - 1 if rng.random() < 0.05 else None
        return self.rig.submit(self.rig.request(*rows, span=span, deadline_s=deadline_s)), len(rows)

    async def turn(self) -> None:
        """Send some steps while batches run and fail and sequences end; then let all of it finish."""
        rng, rig = self.rng, self.rig
        self.handles += rig.open(int(rng.integers(7 - rig.table.num_open)))
        tails, sent = self.tails(), []
        for _ in range(int(rng.integers(1, 9))):
            if not self.handles:
                break
            sent.append(self.send(tails))
            rig.engine.fail_next |= bool(rng.random() < 0.02)
            if rng.random() < 0.1 and self.handles:
                self.end(self.handles[0])
            if rng.random() < 0.4 and rig.engine.waiting:
                rig.engine.run()
                await asyncio.sleep(0)
            rig.table.check_integrity()
        while not all(future.done() for future, _ in sent):
            await asyncio.sleep(0)
            if rig.engine.waiting:
                rig.engine.run()
        for future, count in sent:
            self.met.update(reason(future.result(), row) for row in range(count))
        rig.scheduler.settle()
        assert not rig.scheduler.has_failed
        rig.table.check_integrity()


@pytest.mark.parametrize("seed", seeds(3))
async def test_steps_in_flight_on_several_spans_find_their_own_keys(seed: int) -> None:
    traffic = Traffic(seed)
    expected = {None, Reason.PAGES_EXHAUSTED, Reason.CONTEXT_EXCEEDED, Reason.STATE_POISONED, Reason.QUEUE_DEADLINE}
    # What is met how often depends on when steps are done.
    for turn in range(600):
        await traffic.turn()
        if turn >= 60 and min(traffic.met[why] for why in expected) >= 3:
            break
    else:
        pytest.fail(f"not all that may happen did: {traffic.met}")
    for handle in list(traffic.handles):
        traffic.end(handle)
    traffic.rig.table.check_integrity()
    assert traffic.rig.pages is not None and traffic.rig.pages.num_used == 0
