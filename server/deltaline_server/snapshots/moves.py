"""Snapshots between the tiers: stored in host memory and files behind the steps, and brought back to the device.

A snapshot that gives way on the device does so at once: if it lies in a lower tier by then it is held still, else it is
over. One at a time is copied each way, so that steps have the device, and others the disk, nearly alone; of those that
are to come back one owner's after the other's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import FairLock, Principal
from deltaline_server.snapshots.backlog import Backlog
from deltaline_server.snapshots.device.shared_transfer import SharedTransfer
from deltaline_server.snapshots.device.transfer import Commits, StatePlace, StateTransfer
from deltaline_server.snapshots.files import FileTier, Miss
from deltaline_server.snapshots.header import StateHeader
from deltaline_server.snapshots.host import HostTier
from deltaline_server.snapshots.layout import Bytes, SpanProgress
from deltaline_server.tables.captured.capture import Capture
from deltaline_server.tables.captured.snapshot import Snapshot, SnapshotState
from deltaline_server.tables.captured.snapshots import SnapshotTable
from deltaline_server.tables.captured.state import CapturedState, StoredState
from deltaline_server.tables.ledger import CommittedProgress
from deltaline_server.tables.lines import NULL_LINE
from deltaline_server.tables.prefixes.cost import Tier, Way
from deltaline_server.tables.sequence_adapters import BoundAdapter, SequenceAdapters

# Snapshots that lie in lower tiers alone, at most.
STORED_LIMIT = 1 << 16
# Until some were brought back: what a link and a disk do.
_ASSUMED = {Tier.HOST: Way(0.002, 2e10), Tier.FILE: Way(0.005, 5e8)}
# What is smaller says nothing of how fast the bytes come.
MEASURED_BYTES = 1 << 20
# Of what was measured before, beside a new measurement.
_KEPT = 0.8

Begin = Callable[[Callable[[], None]], "Future[None]"]


class _Unreadable(Exception):
    """A file could not be read, or is damaged."""


class Moves:
    """What lies in host memory and files of the snapshots of a table. All methods belong to the event loop's thread.

    num_brought: how many came back to the device, by the tier in which they lay. num_lost: those whose file could not
    be read.
    """

    def __init__(
        self,
        *,
        host: HostTier,
        files: FileTier | None,
        fingerprint: bytes,
        transfer: StateTransfer | SharedTransfer,
        begin: Begin,
        snapshots: SnapshotTable,
        capture: Capture,
        adapters: SequenceAdapters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """begin: lets the device do a transfer's work, as Engine.transfer does. clock: monotonic seconds."""
        self._host, self._files, self._fingerprint = host, files, fingerprint
        self.transfer, self._begin, self._clock = transfer, begin, clock
        self._snapshots, self._capture, self._adapters = snapshots, capture, adapters
        self._to_host, self._to_files = Backlog(self._store), Backlog(self._write)
        self._one_gather, self._reading, self._landing = asyncio.Lock(), FairLock(), FairLock()
        self._coming: dict[bytes, asyncio.Future[None]] = {}
        self._lent: dict[bytes, asyncio.Future[None]] = {}
        self._removals: set[asyncio.Future[bool]] = set()
        self._ways = dict(_ASSUMED)
        self.num_brought, self.num_lost = {Tier.HOST: 0, Tier.FILE: 0}, 0
        host.on_evicted = snapshots.relocated
        if files is not None:
            files.on_evicted = snapshots.relocated

    @property
    def ways(self) -> Mapping[Tier, Way]:
        return self._ways

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is yet to be stored."""
        return self._to_host.is_busy or self._to_files.is_busy

    @property
    def num_waiting(self) -> int:
        """How many wait for their turn to be stored, beside those that are under way."""
        return len(self._to_host) + len(self._to_files)

    # -- what the table of snapshots asks --------------------------------------------------------------------------

    def added(self, id: bytes) -> None:
        self._to_host.add(id)

    def find(self, id: bytes) -> StoredState | None:
        for tier, place in ((Tier.HOST, self._host), (Tier.FILE, self._files)):
            header = None if place is None else place.find(id)
            if place is not None and header is not None:
                return _stored(tier, header, place.size_of(id))
        return None

    def forget(self, id: bytes) -> None:
        self._to_host.forget(id)
        self._to_files.forget(id)
        self._host.release(id)
        if self._files is not None and self._files.has(id):
            removal = asyncio.ensure_future(self._files.release(id))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)

    # -- what the server does --------------------------------------------------------------------------------------

    async def find_all(self, number_of: Callable[[str], int | None]) -> None:
        """Let what an earlier server left in files be snapshots again. To be called once, before any other.

        number_of: a principal's number by its name, None where there can be no such. Leases begin anew, as those of
        snapshots that ask for none. Raises OSError if the folder can't be read.
        """
        for header in [] if self._files is None else await self._files.find_all():
            number, stored = number_of(header.owner), self.find(header.id)
            if number is not None and stored is not None:
                owner = Principal(number, header.owner)
                created = header.created_ns / 1e9
                # What no longer fits host memory is no prompt's beginning: that would never open.
                key = header.key if self._host.needed_bytes(header) <= self._host.limit_bytes else b""
                self._snapshots.add_stored(header.id, stored, owner, header.is_pinned, created, key)
            if self._files is not None and self._snapshots.get(header.id) is None:
                self._files.pin(header.id, False)  # nobody can release it

    async def bring_back(self, id: bytes) -> None:
        """Let a snapshot lie on the device, if it is held: nobody else knows when it is over. Who asks for the same
        meanwhile waits with the first.

        Raises RequestError NO_SNAPSHOT_LINES, PAGES_EXHAUSTED, ADAPTERS_OFF or ADAPTER_UNKNOWN.
        """
        await self._joined(self._coming, id, self._bring_back)

    async def bring_to_host(self, id: bytes) -> None:
        """Let a snapshot lie in host memory, if it is held. Raises RequestError NO_SNAPSHOT_LINES where there is no
        room."""
        await self._joined(self._lent, id, self._bring_to_host)

    def write(self, id: bytes) -> None:
        """Let a snapshot that lies in host memory be written to a file soon, where there are files."""
        if self._files is not None:
            self._to_files.add(id)

    async def close(self) -> None:
        """Finish what is under way; what waits to be stored is not. Idempotent."""
        await self._to_host.close()
        await self._to_files.close()
        await asyncio.gather(*self._coming.values(), *self._lent.values(), *self._removals, return_exceptions=True)

    # -- down ------------------------------------------------------------------------------------------------------

    async def _store(self, id: bytes) -> None:
        """Copy a snapshot from the device to host memory, unless it lies there."""
        one = self._snapshots.get(id)
        async with self._one_gather:
            with self._snapshots.using(id, copies=True) as state:
                if one is not None and state is not None and self._host.find(id) is None:
                    await self._gather(id, one, state)

    async def _gather(self, id: bytes, one: Snapshot, state: CapturedState) -> None:
        header = make_header(id, one, state, self._fingerprint)
        place = StatePlace(tuple(state.read_line.tolist()), state.pages)
        commits = np.array([(*at, count) for at, count in state.progress.fixed.items()], dtype=np.int64).reshape(-1, 3)

        async def copy_in(memory: Bytes) -> None:
            await self.copy(partial(self.transfer.gather, header.spans, place, commits, memory))

        if await self._host.store(header, copy_in):
            self._host.pin(id, False)  # it is the device's copy that must stay, or the file
            self.write(id)

    async def _bring_to_host(self, id: bytes) -> None:
        one = self._snapshots.get(id)
        if one is not None and isinstance(one.state, StoredState):
            async with self._reading.turn(one.owner.number):
                if isinstance(one.state, StoredState) and self._host.find(id) is None:
                    await self._read(id)
        if one is not None and isinstance(one.state, CapturedState):  # it may be since its turn came
            header = make_header(id, one, one.state, self._fingerprint)
            await self._store(id)
            if self._host.find(id) is None and self._snapshots.get(id) is one:
                raise self._host.no_room(self._host.needed_bytes(header))

    async def _write(self, id: bytes) -> None:
        """Copy a snapshot from host memory to a file."""
        header = self._host.find(id)
        if header is None or self._files is None or self._files.has(id):
            return
        with self._host.use(id) as memory:
            if memory is not None and await self._files.store(header, memory) is None:
                self._host.pin(id, False)

    # -- up --------------------------------------------------------------------------------------------------------

    async def _bring_back(self, id: bytes) -> None:
        one = self._snapshots.get(id)
        if one is None or not isinstance(one.state, StoredState):
            return
        begin_s, before = self._clock(), one.state
        async with self._reading.turn(one.owner.number):
            if self._host.find(id) is None and not await self._read(id):
                return
        async with self._landing.turn(one.owner.number):
            header = self._host.find(id)
            if header is not None and await self._host.load(id, partial(self._land, id, header)):
                self._measure(before, self._clock() - begin_s)

    async def _read(self, id: bytes) -> bool:
        """Copy a snapshot from its file to host memory; whether it is there. Raises RequestError where that has no
        room."""
        files = self._files
        header = None if files is None else files.find(id)
        if files is None or header is None:
            return False

        async def copy_in(memory: Bytes) -> None:
            miss = await files.load(id, memory)
            if miss is Miss.BUSY:
                message = "the system has no descriptor or memory left to read the snapshot's file with"
                raise RequestError(Reason.NO_SNAPSHOT_LINES, message, retry_after_s=1.0)
            if miss is not None:
                raise _Unreadable

        try:
            if not await self._host.store(header, copy_in):
                raise self._host.no_room(self._host.needed_bytes(header))
        except _Unreadable:
            if self._snapshots.get(id) is not None:  # else it was over before its file was read
                self.num_lost += 1
                self._snapshots.end(id, SnapshotState.LOST)
            return False
        self._host.pin(id, False)
        self._snapshots.relocated(id)
        return True

    async def _land(self, id: bytes, header: StateHeader, memory: Bytes) -> None:
        """Copy a snapshot from host memory to the device."""
        one = self._snapshots.get(id)
        if one is None or not isinstance(one.state, StoredState):
            return
        adapter = self._adapters.reserve_again(one.state.adapter, one.owner)
        try:
            needs = self._capture.needs_of_stored(one.state.position)
            self._snapshots.device.make_room(needs, num_snapshots=1)
            progress = _committed(header.spans, self.transfer.commits(header.spans, memory))
            has_begun = np.array([span.step > 0 for span in header.spans])
            draft_half = np.array([span.draft_half for span in header.spans], dtype=np.int64)
            state = self._capture.bring(progress, has_begun, draft_half, adapter)
        except BaseException:
            self._adapters.give_back(adapter, 1)
            raise
        with self._capture.using(state):
            place = StatePlace(tuple(state.read_line.tolist()), state.pages)
            await self.copy(partial(self.transfer.scatter, header.spans, place, memory))
            self._snapshots.arrived(id, state)
        if isinstance(one.state, CapturedState):
            self._host.pin(id, False)  # as in _gather

    @staticmethod
    async def _joined(
        under_way: dict[bytes, asyncio.Future[None]], id: bytes, work: Callable[[bytes], Coroutine[Any, Any, None]]
    ) -> None:
        """Do work for a snapshot, once for all who ask meanwhile, and to its end if they go: memory is written to."""
        doing = under_way.get(id)
        if doing is None:
            doing = under_way[id] = asyncio.ensure_future(work(id))

            def done(doing: asyncio.Future[None]) -> None:
                del under_way[id]
                doing.exception()  # who asked may have gone

            doing.add_done_callback(done)
        await asyncio.shield(doing)

    def _measure(self, before: StoredState, seconds: float) -> None:
        """A snapshot was brought back in so many seconds."""
        self.num_brought[before.tier] += 1
        if before.num_bytes >= MEASURED_BYTES:
            way = self._ways[before.tier]
            now = before.num_bytes / max(seconds - way.latency_s, seconds / 10, 1e-6)
            self._ways[before.tier] = Way(way.latency_s, _KEPT * way.bytes_per_s + (1 - _KEPT) * now)

    async def copy(self, work: Callable[[], None]) -> None:
        """Let the device do a transfer's work, to its end."""
        await asyncio.wrap_future(self._begin(work))


def make_header(id: bytes, one: Snapshot, state: CapturedState, fingerprint: bytes) -> StateHeader:
    """What is stored of a snapshot beside its state's bytes. A span of step 0 reads no line yet."""
    progress, spans = state.progress, []
    for span, (line, half) in enumerate(zip(state.read_line.tolist(), state.draft_half.tolist(), strict=True)):
        spans.append(
            SpanProgress.captured(
                step=int(line != NULL_LINE),
                position=progress.position,
                replay=int(progress.replay[span]),
                zero_commits=int(progress.zero_commits[span]),
                draft_half=half,
                num_commits=0 if span else len(progress.fixed),
            )
        )
    return StateHeader(
        id,
        fingerprint,
        one.owner.name,
        tuple(spans),
        state.adapter.name,
        state.adapter.content_hash,
        int(one.created * 1e9),
        one.is_pinned,
        one.key,
    )


def _committed(spans: tuple[SpanProgress, ...], commits: Commits) -> CommittedProgress:
    """How far a stored state is."""
    return CommittedProgress(
        spans[0].position,
        np.array([span.replay for span in spans], dtype=np.int64),
        np.array([span.zero_commits for span in spans], dtype=np.int64),
        {(position, ordinal): count for position, ordinal, count in commits.tolist()},
    )


def _stored(tier: Tier, header: StateHeader, num_bytes: int) -> StoredState:
    adapter = BoundAdapter(name=header.adapter, content_hash=header.adapter_hash)
    return StoredState(tier, header.spans[0].position, adapter, num_bytes)
