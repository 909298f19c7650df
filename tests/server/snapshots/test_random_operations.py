"""Random operations on sequences and snapshots, against a model in plain Python that keeps every history whole.

Whatever was shared, frozen, copied, given up or left poisoned: each output is bitwise that of a sequence which shares
nothing and was fed the same history in the same places of the same batches; and every count agrees after each step.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.scheduler_rig import turns
from rigs.small_models import EXPERTS, FALCON, GATED_DELTA_NET, HYBRID, KIMI, LFM2_MOE, MAMBA1, MAMBA2, NEMOTRON
from rigs.state_rig import MAX_CONTEXT, MAX_DRAFT, Array, Entry, Reference, StateRig
from rigs.until import until

from deltaline_server.batch import StepBatch
from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import ANONYMOUS, Principal
from deltaline_server.step import (
    WAYPOINT_TOKENS,
    OutputRows,
    RowKind,
    RowOutcome,
    RowWaypoints,
    StepForm,
    StepRequest,
    StepResult,
)
from deltaline_server.tables.captured.capture import Capture
from deltaline_server.tables.captured.snapshot import SnapshotState
from deltaline_server.tables.captured.state import CapturedState
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.pages import PagePool
from deltaline_server.tables.prefixes.cost import ReusePolicy
from deltaline_server.tables.prefixes.index import Miss
from deltaline_server.tables.prefixes.keys import PrefixKeys
from deltaline_server.tables.sequence import SequenceState
from deltaline_server.tables.sequences import SequenceTable

SLOTS, SNAPSHOT_LINES, PAGES = 9, 4, 48
PRINCIPALS = ANONYMOUS, Principal(1, "one"), Principal(2, "other")
# For some states of a small model.
HOST_BYTES = 400_000
PREFILL, DECODE, VERIFY = RowKind.PREFILL, RowKind.DECODE, RowKind.VERIFY
MODELS: dict[str, tuple[dict[str, Any], list[range] | None]] = {
    "gated_delta_net": (GATED_DELTA_NET, None),
    "mamba2": (MAMBA2, None),
    "hybrid": (HYBRID, None),
    "hybrid, two spans": (HYBRID, [range(0, 1), range(1, 2)]),
    "streams": (HYBRID | {"hc_mult": 2}, None),
    "experts": (EXPERTS, None),
    "layers without a state": (NEMOTRON, [range(0, 1), range(1, 4)]),
    "two states in a layer": (FALCON, None),
    "short convolutions": (LFM2_MOE, None),
    "latents": (KIMI, None),
    "channels with steps of their own": (MAMBA1, None),
}
# test_transfer.py and test_continuation.py try their states in every run.
RARE = (
    "layers without a state",
    "two states in a layer",
    "short convolutions",
    "latents",
    "channels with steps of their own",
)


@dataclass
class Span:
    """How far a sequence is on a span, as whoever steps it knows."""

    step: int = 0
    position: int = 0
    pending: int = 0
    replay: int = 0


@dataclass(frozen=True)
class Issued:
    """A step that was taken, or what is left of it: what its row will be in batches. length: its tokens."""

    step: int
    kind: RowKind
    replayed: int
    position: int
    length: int


@dataclass
class Known:
    """A sequence, or a snapshot, as the model knows it. key: under which it is found, empty for none."""

    spans: list[Span]
    history: list[Entry] = field(default_factory=list)
    issued: list[deque[Issued]] = field(default_factory=list)
    reference: Reference | None = None
    line: int = 0
    owner: Principal = ANONYMOUS
    key: bytes = b""

    def child(self, history: list[Entry], spans: list[Span], key: bytes = b"") -> Known:
        inherited = [replace(entry, step=0) for entry in history]
        spans = [replace(span, step=0) for span in spans]
        return Known(spans, inherited, [deque() for _ in spans], owner=self.owner, key=key)

    def upto(self, position: int) -> list[Entry]:
        """What was done on each span until it had so many tokens."""
        found = [entry for entry in self.history if entry.position < position]
        stops = [position - entry.position for entry in found]
        return [
            replace(entry, stop=stop) if (entry.stop or entry.committed) > stop else entry
            for entry, stop in zip(found, stops, strict=True)
        ]

    @property
    def refusal(self) -> Reason | None:
        """Why it can't be captured."""
        if any(span.pending for span in self.spans):
            return Reason.VERIFY_PENDING
        return Reason.SPANS_UNEVEN if len({span.position for span in self.spans}) > 1 else None


class World:
    """The rig, and what the model knows of it. done: operations by their name."""

    def __init__(self, name: str, folder: Path, seed: int, tiers: str = "", **place: Any) -> None:
        """tiers: "host", or "files" for both, beside the device. place: the device and the dtype of StateRig."""
        config, spans = MODELS[name]
        self.rng = np.random.default_rng(seed)
        self.rig = StateRig(
            config,
            folder,
            self.on_rows,
            slots=SLOTS,
            snapshot_lines=2 if tiers else SNAPSHOT_LINES,
            pages=PAGES,
            spans=spans,
            references=3 * SLOTS,
            chunk_tokens=1024,
            host_bytes=HOST_BYTES if tiers else 0,
            state_dir=folder / "states" if tiers == "files" else None,
            **place,
        )
        self.num_spans = len(self.rig.model.spans)
        self.known: dict[int, Known] = {}
        self.snapshots: dict[bytes, tuple[Known, bool]] = {}
        self.over: set[bytes] = set()
        self.done: Counter[str] = Counter()
        self.waiting: list[asyncio.Future[Any]] = []
        self.num_compared = 0

    # -- what batches do -------------------------------------------------------------------------------------------

    def on_rows(self, batch: StepBatch, handles: dict[int, int]) -> Callable[[Array], None]:
        """Predict what the rows of a batch do; what comes out is compared with their references."""
        span, expected = batch.span, []
        for row, handle in handles.items():
            known = self.known[handle]
            issued = known.issued[span].popleft()
            length = int(np.diff(batch.control[0])[row])
            if length < issued.length:  # a prefill is cut where another principal's turn is
                rest = replace(issued, replayed=0, position=issued.position + length, length=issued.length - length)
                known.issued[span].appendleft(rest)
            committed = 0 if issued.kind is VERIFY else length
            expected.append((known, row, committed, issued))

        def told(hidden: Array) -> None:
            if batch.wanted is not None:
                hidden, wanted = np.full((batch.num_tokens, hidden.shape[1]), np.nan, hidden.dtype), hidden
                hidden[batch.wanted] = wanted
            for known, row, committed, issued in expected:
                if known.reference is None:
                    known.line, known.reference = self.rig.reference(known.history)
                done = known.reference.run(batch, row, committed, issued.replayed, issued.position)
                output = hidden[batch.control[0, row] : batch.control[0, row + 1]].copy()
                np.testing.assert_array_equal(output, done)
                known.history.append(
                    Entry(batch, row, issued.step, committed, issued.replayed, issued.position, output)
                )
                self.num_compared += 1

        return told

    # -- operations ------------------------------------------------------------------------------------------------

    def some(self, most: int) -> list[int]:
        """Some of the open sequences of a principal, at least one."""
        owner = list(self.known.values())[int(self.rng.integers(len(self.known)))].owner
        handles = [handle for handle, known in self.known.items() if known.owner is owner]
        count = int(self.rng.integers(1, min(most, len(handles)) + 1))
        return [handles[i] for i in self.rng.choice(len(handles), count, replace=False).tolist()]

    async def open(self) -> None:
        if len(self.known) < SLOTS:
            owner = PRINCIPALS[int(self.rng.choice(3, p=[0.6, 0.2, 0.2]))]
            opened = self.rig.table.open(1, lease_s=1e3, principal=owner)
            self.begin(opened.handles, [Known([Span() for _ in range(self.num_spans)], owner=owner)])

    def begin(self, handles: Array, all_known: list[Known]) -> None:
        for handle, known in zip(handles.tolist(), all_known, strict=True):
            known.issued = [deque() for _ in range(self.num_spans)]
            assert handle not in self.known
            self.known[handle] = known

    async def step(self) -> None:
        """Steps of some sequences, mostly on every span alike."""
        rows = []
        for handle in self.some(4):
            kind = RowKind(int(self.rng.choice([PREFILL, DECODE, DECODE, VERIFY])))
            length = {
                PREFILL: int(self.rng.integers(1, 40)),
                DECODE: 1,
                VERIFY: int(self.rng.integers(1, MAX_DRAFT + 1)),
            }
            accepted = int(self.rng.integers(0, 5))
            rows.append((handle, kind, length[kind], accepted))
        last = self.num_spans if self.rng.random() < 0.9 else 1
        for span in range(last):
            self.submit(span, rows)

    async def waypoints(self) -> None:
        """A prefill that leaves states on its way."""
        (handle,) = self.some(1)
        known, length = self.known[handle], int(self.rng.integers(WAYPOINT_TOKENS, 2 * WAYPOINT_TOKENS + 9))
        places = tuple(at for at in range(WAYPOINT_TOKENS, length + 1, WAYPOINT_TOKENS) if self.rng.random() < 0.7)
        asked = RowWaypoints(
            places,
            at_end=bool(self.rng.random() < 0.5),
            is_pinned=bool(self.rng.random() < 0.2),
            # Wherever the step begins.
            keys={position: self.rng.bytes(16) for position in range(1, 2 * MAX_CONTEXT)},
        )
        row, spans = (handle, PREFILL, length, int(self.rng.integers(0, 5))), range(self.num_spans)
        futures = [self.submit(span, [row], {0: asked} if self.rng.random() < 0.9 else {}) for span in spans]

        async def told() -> None:
            for _, place in [place for future in futures for place in (await future).waypoints]:
                if place.skipped:
                    assert place.skipped in ("NO_SNAPSHOT_LINES", "PAGES_EXHAUSTED", "SPANS_UNEVEN")
                    self.done[f"waypoints: {place.skipped}"] += 1
                    continue
                spans = [Span(position=place.position) for _ in range(self.num_spans)]
                child = known.child(known.upto(place.position), spans, asked.keys[place.position])
                self.snapshots[place.snapshot] = child, asked.is_pinned
                self.done["waypoints"] += 1

        self.waiting.append(asyncio.ensure_future(told()))

    def submit(
        self,
        span: int,
        rows: list[tuple[int, RowKind, int, int]],
        waypoints: dict[int, RowWaypoints] | None = None,
    ) -> asyncio.Future[StepResult]:
        fields, before, tokens = [], [], 0
        for handle, kind, length, accepted in rows:
            at = self.known[handle].spans[span]
            if at.pending and self.num_spans > 1:
                accepted = 1  # the same on every span
            commit = min(accepted, at.pending) if at.pending else -1
            before.append(replace(at))
            if commit >= 0:
                at.position, at.pending, at.replay = at.position + commit, 0, commit
            at.step += 1
            fields.append((handle, kind, at.step, at.position, commit))
            self.known[handle].issued[span].append(Issued(at.step, kind, at.replay, at.position, length))
            at.replay = 0
            if kind is VERIFY:
                at.pending = length
            else:
                at.position += length
            tokens += length
        starts = np.cumsum([0, *(row[2] for row in rows)])
        ends = self.rig.model.ends[span]
        handle_, kind_, step_, position_, accepted_ = (list(column) for column in zip(*fields, strict=True))
        form = StepForm(
            self.rig.table.server_epoch,
            span,
            np.array(handle_, dtype=np.uint64),
            np.array(kind_, dtype=np.uint8),
            np.array(accepted_, dtype=np.int32),
            starts.astype(np.int64),
            OutputRows.ALL,
            0,
            ends,
            waypoints or {},
        )
        hidden = self.rng.standard_normal((tokens, ends.input_width)).astype(self.rig.model.numpy_dtype)
        owner = self.known[handle_[0]].owner
        numbers, positions = np.array(step_, dtype=np.int64), np.array(position_, dtype=np.int64)
        request = StepRequest(form, numbers, positions, hidden, principal=owner)
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self.rig.scheduler.submit(request, future.set_result)
        slots, _ = self.rig.table.lookup(form.server_epoch, form.handle, owner)
        tail = self.rig.table.ledger.tail.step[span, slots]
        for handle, last, step, old in zip(handle_, tail.tolist(), step_, before, strict=True):
            if last < step:  # it was refused when it came, and nothing of it happened
                self.known[handle].spans[span] = old
                self.known[handle].issued[span].pop()
                self.done["step refused"] += 1
        self.waiting.append(future)
        return future

    async def commit(self) -> None:
        """Fix how much of a verify is accepted, by itself."""
        (handle,) = self.some(1)
        known = self.known[handle]
        for span, at in enumerate(known.spans):
            if at.pending and not known.issued[span] and not self.waiting:
                accepted = min(1 if self.num_spans > 1 else int(self.rng.integers(0, 5)), at.pending)
                numbers, handles = np.array([at.step]), np.array([handle], dtype=np.uint64)
                counts = np.array([accepted], dtype=np.int32)
                table = self.rig.table
                positions, refusals = table.commit(table.server_epoch, span, handles, numbers, counts, known.owner)
                assert not refusals and positions[0] == at.position + accepted
                at.position, at.pending, at.replay = at.position + accepted, 0, accepted

    async def snapshot(self) -> None:
        handles, is_pinned = self.some(2), bool(self.rng.random() < 0.2)
        expected = self.expected(handles)
        lease_s = float(self.rng.choice([5.0, 100.0]))
        epoch, owner = self.rig.table.server_epoch, self.known[handles[0]].owner
        named = np.array(handles, dtype=np.uint64)
        keys = [self.rng.bytes(16) if self.rng.random() < 0.8 else b"" for _ in handles]
        made = self.rig.states.create(epoch, named, owner, lease_s=lease_s, is_pinned=is_pinned, keys=keys)

        async def told() -> None:
            try:
                described = await made
            except RequestError as error:
                self.refused(error, expected, "snapshot")
                return
            assert not any(known.refusal for known, _, _ in expected())
            for one, key, (known, history, spans) in zip(described, keys, expected(), strict=True):
                assert one.position == spans[0].position
                self.snapshots[one.id] = known.child(history, spans, key), is_pinned
            self.done["snapshot"] += 1

        await self.ordered(told())

    async def fork(self) -> None:
        handles, count = self.some(2), int(self.rng.integers(1, 4))
        expected = self.expected(handles)
        epoch, owner = self.rig.table.server_epoch, self.known[handles[0]].owner
        made = self.rig.states.fork(epoch, np.array(handles, dtype=np.uint64), count, owner, lease_s=1e3)

        async def told() -> None:
            try:
                opened = await made
            except RequestError as error:
                self.refused(error, expected, "fork")
                return
            assert not any(known.refusal for known, _, _ in expected())
            children = [known.child(history, spans) for known, history, spans in expected() for _ in range(count)]
            self.begin(opened.handles, children)
            self.done["fork"] += 1

        await self.ordered(told())

    async def ordered(self, told: Any) -> None:
        """Let something take its place among the steps, now."""
        self.waiting.append(asyncio.ensure_future(told))
        await turns(2)

    def expected(self, handles: list[int]) -> Callable[[], list[tuple[Known, list[Entry], list[Span]]]]:
        """What sequences will be when the steps that were taken so far are done."""
        parents = [self.known[handle] for handle in handles]
        spans = [[replace(span) for span in known.spans] for known in parents]

        def then() -> list[tuple[Known, list[Entry], list[Span]]]:
            found = []
            for known, at in zip(parents, spans, strict=True):
                history = [entry for entry in known.history if entry.step <= at[entry.batch.span].step]
                found.append((Known(at, owner=known.owner), history, at))
            return found

        return then

    def refused(self, error: RequestError, expected: Callable[[], list[Any]], name: str) -> None:
        reason = error.refusal.reason
        why = {known.refusal for known, _, _ in expected()} - {None}
        if why:
            assert reason in why
        else:
            assert reason in (Reason.NO_SNAPSHOT_LINES, Reason.PAGES_EXHAUSTED, Reason.NO_FREE_LINES)
        self.done[f"{name}: {reason.name}"] += 1

    async def restore(self) -> None:
        if not self.snapshots:
            return
        id = self.one_snapshot()
        owner = self.snapshots[id][0].owner
        own = [one for one, (known, _) in self.snapshots.items() if known.owner is owner]
        ids = [id, *own[: int(self.rng.integers(0, 2))]]
        stored = [self.snapshots[id][0] for id in ids]

        async def told() -> None:
            try:
                async with self.rig.states.near(ids, owner):
                    opened = self.rig.states.restore(ids, owner, lease_s=1e3)
            except RequestError as error:
                assert error.refusal.reason in (
                    Reason.PAGES_EXHAUSTED,
                    Reason.NO_FREE_LINES,
                    Reason.SNAPSHOT_UNKNOWN,
                    Reason.NO_SNAPSHOT_LINES,
                )
                self.done[f"restore: {error.refusal.reason.name}"] += 1
                return
            self.begin(opened.handles, [known.child(known.history, known.spans) for known in stored])
            self.done["restore"] += 1

        await self.ordered(told())

    async def find(self) -> None:
        """A prompt that goes on from a snapshot is found by its owner alone, and begins with it, or with nothing."""
        if not self.snapshots:
            return
        over = [id for id in self.snapshots if id in self.over]
        id = over[0] if over and self.rng.random() < 0.4 else self.one_snapshot()
        known, _ = self.snapshots[id]
        position = known.spans[0].position
        if not known.key or not position:
            return
        keys, states = PrefixKeys.of([known.key], [position], position + 1), self.rig.states
        # A waypoint at its row's end is there twice: of states that are alike, any that is held will do.
        alike = [one for one, (other, _) in self.snapshots.items() if other.key == known.key]
        told_states = zip(alike, self.rig.snapshots.renew(alike, known.owner, lease_s=None), strict=True)
        held = [one for one, state in told_states if state is SnapshotState.HELD]
        for other in PRINCIPALS:
            found = states.find(keys, b"", other, ReusePolicy.ALWAYS)
            if other is not known.owner:
                assert found.miss is Miss.NEVER_STORED
            elif held:
                assert found.prefix is not None and found.prefix.snapshot in held and found.prefix.position == position
            else:
                assert (found.prefix, found.miss) == (None, Miss.EVICTED)
        self.done["found" if held else "not found"] += 1
        table = self.rig.table

        async def told() -> None:
            try:
                async with states.near_found(keys, b"", known.owner, ReusePolicy.ALWAYS) as found:
                    opened = states.open(
                        found,
                        keys,
                        b"",
                        known.owner,
                        count=1,
                        lease_s=1e3,
                        otherwise=lambda: table.open(1, lease_s=1e3, principal=known.owner),
                    )
            except RequestError as error:
                assert error.refusal.reason in (
                    Reason.PAGES_EXHAUSTED,
                    Reason.NO_FREE_LINES,
                    Reason.NO_SNAPSHOT_LINES,
                )
                self.done[f"open: {error.refusal.reason.name}"] += 1
                return
            begins = known.child(known.history, known.spans)
            if found.prefix is None:
                begins = Known([Span() for _ in range(self.num_spans)], owner=known.owner)
            self.begin(opened.handles, [begins])
            assert held or found.prefix is None
            self.done["opened where it was found" if found.prefix else "opened beside"] += 1

        await self.ordered(told())

    def one_snapshot(self) -> bytes:
        return list(self.snapshots)[int(self.rng.integers(0, len(self.snapshots)))]

    async def release(self) -> None:
        if self.snapshots:
            id = self.one_snapshot()
            (state,) = self.rig.snapshots.release([id], self.snapshots[id][0].owner)
            assert state in (SnapshotState.RELEASED, SnapshotState.EVICTED, SnapshotState.EXPIRED)
            del self.snapshots[id]

    async def leave(self) -> None:
        """Host memory lets go of some snapshots, as when others need their places."""
        host = self.rig.tiers.host
        for id in list(self.snapshots):
            if host is not None and host.find(id) is not None:
                host.release(id)
                host.on_evicted(id)

    async def close(self) -> None:
        await self.finish()
        (handle,) = self.some(1)
        self.close_one(handle)

    def close_one(self, handle: int) -> None:
        table, owner = self.rig.table, self.known[handle].owner
        states = table.close(table.server_epoch, np.array([handle], dtype=np.uint64), owner)
        assert states == [SequenceState.CLOSED]
        self.end(handle)

    async def expire(self) -> None:
        """Time goes on: leases end, of snapshots and now and then of a sequence."""
        await self.finish()
        if self.rng.random() < 0.3:
            (handle,) = self.some(1)
            table, owner = self.rig.table, self.known[handle].owner
            table.renew(table.server_epoch, np.array([handle], dtype=np.uint64), 1.0, owner)
            # Its lease is a step's as well: only what was asked for now ends so soon.
            self.rig.now += 2
            assert table.reap() == 1
            self.end(handle)
        self.rig.now += 4
        self.rig.snapshots.reap()
        others = np.array(list(self.known), dtype=np.uint64)
        for owner in PRINCIPALS:  # others' are left alone
            self.rig.table.renew(self.rig.table.server_epoch, others, 1e3, owner)

    def end(self, handle: int) -> None:
        known = self.known.pop(handle)
        if known.reference is not None:
            self.rig.forget(known.line)

    # -- all of it -------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Compute all that waits; every step that was taken has been done."""
        self.rig.engine.eager = True
        self.rig.engine.run()
        for waiting in self.waiting:
            while not waiting.done():
                if self.rig.scheduler.has_failed:  # as its log tells
                    raise ValueError("batch: one was never done")
                await turns(1)
            result = waiting.result()
            if isinstance(result, StepResult):
                assert {RowOutcome(int(one)) for one in result.outcome} <= {RowOutcome.EXECUTED, RowOutcome.REFUSED}
                reasons = {refusal.reason for refusal in result.refusals.values()}
                assert reasons <= {Reason.PAGES_EXHAUSTED, Reason.CONTEXT_EXCEEDED}
        self.waiting = []
        if self.rig.moves is not None and self.rng.random() < 0.5:
            await until(lambda: self.rig.moves is None or not self.rig.moves.is_busy)
        self.rig.scheduler.settle()
        assert not self.rig.scheduler.has_failed
        assert not any(issued for known in self.known.values() for issued in known.issued)
        for id, (known, is_pinned) in list(self.snapshots.items()):
            (state,) = self.rig.snapshots.renew([id], known.owner, lease_s=None)
            assert state is not SnapshotState.EVICTED or not is_pinned
            self.done[state.name] += 1
            if state is not SnapshotState.HELD:  # some are still asked for
                self.over.add(id)
                if self.rng.random() < 0.1:
                    del self.snapshots[id]

    async def run(self, count: int) -> None:
        """So many operations."""
        operations = {
            self.open: 3,
            self.step: 12,
            self.waypoints: 3,
            self.commit: 5,
            self.snapshot: 7,
            self.fork: 3,
            self.restore: 3,
            self.find: 5,
            self.release: 1,
            self.close: 5,
            self.expire: 1,
        }
        try:
            await self.run_some(operations, count)
        finally:  # nobody else would hear of what is left where one fails
            for waiting in self.waiting:
                waiting.cancel()
            await asyncio.gather(*self.waiting, return_exceptions=True)

    async def run_some(self, operations: dict[Callable[[], Any], int], count: int) -> None:
        """So many operations, as often as their weights say."""
        if self.rig.moves is not None:
            operations |= {self.leave: 0 if self.rig.tiers.files is None else 4, self.restore: 8, self.close: 12}
        weights = np.array(list(operations.values())) / sum(operations.values())
        for _ in range(count):
            name = list(operations)[int(self.rng.choice(len(weights), p=weights))]
            if not self.known:
                name = self.open
            await name()
            if len(self.waiting) > 3 or self.rng.random() < 0.6:
                await self.finish()
                self.rig.engine.eager = bool(self.rng.random() < 0.5)
                long = [handle for handle, known in self.known.items() if too_long(known)]
                for handle in long:
                    self.close_one(handle)
            self.rig.snapshots.check_integrity()
            self.rig.waypoints.check_integrity()
        await self.finish()
        self.rig.snapshots.check_integrity()


def too_long(known: Known) -> bool:
    return len(known.history) > 24 or max(span.position for span in known.spans) > MAX_CONTEXT - 30


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tiers", ["", "host", "files"], ids=["device", "host", "files"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep if name in RARE else ()) for name in MODELS]
)
@pytest.mark.parametrize("count", [120, pytest.param(10_000, marks=pytest.mark.sweep)])
async def test_all_goes_on_bitwise_as_what_shares_nothing(name: str, tiers: str, count: int, tmp_path: Path) -> None:
    world = World(name, tmp_path, seed=7, tiers=tiers)
    await world.run(3 * count if tiers else count)
    await world.rig.close()
    assert world.num_compared > count / 3, world.done
    kinds = ["snapshot", "fork", "restore", "found", "opened where it was found", "waypoints", "HELD"]
    if world.rig.moves is None:
        kinds += ["not found", "EVICTED"]
    else:
        brought = world.rig.moves.num_brought
        assert sum(brought.values()) > 0 and world.rig.moves.num_lost == 0, brought
    assert min(world.done[one] for one in kinds) > 0, world.done


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
async def test_a_gpu_goes_on_bitwise_as_what_shares_nothing(name: str, tmp_path: Path) -> None:
    """Replayed from graphs, pages placed in the order of a stream."""
    world = World(name, tmp_path, seed=4, device=torch.device("cuda"), dtype=torch.bfloat16)
    await world.run(600)
    assert world.num_compared > 200, world.done
    assert min(world.done[one] for one in ("snapshot", "fork", "restore", "EVICTED", "HELD")) > 0, world.done


def share_the_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is written while it is shared."""
    monkeypatch.setattr(PagePool, "is_cut", lambda self, num_tokens: False)
    monkeypatch.setattr(PagePool, "check_batch", lambda *_: None)


def release_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line goes back while a child has yet to read it."""
    restore = Capture.restore

    def without_reference(self: Capture, states: list[CapturedState], *arguments: Any) -> Any:
        opened = restore(self, states, *arguments)
        table = self._table
        for state in states:
            table.lines.release(state.read_line.tolist())
        return opened

    monkeypatch.setattr(Capture, "restore", without_reference)


def write_the_frozen_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent goes on in the line that its snapshot has."""
    capture = Capture.capture

    def in_place(self: Capture, slots: Slots, *arguments: Any) -> list[CapturedState]:
        table: SequenceTable = self._table
        before = table.write_line[slots].copy()
        states = capture(self, slots, *arguments)
        table.write_line[slots] = before
        return states

    monkeypatch.setattr(Capture, "capture", in_place)


@pytest.mark.parametrize("plant", [share_the_last_page, release_too_early, write_the_frozen_line])
@pytest.mark.parametrize("checks", [True, False], ids=["counts", "outputs"])
async def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], checks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the counts, and without them by the outputs, or where a guard of the tables comes first."""
    plant(monkeypatch)
    world = World("hybrid", tmp_path, seed=3)
    if not checks:
        monkeypatch.setattr(world.rig.snapshots, "check_integrity", lambda: None)
        monkeypatch.setattr(world.rig.lines, "check_batch", lambda *_: None)
        with pytest.raises((AssertionError, ValueError, RequestError)):
            await world.run(300)
    else:
        with pytest.raises(ValueError, match=r"pool|table|batch"):
            await world.run(300)
