"""Sequences moved to another server, each by itself: at every instant it has at most one owner.

The target opens a sequence under a handle that it tells this server alone; so nobody can step it there until this
server has let go of it here, and says so.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import aclosing
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from deltaline_server.config import Config
from deltaline_server.errors import Code, Reason, Refusal, RequestError
from deltaline_server.moving.leaving import Leaving, StaysHere
from deltaline_server.moving.peers import Peer, Peers, no_answer
from deltaline_server.moving.records import MovedRecords
from deltaline_server.principal import Principal
from deltaline_server.snapshots.directory import StateDirectory
from deltaline_server.snapshots.sequences.passage import Passage
from deltaline_server.tables.captured.snapshots import ID_BYTES
from deltaline_server.tables.moved import Owner
from deltaline_server.tables.sequences import SequenceTable

# Of a call: the more of them share the way, the longer each stands still.
AT_ONCE = 2
# The target is asked again, with the same request id, where its answer is lost.
TRIES = 2
# Why: no answer came, or what was opened there is over by now, as nobody has renewed its lease.
LOST = (
    *(Reason.MOVE_FAILED, Reason.UPLOAD_TIMEOUT),
    *(Reason.SEQUENCE_EXPIRED, Reason.SEQUENCE_CLOSED, Reason.SEQUENCE_UNKNOWN),
)

_log = logging.getLogger(__name__)


class Moved(NamedTuple):
    """What became of sequences, by their rows: where those live that were moved, and why the others were not."""

    owners: dict[int, Owner]
    refusals: dict[int, Refusal]


class Mover:
    """Moves sequences of a table to other servers. All methods belong to the event loop's thread."""

    def __init__(self, passage: Passage, table: SequenceTable, peers: Peers, records: MovedRecords | None) -> None:
        """records: of moves, for the server that comes after this one; None for none."""
        self._passage, self._table, self._peers, self.records = passage, table, peers, records
        self.num_moved = self.num_failed = 0
        """Sequences that were moved, and how often one that could have been was not."""
        self.bytes_ahead = self.bytes_frozen = 0
        """Of those that were moved: what was sent while they were stepped, and while they stood still."""
        self.ahead_s = self.frozen_s = 0.0
        """How long these took, together."""

    @classmethod
    def of(
        cls,
        config: Config,
        passage: Passage,
        table: SequenceTable,
        directory: StateDirectory | None,
        wall_clock: Callable[[], float],
    ) -> Self:
        """That of a server's options. directory: of its files, None for none; wall_clock: seconds since 1970."""
        records = None
        if directory is not None:
            records = MovedRecords(directory, table.moved, table.max_lease_s, wall_clock)
        return cls(passage, table, Peers.of(config), records)

    async def check(self, target: str) -> None:
        """Raise RequestError as `move` does unless sequences may be moved to a server, which answers."""
        self._passage.existing_exchange()
        async with self._peers.reach(target, self._table.server_epoch):
            pass

    def close(self) -> None:
        """End what stays of the ways to other servers, behind the last move."""
        self._peers.close()

    async def move(self, epoch: int, handles: NDArray[np.uint64], principal: Principal, target: str) -> Moved:
        """Move a principal's sequences, handles uint64 [N], a few at a time, while they are stepped. Each stands still
        from when its pages are gone until it lives there; one that is not moved goes on here.

        Raises RequestError as Peers.reach and MovedRecords.check do, and HOST_TIER_OFF; then none was moved.
        """
        self._passage.existing_exchange()
        if self.records is not None:  # else a copy at the target might be left each time
            await self.records.check()
        owners, refusals, places = dict[int, Owner](), dict[int, Refusal](), asyncio.Semaphore(AT_ONCE)

        async def move(row: int, peer: Peer) -> None:
            async with places:
                try:
                    owners[row] = await self._move_one(epoch, handles[row : row + 1], principal, peer)
                    self.num_moved += 1
                except RequestError as error:
                    refusals[row] = error.refusal
                    self.num_failed += error.refusal.reason.code != Code.NOT_FOUND
                except Exception:  # the others go on
                    _log.exception("a move failed")
                    refusals[row] = Refusal(Reason.BUG, "the server has a bug, which it has logged")
                    self.num_failed += 1

        async with self._peers.reach(target, self._table.server_epoch) as peer, asyncio.TaskGroup() as moves:
            for row in range(len(handles)):
                moves.create_task(move(row, peer))
        return Moved(owners, refusals)

    async def _move_one(self, epoch: int, handle: NDArray[np.uint64], principal: Principal, peer: Peer) -> Owner:
        """One sequence's move, handle uint64 [1]. Raises RequestError as Leaving.pieces, Peer.open and MovedRecords.add
        do, and of a sequence that is over meanwhile; then it has not left."""
        passage, pages = self._passage, self._table.pages
        page_tokens = max(peer.page_tokens, 1 if pages is None else pages.page_size)  # powers of two
        with passage.existing_exchange().on_its_way(principal):
            owner: Owner | None = None
            try:
                async with Leaving(passage, epoch, handle, principal, page_tokens) as leaving:
                    owner, lease_ms = await self._open(leaving, peer)
                    if self.records is not None:  # before anybody may know
                        at = epoch, int(handle[0])
                        await self.records.add(*at, principal.name, owner, lease_ms / 1000)
                    passage.let_go(epoch, handle, principal, owner)
            except RequestError:  # of all else nobody knows whether it was let go of
                if owner is not None:
                    await peer.close(owner)
                raise
        self.bytes_ahead += leaving.bytes_ahead
        self.bytes_frozen += leaving.bytes_frozen
        self.ahead_s += leaving.ahead_s
        self.frozen_s += leaving.frozen_s
        return owner

    async def _open(self, leaving: Leaving, peer: Peer) -> tuple[Owner, int]:
        """Let a sequence be opened at a server, which is asked for its answer once more where that is lost; then what
        went ahead does not go again. Returns its lease there, ms, too. Raises RequestError as `_move_one` does."""
        request_id, lease_ms = secrets.token_bytes(ID_BYTES), 0
        for _ in range(TRIES):
            lease_ms, only_asks = max(lease_ms, round(leaving.lease_s() * 1000)), leaving.is_behind_pages
            try:
                async with aclosing(leaving.pieces(lease_ms / 1000)) as pieces:
                    return await peer.open(pieces, request_id, lease_ms), lease_ms
            except StaysHere:
                raise
            except RequestError as error:
                is_lost = error.refusal.reason in LOST
                if not is_lost and not only_asks:
                    raise
                lost = error
        if lost.refusal.reason is Reason.MOVE_FAILED:
            raise lost
        raise no_answer("in time") from lost
