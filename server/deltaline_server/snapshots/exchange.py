"""Snapshots that leave for elsewhere and come from there, as states' files, by way of host memory.

What comes lies in a place of its own until all of it is there and was found whole; nobody sees it before.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal, check_share
from deltaline_server.snapshots.header import StateFileError, StateHeader, StoredHeader
from deltaline_server.snapshots.host import HostTier
from deltaline_server.snapshots.layout import Bytes, SpanProgress, StateLayout, state_bytes
from deltaline_server.snapshots.stream import (
    PIECE_BYTES,
    Arriving,
    Filling,
    StateThreads,
    ValueTypes,
    check_sections,
    pieces_of,
    refused,
)
from deltaline_server.tables.captured.snapshot import SnapshotDescription
from deltaline_server.tables.captured.snapshots import ID_BYTES, SnapshotTable
from deltaline_server.tables.captured.state import StoredState
from deltaline_server.tables.sequence_adapters import SequenceAdapters

# Each holds a piece for a reader that may be slow, and a header.
MOST_ON_THEIR_WAY = 64
# Of keys and values that go ahead at once, about: a file's header and first message take 0.8 ms, however large it is.
AHEAD_BYTES = 64 << 20


Arrived: TypeAlias = tuple[StateHeader, Callable[[], Awaitable[None]]]
"""The header of what lies in host memory, and what waits until that is judged."""


class Tiering(Protocol):
    """What moves snapshots between the tiers: a Moves, which imports torch, as front ends must not."""

    def find(self, id: bytes) -> StoredState | None: ...
    async def bring_to_host(self, id: bytes) -> None: ...
    def write(self, id: bytes) -> None: ...


class Exchange:
    """Gives snapshots of a table as states' files, and makes some of such. All methods belong to the event loop."""

    def __init__(
        self,
        *,
        layout: StateLayout,
        fingerprint: bytes,
        types: ValueTypes,
        host: HostTier,
        moves: Tiering,
        snapshots: SnapshotTable,
        adapters: SequenceAdapters,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """clock_ns: since the epoch."""
        self._layout, self._fingerprint, self._types = layout, fingerprint, types
        self._host, self._moves, self._snapshots, self._adapters = host, moves, snapshots, adapters
        self._clock_ns, self._threads = clock_ns, StateThreads()
        # Of states that are on their way, by their principal's number.
        self._num_states, self._num_coming, self._bytes = Counter[int](), Counter[int](), Counter[int]()

    async def export(
        self, id: bytes, owner: Principal, *, pause_s: float, whole_s: float
    ) -> AsyncGenerator[memoryview, None]:
        """A principal's snapshot as a state's file, in pieces, each to be copied before the next is asked for. It keeps
        its place in host memory to the last of them, if each is taken within `pause_s` and all are within `whole_s`.

        Raises RequestError SNAPSHOT_UNKNOWN; NO_SNAPSHOT_LINES where host memory has no room; UPLOAD_TIMEOUT.
        """
        self._snapshots.check_own(id, owner)
        await self._moves.bring_to_host(id)
        if self._host.find(id) is None:
            self._snapshots.check_own(id, owner)
        async with aclosing(self.pieces(id, owner, pause_s=pause_s, whole_s=whole_s)) as pieces:
            async for piece in pieces:
                yield piece

    async def pieces(
        self,
        id: bytes,
        owner: Principal,
        *,
        pause_s: float,
        whole_s: float,
        piece_bytes: int = PIECE_BYTES,
    ) -> AsyncGenerator[memoryview, None]:
        """A state that came to host memory just now as a file, in pieces, as `export` gives it. Raises RequestError
        NO_SNAPSHOT_LINES where it had to make way, or its principal would have too much there; UPLOAD_TIMEOUT.

        piece_bytes: of each at most. They are views, and another's once they were not taken in time.
        """
        header = self._host.find(id)
        if header is None:
            raise self._host.no_room(0)
        with ExitStack() as held:
            held.enter_context(self._place(owner, self._host.size_of(id)))
            memory = held.enter_context(self._host.use(id))
            assert memory is not None
            sections = header.sections(self._layout)
            digests = await self._threads.digests(sections, memory)
            pieces = pieces_of(header, sections, digests, memory, piece_bytes)
            piece = next(pieces, None)
            loop = asyncio.get_running_loop()
            until_s = loop.time() + whole_s
            while piece is not None:
                # gRPC can't be told to give up a reader that stands still: the place goes back while it does.
                late = loop.call_at(min(until_s, loop.time() + pause_s), held.close)
                try:
                    yield piece
                finally:
                    late.cancel()
                if loop.time() >= late.when():
                    message = f"the pieces were not taken within {pause_s:g} seconds each, {whole_s:g} in all"
                    raise RequestError(Reason.UPLOAD_TIMEOUT, message)
                piece = next(pieces, None)

    def tokens_at_once(self, page_tokens: int) -> int:
        """Tokens whose keys and values go ahead at once: some whole pages of so many."""
        spans = [SpanProgress(position=page_tokens)] * self._layout.num_spans
        most_bytes = min(AHEAD_BYTES, self._host.limit_bytes // 8)  # some of each of those that move at once
        return max(1, most_bytes // state_bytes(self._layout.pages.sections(spans))) * page_tokens

    async def read_header(self, arriving: Arriving) -> tuple[StoredHeader, bytes]:
        """Take the header of what arrives; return it with its digest, which tells one state's file from all others.

        Raises RequestError STATE_DAMAGED, STATE_MISMATCH or INVALID_REQUEST.
        """
        with _refusals():
            return await arriving.read_header(self._layout, self._fingerprint)

    def check_adapter(self, header: StateHeader, owner: Principal) -> None:
        """Raise RequestError STATE_MISMATCH unless a principal has the adapter of what arrives."""
        content_hash = None
        with suppress(RequestError):
            content_hash = self._adapters.content_hash(header.adapter, owner)
        if content_hash != header.adapter_hash:
            message = "adapter: expected one that is loaded here under its name with the same content"
            raise RequestError(Reason.STATE_MISMATCH, message)

    @asynccontextmanager
    async def received(
        self, arriving: Arriving, stored: StoredHeader, owner: Principal, *, is_pinned: bool
    ) -> AsyncIterator[StateHeader]:
        """Inside the context what arrives behind a header lies in host memory, whole and sound, under an id of its own;
        behind it only if it was added.

        Raises as `arrived` and what that yields do.
        """
        async with self.arrived(arriving, stored, owner, is_pinned=is_pinned) as (header, judged):
            await judged()
            yield header

    @asynccontextmanager
    async def arrived(
        self, arriving: Arriving, stored: StoredHeader, owner: Principal, *, is_pinned: bool
    ) -> AsyncIterator[Arrived]:
        """As `received`, but pages that go ahead need not be sound: what is yielded beside the header waits until
        all of them is judged, and raises RequestError STATE_DAMAGED or NON_FINITE_INPUT.

        Raises RequestError as `read_header`, NON_FINITE_INPUT, QUOTA_EXCEEDED or NO_SNAPSHOT_LINES; what the pieces
        raise.
        """
        is_sequence = stored.header.is_sequence
        if not is_sequence:
            self._snapshots.shares.check_quota(1, owner, self._num_coming[owner.number])
        id, now_ns, size = secrets.token_bytes(ID_BYTES), self._clock_ns(), state_bytes(stored.sections)
        header = replace(stored.header, id=id, owner=owner.name, is_pinned=is_pinned, created_ns=now_ns)
        filled: list[Filling] = []

        async def copy_in(memory: Bytes) -> None:
            judge = partial(check_sections, stored, memory, self._layout, self._types)
            filled.append(Filling(self._threads, stored, memory, judge))
            try:
                await arriving.read_state(filled[0], is_last=not header.is_pages)
                if not header.is_pages:
                    await filled[0].judged()
            except BaseException:
                filled[0].end()  # its place is another's from now on
                raise

        async def judged() -> None:
            with _refusals():
                await filled[0].judged()

        with _counted(self._num_coming, owner.number, not is_sequence), self._place(owner, size):
            with _refusals():
                has_room = await self._host.store(header, copy_in)
            if not has_room:
                raise self._host.no_room(size)
            with self._host.use(id):
                try:
                    yield header, judged
                finally:
                    filled[0].end()
                    if self._snapshots.get(id) is None:
                        self._host.release(id)

    def add(self, header: StateHeader, owner: Principal, lease_s: float | None) -> SnapshotDescription:
        """Let what was received be a principal's snapshot. Raises RequestError QUOTA_EXCEEDED, NO_SNAPSHOT_LINES, or
        INVALID_REQUEST for its lease or key; then it is none."""
        self._snapshots.shares.check_quota(1, owner)
        state, created = self._moves.find(header.id), header.created_ns / 1e9
        assert state is not None
        made = self._snapshots.add_stored(header.id, state, owner, header.is_pinned, created, header.key, lease_s)
        if made is None:
            raise RequestError(Reason.NO_SNAPSHOT_LINES, "as many snapshots are stored as may be", retry_after_s=1.0)
        self._moves.write(header.id)
        return made

    @contextmanager
    def on_its_way(self, owner: Principal) -> Iterator[None]:
        """Count a state that comes or goes. Raises RequestError TOO_MANY_CALLS."""
        num_states, number = self._num_states.total(), owner.number
        if num_states == MOST_ON_THEIR_WAY:
            message = f"{num_states} states are on their way, which is the most"
            raise RequestError(Reason.TOO_MANY_CALLS, message, retry_after_s=1.0)
        if number and not owner.is_alone:
            left = MOST_ON_THEIR_WAY - num_states
            check_share(self._num_states[number], 1, left, "states on their way", Reason.TOO_MANY_CALLS)
        with _counted(self._num_states, number, 1):
            yield

    async def close(self) -> None:
        """Finish what threads look at, behind the last call. Idempotent."""
        await asyncio.to_thread(self._threads.close)

    def _place(self, owner: Principal, num_bytes: int) -> AbstractContextManager[None]:
        """Count a place, which gives way to nobody. Raises RequestError NO_SNAPSHOT_LINES where a principal would have
        more such places than it leaves to others, pinned ones among them."""
        number = owner.number
        if number and not owner.is_alone:
            pinned = self._host.pinned_bytes
            held = self._bytes[number] + pinned[owner.name]
            free = self._host.limit_bytes - self._bytes.total() - pinned.total()
            what = "bytes of host memory for states that are pinned or on their way"
            check_share(held, num_bytes, free, what, Reason.NO_SNAPSHOT_LINES)
        return _counted(self._bytes, number, num_bytes)


@contextmanager
def _refusals() -> Iterator[None]:
    """Tell who sends a state what is wrong with it."""
    try:
        yield
    except StateFileError as error:
        raise refused(error) from error


@contextmanager
def _counted(counter: Counter[int], number: int, count: int) -> Iterator[None]:
    counter[number] += count
    try:
        yield
    finally:
        counter[number] -= count
