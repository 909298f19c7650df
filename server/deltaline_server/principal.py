"""Who a call is from, how much they may have, and whose turn it is at what is done one at a time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deltaline_server.errors import Reason, RequestError


@dataclass(frozen=True)
class Quotas:
    """What a principal may have at a time, or take a second; 0 for no limit of its own.

    regions, region_bytes: of shared memory. adapter_bytes: of host memory.
    """

    sequences: int = 0
    queued_rows: int = 0
    queued_bytes: int = 0
    regions: int = 0
    region_bytes: int = 0
    adapter_bytes: int = 0
    prefill_tokens_per_s: int = 0
    snapshots: int = 0

    def check(self, quota: str, used: int, asked: int, retry_after_s: float = 1.0) -> None:
        """Raise RequestError QUOTA_EXCEEDED where so many more of a quota are too many."""
        limit: int = getattr(self, quota)
        if limit and used + asked > limit:
            raise self.exceeded(quota, used, asked, retry_after_s if asked <= limit else None)

    def exceeded(self, quota: str, used: int, asked: int, retry_after_s: float | None) -> RequestError:
        """The error of who asks for too many."""
        limit = getattr(self, quota)
        return RequestError(
            Reason.QUOTA_EXCEEDED,
            f"{quota}: {used} of this principal's {limit} are used, {asked} more were asked for",
            metadata={"quota": quota, "limit": str(limit), "used": str(used), "asked": str(asked)},
            retry_after_s=retry_after_s,
        )


@dataclass(frozen=True)
class Principal:
    """Who a call is from. number: what tables keep of it. roles: what it may do, as front/trust names them.
    quotas: None for none. is_alone: whether there is no other, to whom a part of what all share is to be left."""

    number: int
    name: str
    roles: frozenset[str] = frozenset()
    quotas: Quotas | None = None
    is_alone: bool = False


# Everybody, where there is no file of principals.
ANONYMOUS = Principal(0, "anonymous")
# Whose adapters are everybody's.
SHARED = Principal(-1, "shared")


def leaves_share(held: int, asked: int, free: int) -> bool:
    """Whether a principal that holds so much leaves all others as much as it would have, of what so much is free; who
    holds nothing may have what there is."""
    return not held or held + asked <= free - asked


def check_share(
    held: int,
    asked: int,
    free: int,
    what: str,
    reason: Reason = Reason.QUEUE_FULL,
    retry_after_s: float | None = 0.02,
) -> None:
    """Raise RequestError where a principal that holds so much would have more than it leaves to all others."""
    if not leaves_share(held, asked, free):
        message = f"this principal has {held} {what}, {asked} more would leave others {max(0, free - asked)}"
        raise RequestError(reason, message, retry_after_s=retry_after_s)


class FairLock:
    """A lock whose waiters are served one owner after the other: nobody waits behind all that another has asked for.
    Belongs to one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        # By owner, the one whose turn is next first.
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, owner: int) -> AsyncIterator[None]:
        """Inside the context nobody else has a turn. owner: a principal's number."""
        if self._is_taken:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(owner, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():  # it had come
                    self._pass_on(owner)
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on(owner)

    def _pass_on(self, owner: int) -> None:
        """An owner's turn is over: those of all others who wait come first."""
        if owner in self._waiting:
            self._waiting.move_to_end(owner)
        while self._waiting:
            following, futures = next(iter(self._waiting.items()))
            mine = futures.popleft()
            if not futures:
                del self._waiting[following]
            if not mine.done():  # else it was cancelled
                mine.set_result(None)
                return
        self._is_taken = False
