"""Open tokens: which sequences a client's random token has opened, so that a retry gets the same ones."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.tables.prefixes.match import Match
from deltaline_server.tables.sequence_adapters import BoundAdapter

LIFE_S = 60.0


class Origin(NamedTuple):
    """What sequences are opened with: an adapter's name, the id of a snapshot, and what identifies a prompt's keys and
    how they are used; each empty for none."""

    adapter: str = ""
    snapshot: bytes = b""
    prompt: bytes = b""


@dataclass(frozen=True)
class Opened:
    """What one call opened: handles uint64 [count], their lease in seconds, their adapter, and what was found of their
    prompt, None where none was named."""

    handles: NDArray[np.uint64]
    lease_s: float
    adapter: BoundAdapter
    match: Match | None = None


class OpenTokens:
    """Tokens of the last minute, oldest first, each for the principal that sent it. They outlive their sequences, so
    that a call that comes late opens no others; of more than two for each sequence that can be open, those whose
    sequences are over are forgotten, of the principal that has most of them, the oldest first."""

    def __init__(
        self,
        num_slots: int,
        is_any_held: Callable[[NDArray[np.uint64]], bool],
        check_held: Callable[[Opened, Principal], None],
        clock: Callable[[], float],
    ) -> None:
        """check_held raises RequestError where one of what a principal has opened is over."""
        self._limit, self._is_any_held, self._check_held = 2 * num_slots, is_any_held, check_held
        self._clock = clock
        # By the principal's number and the token, with the time at which each is forgotten.
        self._opened: OrderedDict[tuple[int, bytes], tuple[Opened, Origin, float]] = OrderedDict()

    def once(
        self, principal: Principal, token: bytes, count: int, origin: Origin, make: Callable[[], Opened]
    ) -> Opened:
        """What the principal's token has opened within a minute, else what `make` opens now: `count` sequences.

        Raises what `make` raises; RequestError INVALID_REQUEST where the token has opened others, and SEQUENCE_CLOSED,
        SEQUENCE_EXPIRED or SEQUENCE_UNKNOWN where one of them is over.
        """
        opened = self.find(principal, token, count, origin)
        if opened is None:
            opened = make()
            self.keep(principal, token, origin, opened)
        else:
            self._check_held(opened, principal)
        return opened

    async def once_inside(
        self,
        principal: Principal,
        token: bytes,
        count: int,
        origin: Origin,
        inside: Callable[[], AbstractAsyncContextManager[Callable[[], Opened]]],
    ) -> Opened:
        """As `once`, for what can only be opened inside a context, which gives what opens it and is not entered where
        the token has opened them before. Raises what the context raises as well."""
        opened = self.find(principal, token, count, origin)
        if opened is not None:
            self._check_held(opened, principal)
            return opened
        async with inside() as make:  # another call with the token may have been faster
            return self.once(principal, token, count, origin, make)

    def find(self, principal: Principal, token: bytes, count: int, origin: Origin) -> Opened | None:
        """What the principal's token has opened, which may be over. Raises RequestError INVALID_REQUEST when that was
        another number of sequences, or they began otherwise."""
        while self._opened and next(iter(self._opened.values()))[2] <= self._clock():
            self._opened.popitem(last=False)
        opened, before, _ = self._opened.get((principal.number, token), (None, origin, 0.0))
        if opened is not None and len(opened.handles) != count:
            raise _used(f"it was used to open {len(opened.handles)} sequences, not {count}")
        if before.adapter != origin.adapter:
            raise _used("it was used to open sequences with another adapter")
        if before.snapshot != origin.snapshot:
            raise _used("it was used to open sequences from another snapshot, or from none")
        if before.prompt != origin.prompt:
            raise _used("it was used to open sequences for another prompt, or for none")
        return opened

    def keep(self, principal: Principal, token: bytes, origin: Origin, opened: Opened) -> None:
        """Remember what a token has opened. An empty token is none."""
        if not token:
            return
        if len(self._opened) >= self._limit:  # at most half of them have sequences that are held
            over = [key for key, (old, _, _) in self._opened.items() if not self._is_any_held(old.handles)]
            ((most, count),) = Counter(number for number, _ in over).most_common(1)
            for key in [key for key in over if key[0] == most][: (count + 1) // 2]:
                del self._opened[key]
        self._opened[principal.number, token] = opened, origin, self._clock() + LIFE_S


def _used(message: str) -> RequestError:
    return RequestError(Reason.INVALID_REQUEST, f"open_token: {message}", field="open_token")
