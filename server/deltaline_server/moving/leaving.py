"""A sequence on its way to another server: pages go ahead while it is stepped, then it stands still for the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, suppress
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.moving.peers import WHOLE_S
from deltaline_server.principal import Principal
from deltaline_server.snapshots.exchange import AHEAD_BYTES
from deltaline_server.snapshots.sequences.passage import Passage

# How long pages may go ahead; the rest needs time too.
AHEAD_S = WHOLE_S / 2


class StaysHere(RequestError):
    """What this side ends a move for; another try of it would end so too."""


class _Prepared(NamedTuple):
    """A file that is about to go: what it lies in, its first piece, the others, and where its tokens end."""

    held: AsyncExitStack
    first: memoryview
    others: AsyncGenerator[memoryview, None]
    end: int


class Leaving:
    """A principal's sequence, whose steps and commits wait from when its pages are gone until the context is over.

    bytes_ahead, bytes_frozen: that were taken from it before, and since; ahead_s: how long that took, and
    frozen_s: how long it stood still in all, once it is over. ahead: leading tokens whose pages are gone.
    """

    def __init__(
        self,
        passage: Passage,
        epoch: int,
        handle: NDArray[np.uint64],
        principal: Principal,
        page_tokens: int,
    ) -> None:
        """handle: uint64 [1]. page_tokens: of whole pages of both servers."""
        self._passage, self._page_tokens = passage, page_tokens
        self._whose = epoch, handle, principal
        self._principal, self._held = principal, AsyncExitStack()
        self._id: bytes | None = None
        self.bytes_ahead = self.bytes_frozen = self.ahead = 0
        self.ahead_s = self.frozen_s = 0.0
        self._frozen_since_s: float | None = None

    async def __aenter__(self) -> Leaving:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._held.__aexit__(kind, error, traceback)
        if self._frozen_since_s is not None:
            self.frozen_s = asyncio.get_running_loop().time() - self._frozen_since_s

    @property
    def is_behind_pages(self) -> bool:
        """Whether it stands still, and its pages went ahead: they don't go again."""
        return self._id is not None and self.ahead > 0

    def lease_s(self) -> float:
        """The length of its lease. Raises RequestError as Passage.lease_s does."""
        return self._passage.lease_s(*self._whose)

    async def pieces(self, lease_s: float) -> AsyncGenerator[memoryview, None]:
        """Its file, in pieces, those of its pages first; once it stands still the last file alone.

        lease_s: that it is to have. Raises RequestError as Passage.stored does, and StaysHere, MOVE_FAILED, where pages
        take too long or its lease was made longer while they went.
        """
        if self._id is None:
            begun_s = asyncio.get_running_loop().time()
            async with aclosing(self._pages()) as pages:
                async for piece in pages:
                    self.bytes_ahead += len(piece)
                    yield piece
            self._frozen_since_s = asyncio.get_running_loop().time()
            self.ahead_s += self._frozen_since_s - begun_s
            stored = self._passage.stored(*self._whose, is_leaving=True, ahead=self.ahead)
            self._id = await self._held.enter_async_context(stored)
            if self.lease_s() > lease_s + 0.001:
                raise _stays("its lease was made longer meanwhile")
        async with aclosing(self._file(self._id)) as pieces:
            async for piece in pieces:
                self.bytes_frozen += len(piece)
                yield piece

    async def _pages(self) -> AsyncGenerator[memoryview, None]:
        """Files of whole pages, some after the other, until few are left; while some are sent the next are read."""
        until_s, runs, self.ahead = asyncio.get_running_loop().time() + AHEAD_S, self._runs(), 0
        coming: asyncio.Task[_Prepared] | None = None

        def prepare() -> asyncio.Task[_Prepared] | None:
            run = next(runs, None)
            return None if run is None else asyncio.create_task(self._prepared(*run))

        try:
            coming = prepare()
            while coming is not None:
                held, first, others, end = await coming
                coming = None
                async with held:
                    coming = prepare()
                    yield first
                    async for piece in others:
                        yield piece
                self.ahead = end
                if asyncio.get_running_loop().time() > until_s:
                    raise _stays(f"its pages took more than {AHEAD_S:g} seconds")
        finally:
            if coming is not None:
                coming.cancel()
                with suppress(asyncio.CancelledError, Exception):  # what ended this is told
                    await (await coming).held.aclose()

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Where the tokens of whole pages begin and end that may go next, until few are left."""
        begin, before = 0, 1 << 62
        while True:
            settled = self._passage.num_settled(*self._whose)
            settled -= settled % self._page_tokens
            # Where steps fill pages as fast as these go, more rounds would not leave less.
            if not 0 < settled - begin <= before // 2:
                return
            before = settled - begin
            while begin < settled:
                end = min(begin + self._passage.existing_exchange().tokens_at_once(self._page_tokens), settled)
                yield begin, end
                begin = end

    async def _prepared(self, begin: int, end: int) -> _Prepared:
        """The file of the pages of tokens `begin` .. `end`, its first piece made."""
        held = AsyncExitStack()
        try:
            id = await held.enter_async_context(self._passage.stored_pages(*self._whose, begin, end))
            pieces = await held.enter_async_context(aclosing(self._file(id)))
            return _Prepared(held, await anext(pieces), pieces, end)
        except BaseException:
            await held.aclose()
            raise

    def _file(self, id: bytes) -> AsyncGenerator[memoryview, None]:
        exchange = self._passage.existing_exchange()
        # How long a message may take is the way's to say; a file that was made ahead waits for the one before.
        return exchange.pieces(id, self._principal, pause_s=WHOLE_S, whole_s=WHOLE_S, piece_bytes=AHEAD_BYTES)


def _stays(why: str) -> StaysHere:
    return StaysHere(Reason.MOVE_FAILED, f"{why}; the sequence stays here", retry_after_s=1.0)
