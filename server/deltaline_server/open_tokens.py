"""Open tokens: which sequences a client's random token has opened, so that a retry gets the same ones.

Knows tokens and handles; opens nothing (sequences.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError

LIFE_S = 60.0


@dataclass(frozen=True)
class Opened:
    """What one call opened: handles uint64 [count], their lease, and when the token is forgotten (clock seconds)."""

    handles: NDArray[np.uint64]
    lease_s: float
    forgotten_s: float


class OpenTokens:
    """Tokens of the last minute, oldest first; at most `limit`, no less than the sequences that can be open."""

    def __init__(self, limit: int, is_open: Callable[[NDArray[np.uint64]], bool], clock: Callable[[], float]) -> None:
        self._limit, self._is_open, self._clock = limit, is_open, clock
        self._opened: OrderedDict[bytes, Opened] = OrderedDict()

    def find(self, token: bytes, count: int) -> Opened | None:
        """What the token has opened. Raises RequestError INVALID_REQUEST when that was another number of sequences."""
        while self._opened and next(iter(self._opened.values())).forgotten_s <= self._clock():
            self._opened.popitem(last=False)
        opened = self._opened.get(token)
        if opened is not None and len(opened.handles) != count:
            raise RequestError(
                Reason.INVALID_REQUEST,
                f"open_token: it was used to open {len(opened.handles)} sequences, not {count}",
                field="open_token",
            )
        return opened

    def keep(self, token: bytes, handles: NDArray[np.uint64], lease_s: float) -> None:
        """Remember what a token has opened. An empty token is none."""
        if not token:
            return
        if len(self._opened) >= self._limit:  # those with open sequences are fewer
            self._opened = OrderedDict((t, o) for t, o in self._opened.items() if self._is_open(o.handles))
        self._opened[token] = Opened(handles, lease_s, self._clock() + LIFE_S)
