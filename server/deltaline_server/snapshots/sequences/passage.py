"""What is asked of states that leave this server, and of those that come."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.snapshots.exchange import Exchange
from deltaline_server.snapshots.sequences.coming import Coming, Wholes
from deltaline_server.snapshots.sequences.in_order import InOrder
from deltaline_server.tables.captured.snapshots import ID_BYTES
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.moved import Owner
from deltaline_server.tables.sequences import SequenceTable


class Passage:
    """Sequences on their way: each is copied whole to host memory behind its steps, or opened from there. All methods
    belong to the event loop's thread."""

    def __init__(
        self, table: SequenceTable, in_order: InOrder, exchange: Exchange | None, wholes: Wholes | None
    ) -> None:
        """exchange, wholes: None where there are no tiers but the device."""
        self._table, self._in_order, self.exchange, self._wholes = table, in_order, exchange, wholes
        self._copies = set[asyncio.Future[None]]()
        self._leaving = dict[tuple[int, int], asyncio.Event]()
        """When those that are leaving do so no more: by their principal's number, and handle."""

    def existing_exchange(self) -> Exchange:
        """What states go by. Raises RequestError HOST_TIER_OFF where there is none."""
        if self.exchange is None:
            message = "moving, saving and loading states need a server that is started with --host-state-bytes"
            raise RequestError(Reason.HOST_TIER_OFF, message)
        return self.exchange

    @asynccontextmanager
    async def stored(
        self, epoch: int, handles: NDArray[np.uint64], owner: Principal, *, is_leaving: bool = False, ahead: int = 0
    ) -> AsyncIterator[bytes]:
        """Inside the context the whole of a principal's sequence, handles uint64 [1], lies in host memory, as it is
        behind the steps that were taken so far; later ones wait until it is copied. Returns its id there, which nobody
        else knows. is_leaving: whether they wait until the context is over, and commits too (`until_none_leaves`).
        ahead: leading tokens whose pages are left out.

        Raises RequestError as `create` does, but for VERIFY_PENDING and SPANS_UNEVEN.
        """
        wholes, id, is_over = self._wholes, secrets.token_bytes(ID_BYTES), asyncio.Event()
        key, copying = (owner.number, int(handles[0])), asyncio.Future[None]()
        assert wholes is not None

        def take(slots: Slots) -> asyncio.Future[None]:
            nonlocal copying
            copying = self._copying(copy(wholes.read(id, int(slots[0]), owner, ahead)))
            if not is_leaving:
                return copying
            self._leaving[key] = is_over
            return asyncio.ensure_future(leave(copying))

        async def copy(whole: Any) -> None:
            # It goes on when the call ends: the device reads what no step may write meanwhile.
            await wholes.store(whole)
            if is_over.is_set():
                wholes.forget(id)

        async def leave(copying: asyncio.Future[None]) -> None:
            await asyncio.wait([copying])
            await is_over.wait()

        try:
            await self._in_order.run(epoch, handles, owner, take)
            await asyncio.shield(copying)
            self._in_order.held(epoch, handles, owner)  # else what was copied may be another's by now
            yield id
        finally:
            is_over.set()
            if self._leaving.get(key) is is_over:
                del self._leaving[key]
            wholes.forget(id)

    def is_leaving(self, handles: NDArray[np.uint64], principal: Principal) -> NDArray[np.bool_]:
        """Which of a principal's sequences are leaving, bool [N]."""
        if not self._leaving:
            return np.zeros(len(handles), dtype=bool)
        return np.array([(principal.number, handle) in self._leaving for handle in handles.tolist()], dtype=bool)

    async def until_none_leaves(self, handles: NDArray[np.uint64], principal: Principal) -> None:
        """Wait until none of a principal's sequences is leaving: its commits would be left behind, and a longer
        lease."""
        while self._leaving:
            waits = [self._leaving.get((principal.number, handle)) for handle in handles.tolist()]
            leaving = next(filter(None, waits), None)
            if leaving is None:
                return
            await leaving.wait()

    def lease_s(self, epoch: int, handles: NDArray[np.uint64], owner: Principal) -> float:
        """The length of an open sequence's lease, handles uint64 [1]. Raises RequestError as `stored` does."""
        return self._table.lease_s(int(self._in_order.held(epoch, handles, owner)[0]))

    def let_go(self, epoch: int, handles: NDArray[np.uint64], owner: Principal, lives_at: Owner) -> None:
        """A principal's sequence that is leaving, handles uint64 [1], lives there from now on. Raises RequestError
        as `stored` does where it is over by now; then it does not."""
        self._table.let_go(int(self._in_order.held(epoch, handles, owner)[0]), lives_at)

    def num_settled(self, epoch: int, handles: NDArray[np.uint64], owner: Principal) -> int:
        """Leading tokens of a sequence, handles uint64 [1], whose keys and values no step writes any more. Raises
        RequestError as `stored` does."""
        assert self._wholes is not None
        return self._wholes.num_settled(int(self._in_order.held(epoch, handles, owner)[0]))

    @asynccontextmanager
    async def stored_pages(
        self, epoch: int, handles: NDArray[np.uint64], owner: Principal, begin: int, end: int
    ) -> AsyncIterator[bytes]:
        """Inside the context keys and values of a sequence's settled tokens `begin` .. `end`, whole pages of them, lie
        in host memory, under this id; it is stepped meanwhile. Raises RequestError as `stored` does."""
        wholes, id = self._wholes, secrets.token_bytes(ID_BYTES)
        assert wholes is not None

        async def copy() -> None:  # begins a turn later
            await wholes.store_pages(id, int(self._in_order.held(epoch, handles, owner)[0]), owner, begin, end)

        try:
            await asyncio.shield(self._copying(copy()))
            self._in_order.held(epoch, handles, owner)  # else what was copied may be another's by now
            yield id
        finally:
            wholes.forget(id)

    def coming(self, owner: Principal) -> Coming:
        """A principal's sequence of which pages may come ahead of the rest."""
        assert self._wholes is not None
        return Coming(self._wholes, owner)

    async def close(self) -> None:
        """Finish what is copied and looked at, behind the last call. Idempotent."""
        await asyncio.gather(*self._copies, return_exceptions=True)
        if self.exchange is not None:
            await self.exchange.close()

    def _copying(self, copy: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Let a copy go on to its end, whoever asked for it."""
        copying = asyncio.ensure_future(copy)
        self._copies.add(copying)
        copying.add_done_callback(self._copied)
        return copying

    def _copied(self, copying: asyncio.Future[None]) -> None:
        self._copies.discard(copying)
        if not copying.cancelled():
            copying.exception()  # who asked may have gone
