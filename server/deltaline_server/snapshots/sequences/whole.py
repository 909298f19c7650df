"""Sequences to host memory, and from there: all that the ledger, the kept replies, lines and pages have of each.

Nothing is captured: what is copied is what the sequence reads and nobody writes, since its steps wait meanwhile. And
what comes is written into the line and the pages of a sequence whose handle nobody knows yet.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    def read(self, id: bytes, slot: int, owner: Principal) -> WholeSequence:
        """What is to be stored of a slot's sequence, under an id."""
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
                )
            )
        adapter = table.adapters.of(slot)
        header = StateHeader(
            id,
            self._fingerprint,
            owner.name,
            tuple(spans),
            adapter.name,
            adapter.content_hash,
            self._clock_ns(),
            is_sequence=True,
        )
        pages = np.zeros(0, dtype=np.int32)
        if table.pages is not None:
            pages = table.pages.of(int(table.write_line[slot]), self._num_paged_tokens(spans))
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
            raise self._host.no_room(0)

    def forget(self, id: bytes) -> None:
        """Let go of a sequence in host memory. Idempotent."""
        self._host.release(id)

    # -- in --------------------------------------------------------------------------------------------------------

    async def open(self, header: StateHeader, owner: Principal, lease_s: float | None) -> NDArray[np.uint64]:
        """Open a sequence of a principal that goes on where one in host memory stood. Returns its handle, uint64 [1].

        Raises RequestError as SequenceTable.open does, REPLY_BYTES_EXHAUSTED, PAGES_EXHAUSTED, ADAPTER_UNKNOWN, or what
        is told of a reply that can't be; then nothing is left of it.
        """
        table, lease_s = self._table, self._table.checked_lease(lease_s)
        table.check_room(1, owner)
        num_bytes = sum(span.reply_bytes for span in header.spans)
        self._reserve_replies(owner, num_bytes)
        with self._host.use(header.id) as memory:
            try:
                assert memory is not None
                replies = await asyncio.to_thread(self._read_replies, header, memory)
                slot = self._begin(header, owner)
            except BaseException:
                table.replies.cancel(num_bytes)
                raise
            for span, reply in replies.items():
                table.replies.put_one(span, slot, reply, header.spans[span].reply_bytes)
            handles = table.handles(np.array([slot]))
            try:
                await self._land(header, slot, memory)
            except BaseException:
                table.close(table.server_epoch, handles, owner)
                raise
        table.lease(slot, lease_s)
        return handles

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
        line, pages = int(table.write_line[slot]), np.zeros(0, dtype=np.int32)
        if table.pages is not None:
            pages = table.pages.of(line, self._num_paged_tokens(spans))
            self._place_pages(PagesPlaced(np.array([line]), pages[None], np.zeros((2, 0), dtype=np.int64)))
        # What no token has reached is as no line, which is zero.
        read_line = [line if span.step or span.position else NULL_LINE for span in spans]
        place, transfer = StatePlace(tuple(read_line), pages), self._moves.transfer
        await self._moves.copy(partial(transfer.scatter, spans, place, memory))
        table.read_line[:, slot] = read_line
        table.draft_half[:, slot] = [span.draft_half for span in spans]
        table.ledger.go_on(slot, _progress(spans, transfer.commits(spans, memory)))

    def _num_paged_tokens(self, spans: Sequence[SpanProgress]) -> int:
        """Tokens that a sequence has pages for."""
        pages = self._table.pages
        return 0 if pages is None else max(spans[span].num_tokens for span in pages.spans)


NO_LINES = np.zeros(0, dtype=np.int64)


def _progress(spans: Sequence[SpanProgress], commits: NDArray[np.int64]) -> WholeProgress:
    values = [(span.step, span.position, span.pending, span.replay, span.zero_commits) for span in spans]
    committed = [(span.committed_step, span.committed_accepted) for span in spans]
    return WholeProgress(
        np.array(values, dtype=np.int64).T,
        np.array(committed, dtype=np.int64).T,
        {(position, ordinal): count for position, ordinal, count in commits.tolist()},
    )
