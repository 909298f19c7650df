"""Sequences to host memory, and from there: all that the ledger, the kept replies, lines and pages have of each.

Nothing is captured: what is copied is what the sequence reads and nobody writes, since its steps wait meanwhile, or
since it lies in pages that are full of committed tokens, which can go ahead. And what comes is written into the line
and the pages of a sequence whose handle nobody knows yet.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.snapshots.device.transfer import StatePlace
from deltaline_server.snapshots.header import StateFileError, StateHeader
from deltaline_server.snapshots.host import HostTier
from deltaline_server.snapshots.layout import Bytes, Part, SpanProgress, StateLayout
from deltaline_server.snapshots.moves import Moves
from deltaline_server.snapshots.sequences.reply import read_reply, reply_bytes, write_reply
from deltaline_server.snapshots.stream import refused
from deltaline_server.step import SpanShapes
from deltaline_server.tables.kept_replies import KeptReply
from deltaline_server.tables.lines import NULL_LINE
from deltaline_server.tables.pages import PagesPlaced
from deltaline_server.tables.progress import WholeProgress
from deltaline_server.tables.sequence_adapters import BoundAdapter
from deltaline_server.tables.sequences import SequenceTable


@dataclass(frozen=True)
class WholeSequence:
    """A sequence of which nothing is in flight: what is known of it, and where the rest lies on the device.

    replies: of each span, None for one that is not kept, or stays behind.
    """

    header: StateHeader
    place: StatePlace
    commits: NDArray[np.int64]
    replies: tuple[KeptReply | None, ...]


class WholeSequences:
    """Takes sequences of a table into host memory, and opens others. All methods belong to the event loop's thread."""

    def __init__(
        self,
        *,
        layout: StateLayout,
        fingerprint: bytes,
        host: HostTier,
        moves: Moves,
        table: SequenceTable,
        place_pages: Callable[[PagesPlaced], None],
        reserve_replies: Callable[[Principal, int], None],
        ends: Sequence[SpanShapes],
        dtype: np.dtype[Any],
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """place_pages: as Engine's. reserve_replies: as Scheduler's. ends, dtype: of each span's tokens, and of their
        values. clock_ns: since the epoch."""
        self._layout, self._fingerprint, self._host, self._moves = layout, fingerprint, host, moves
        self._table, self._place_pages, self._reserve_replies = table, place_pages, reserve_replies
        self._widths, self._dtype, self._clock_ns = [span.output_width for span in ends], dtype, clock_ns

    # -- out -------------------------------------------------------------------------------------------------------

    def read(self, id: bytes, slot: int, owner: Principal, ahead: int) -> WholeSequence:
        """What is to be stored of a slot's sequence, under an id, without the pages of tokens that went ahead."""
        table = self._table
        whole, half = table.ledger.whole(slot), table.draft_half[:, slot].tolist()
        replies = [table.replies.get(span, slot) for span in range(table.ledger.num_spans)]
        spans = []
        for span, reply in enumerate(replies):
            step, position, pending, replay, zero_commits = whole.values[:, span].tolist()
            drafts = pending + replay
            committed_step, committed_accepted = whole.committed[:, span].tolist()
            spans.append(
                SpanProgress(
                    step,
                    position,
                    pending,
                    replay,
                    zero_commits,
                    committed_step,
                    committed_accepted,
                    half[span],
                    records_0=0 if half[span] else drafts,
                    records_1=drafts if half[span] else 0,
                    num_commits=0 if span else len(whole.fixed),
                    reply_bytes=reply_bytes(reply),
                    ahead=ahead if span in self._layout.paged_spans else 0,
                )
            )
        header, pages = self._header(id, slot, owner, spans), self._pages(slot, spans, ahead)
        commits = np.array([(*at, count) for at, count in whole.fixed.items()], dtype=np.int64).reshape(-1, 3)
        place = StatePlace(tuple(table.read_line[:, slot].tolist()), pages)
        return WholeSequence(header, place, commits, tuple(reply if reply_bytes(reply) else None for reply in replies))

    async def store(self, whole: WholeSequence) -> None:
        """Copy a sequence to host memory, where its steps wait until that is done. Raises RequestError
        NO_SNAPSHOT_LINES where there is no room."""
        spans, sections = whole.header.spans, self._layout.sections(whole.header.spans)

        def write_replies(memory: Bytes) -> None:
            for section in sections:
                reply = whole.replies[section.number] if section.part is Part.REPLY else None
                if reply is not None:
                    write_reply(reply, section.view(memory))

        async def copy_in(memory: Bytes) -> None:
            await self._moves.copy(partial(self._moves.transfer.gather, spans, whole.place, whole.commits, memory))
            await asyncio.to_thread(write_replies, memory)

        if not await self._host.store(whole.header, copy_in):
            raise self._host.no_room(self._host.needed_bytes(whole.header))

    def num_settled(self, slot: int) -> int:
        """Leading tokens of a slot's sequence whose keys and values no step writes any more."""
        positions = self._table.ledger.done.position[sorted(self._layout.paged_spans), slot]
        return int(positions.min()) if len(positions) else 0

    async def store_pages(self, id: bytes, slot: int, owner: Principal, begin: int, end: int) -> None:
        """Copy the pages of settled tokens `begin` .. `end`, which are whole pages, to host memory under an id. If the
        sequence ends meanwhile they may be another's. Raises as `store`."""
        of_pages, paged = SpanProgress(position=end, ahead=begin), self._layout.paged_spans
        spans = [of_pages if span in paged else SpanProgress() for span in range(self._layout.num_spans)]
        header, pages = self._header(id, slot, owner, spans, is_pages=True), self._pages(slot, spans, begin)

        async def copy_in(memory: Bytes) -> None:
            await self._moves.copy(
                partial(self._moves.transfer.gather, spans, StatePlace((), pages), NO_COMMITS, memory)
            )

        if not await self._host.store(header, copy_in):
            raise self._host.no_room(self._host.needed_bytes(header))

    def _header(
        self, id: bytes, slot: int, owner: Principal, spans: Sequence[SpanProgress], *, is_pages: bool = False
    ) -> StateHeader:
        adapter, now_ns = self._table.adapters.of(slot), self._clock_ns()
        of_adapter = adapter.name, adapter.content_hash
        return StateHeader(
            id, self._fingerprint, owner.name, tuple(spans), *of_adapter, now_ns, is_sequence=True, is_pages=is_pages
        )

    def forget(self, id: bytes) -> None:
        """Let go of a sequence, or pages of one, in host memory. Idempotent."""
        self._host.release(id)

    # -- in --------------------------------------------------------------------------------------------------------

    async def open(
        self, header: StateHeader, owner: Principal, lease_s: float | None, slot: int | None = None
    ) -> NDArray[np.uint64]:
        """Open a sequence of a principal that goes on where one in host memory stood. Returns its handle, uint64 [1].

        slot: of the one whose pages came ahead, None where none did. Raises RequestError as SequenceTable.open does,
        REPLY_BYTES_EXHAUSTED, PAGES_EXHAUSTED, ADAPTER_UNKNOWN, or what is told of a reply that can't be; then nothing
        is left of it.
        """
        table, lease_s = self._table, self._table.checked_lease(lease_s)
        num_bytes = sum(span.reply_bytes for span in header.spans)
        with self._host.use(header.id) as memory, ExitStack() as undone:
            assert memory is not None
            if slot is not None:
                undone.callback(self.end, slot)
            elif any(span.ahead for span in header.spans):  # they ended with the call that they came by
                message = "chunk: expected the pages that went ahead, got none"
                raise RequestError(Reason.INVALID_REQUEST, message, field="chunk")
            else:
                table.check_room(1, owner)
            self._reserve_replies(owner, num_bytes)
            reserved = undone.enter_context(ExitStack())
            reserved.callback(table.replies.cancel, num_bytes)
            replies, came = await asyncio.to_thread(self._read_replies, header, memory), slot
            slot = self.make_room(came, header, owner)
            if came is None:
                undone.callback(self.end, slot)
            reserved.pop_all()
            for span, reply in replies.items():
                table.replies.put_one(span, slot, reply, header.spans[span].reply_bytes)
            await self._land(header, slot, memory)
            table.check_room(0, owner)  # else a drain that has begun meanwhile would wait for it
            undone.pop_all()
        table.lease(slot, lease_s)
        return table.handles(np.array([slot]))

    @property
    def paged_spans(self) -> frozenset[int]:
        """Spans that have pages."""
        return self._layout.paged_spans

    def check_room(self, owner: Principal) -> None:
        """Raise RequestError as SequenceTable.check_room where no sequence of a principal may begin."""
        self._table.check_room(1, owner)

    def make_room(self, slot: int | None, header: StateHeader, owner: Principal) -> int:
        """Let a slot's sequence, or a new one where there is none, have pages for all tokens of what comes, which end
        with a whole page where more is to come. Returns its slot. Raises RequestError as `open`; then nothing has
        changed.
        """
        pages, num_tokens = self._table.pages, self._num_paged_tokens(header.spans)
        if header.is_pages and (pages is None or num_tokens % pages.page_size):
            message = "chunk: expected whole pages of this server ahead of a sequence, got others"
            raise RequestError(Reason.STATE_MISMATCH, message, field="chunk")
        if slot is None:
            return self._begin(header, owner)
        if pages is not None:
            pages.grant(self._table.write_line[[slot]], np.array([num_tokens]))
        return slot

    async def land_pages(self, slot: int, header: StateHeader) -> None:
        """Write pages that came ahead, in host memory, into those of a slot's sequence."""
        spans, begin = header.spans, max(span.ahead for span in header.spans)
        with self._host.use(header.id) as memory:
            if memory is not None:  # else who wanted them has gone
                place = StatePlace((), self._pages(slot, spans, begin))
                await self._moves.copy(partial(self._moves.transfer.scatter, spans, place, memory))

    def end(self, slot: int) -> None:
        """Close a slot's sequence that was not opened."""
        table = self._table
        owner = table.principals[int(table.principal[slot])]
        table.close(table.server_epoch, table.handles(np.array([slot])), owner)

    def _read_replies(self, header: StateHeader, memory: Bytes) -> dict[int, KeptReply]:
        try:
            return {
                section.number: read_reply(section.view(memory), self._dtype, self._widths[section.number])
                for section in self._layout.sections(header.spans)
                if section.part is Part.REPLY
            }
        except StateFileError as error:
            raise refused(error) from error

    def _begin(self, header: StateHeader, owner: Principal) -> int:
        """Let a sequence begin, without a step so far, that has the line and the pages which are to be written. It has
        no lease yet: nobody could renew it. Returns its slot."""
        table, num_tokens = self._table, self._num_paged_tokens(header.spans)
        table.check_room(1, owner)
        stored = BoundAdapter(name=header.adapter, content_hash=header.adapter_hash)
        adapter = table.adapters.reserve_again(stored, owner)
        lines = NO_LINES
        try:
            lines = table.lines.allocate(1, zeroes=False)
            if table.pages is not None:
                table.pages.grant(lines, np.array([num_tokens]))
        except BaseException:
            table.lines.release(lines.tolist())
            table.adapters.give_back(adapter, 1)
            raise
        slots = table.begin(lines, math.inf, owner)
        table.adapters.put(slots, adapter)
        return int(slots[0])

    async def _land(self, header: StateHeader, slot: int, memory: Bytes) -> None:
        """Write what a sequence reads, and let its books say so."""
        table, spans = self._table, header.spans
        line, ahead = int(table.write_line[slot]), max(span.ahead for span in spans)
        if table.pages is not None:
            rows = self._pages(slot, spans, 0)[None]
            self._place_pages(PagesPlaced(np.array([line]), rows, np.zeros((2, 0), dtype=np.int64)))
        # What no token has reached is as no line, which is zero.
        read_line = [line if span.step or span.position else NULL_LINE for span in spans]
        place, transfer = StatePlace(tuple(read_line), self._pages(slot, spans, ahead)), self._moves.transfer
        await self._moves.copy(partial(transfer.scatter, spans, place, memory))
        table.read_line[:, slot] = read_line
        table.draft_half[:, slot] = [span.draft_half for span in spans]
        table.ledger.go_on(slot, _progress(spans, transfer.commits(spans, memory)))

    def _pages(self, slot: int, spans: Sequence[SpanProgress], ahead: int) -> NDArray[np.int32]:
        """The pages of a slot's tokens but those that are ahead, which are whole pages."""
        pages = self._table.pages
        if pages is None:
            return np.zeros(0, dtype=np.int32)
        of_all = pages.of(int(self._table.write_line[slot]), self._num_paged_tokens(spans))
        return of_all[ahead // pages.page_size :]

    def _num_paged_tokens(self, spans: Sequence[SpanProgress]) -> int:
        """Tokens that a sequence has pages for."""
        pages = self._table.pages
        return 0 if pages is None else max(spans[span].num_tokens for span in pages.spans)


NO_LINES = np.zeros(0, dtype=np.int64)
NO_COMMITS = np.zeros((0, 3), dtype=np.int64)


def _progress(spans: Sequence[SpanProgress], commits: NDArray[np.int64]) -> WholeProgress:
    values = [(span.step, span.position, span.pending, span.replay, span.zero_commits) for span in spans]
    committed = [(span.committed_step, span.committed_accepted) for span in spans]
    return WholeProgress(
        np.array(values, dtype=np.int64).T,
        np.array(committed, dtype=np.int64).T,
        {(position, ordinal): count for position, ordinal, count in commits.tolist()},
    )
