"""A sequence that comes while it is stepped elsewhere: its pages lie here before the rest is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.snapshots.exchange import Arrived
from deltaline_server.snapshots.header import StateFileError, StateHeader
from deltaline_server.snapshots.sequences.rules import check_ahead
from deltaline_server.snapshots.stream import refused


class Wholes(Protocol):
    """What takes sequences into host memory and opens others: WholeSequences, of which front ends must not know that it
    needs torch."""

    def read(self, id: bytes, slot: int, owner: Principal, ahead: int) -> Any: ...
    async def store(self, whole: Any) -> None: ...
    def num_settled(self, slot: int) -> int: ...
    async def store_pages(self, id: bytes, slot: int, owner: Principal, begin: int, end: int) -> None: ...
    def forget(self, id: bytes) -> None: ...
    @property
    def paged_spans(self) -> frozenset[int]: ...
    def check_room(self, owner: Principal) -> None: ...
    def make_room(self, slot: int | None, header: StateHeader, owner: Principal) -> int: ...
    async def land_pages(self, slot: int, header: StateHeader) -> None: ...
    def end(self, slot: int) -> None: ...
    async def open(
        self, header: StateHeader, owner: Principal, lease_s: float | None, slot: int | None
    ) -> NDArray[np.uint64]: ...


class Coming:
    """A principal's sequence that is yet to be opened. Nobody knows its handle, and nothing is left of it behind the
    context unless it was opened. All methods belong to the event loop's thread."""

    def __init__(self, wholes: Wholes, owner: Principal) -> None:
        self._wholes, self._owner = wholes, owner
        self._slot: int | None = None
        self._before: StateHeader | None = None
        self._landing: asyncio.Future[None] | None = None

    def expect(self, header: StateHeader) -> None:
        """Judge the header of what comes next, and have room for it. Raises RequestError: it does not belong behind
        what came, or as WholeSequences.make_room."""
        try:
            check_ahead(header, self._before, self._wholes.paged_spans)
        except StateFileError as error:
            raise refused(error) from error
        if header.is_pages:
            self._slot, self._before = self._wholes.make_room(self._slot, header, self._owner), header
        elif self._slot is None:
            self._wholes.check_room(self._owner)

    async def land(self, arrive: Callable[[], AbstractAsyncContextManager[Arrived]]) -> None:
        """Receive pages for which there is room. They are judged and written while the next come, or before these where
        host memory has no room for both; what is written is to the end, where the call ends meanwhile. arrive: as
        Exchange.arrived. Raises what receiving them raises, and what became of those before."""
        held = AsyncExitStack()
        try:
            try:
                header, judged = await held.enter_async_context(arrive())
            except RequestError as error:
                if self._landing is None or error.refusal.reason is not Reason.NO_SNAPSHOT_LINES:
                    raise
                await self.landed()
                header, judged = await held.enter_async_context(arrive())
            await self.landed()
        except BaseException:
            await held.aclose()
            raise
        self._landing = asyncio.ensure_future(self._land(held, header, judged))

    async def landed(self) -> None:
        """Wait for the pages that came last. Raises what became of them."""
        if self._landing is not None:
            await asyncio.shield(self._landing)

    async def _land(self, held: AsyncExitStack, header: StateHeader, judged: Callable[[], Awaitable[None]]) -> None:
        async with held:
            await judged()
            if self._slot is not None:
                await self._wholes.land_pages(self._slot, header)

    async def open(self, header: StateHeader, lease_s: float | None) -> NDArray[np.uint64]:
        """Open it, where its rest lies in host memory. Returns its handle, uint64 [1]. Raises as WholeSequences.open;
        then nothing is left of it."""
        slot, self._slot = self._slot, None
        return await self._wholes.open(header, self._owner, lease_s, slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exit: object) -> None:
        slot, self._slot = self._slot, None
        if slot is None:
            return
        # Once nothing is written to its pages.

        def end(landing: asyncio.Future[None] | None) -> None:
            if landing is not None and not landing.cancelled():
                landing.exception()  # who asked has gone
            self._wholes.end(slot)

        if self._landing is None or self._landing.done():
            end(self._landing)
        else:
            self._landing.add_done_callback(end)
