"""Whether the ranks of a server live: each but rank 0 says so again and again, and rank 0 listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import IntEnum

import torch

from deltaline_server.ranks.ways import Ranks

BEAT_S = 0.5
# Time for the others to say that they end.
END_S = 5.0
# Beats that may be missing. They are counted by a clock that stands still when all of the host does.
MISSED = 7


class _Says(IntEnum):
    """What a rank says of itself."""

    LIVES = 0
    ENDS = 1


class Listening:
    """What rank 0 hears of the others, on a way of their own; a thread for each rank, and one that counts.

    gone: called once for each rank that ends without a word or falls silent, with why, on such a thread.
    """

    def __init__(self, way: Ranks, gone: Callable[[int, str], None]) -> None:
        self._way, self._gone = way, gone
        self._missed = dict.fromkeys(range(1, way.world_size), 0)
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._threads = [
            threading.Thread(target=self._listen, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in self._missed
        ]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._count, name="ranks", daemon=True).start()

    def stop(self, end_s: float = END_S) -> None:
        """Report nobody any more, and give all so many seconds to end."""
        self._is_over.set()
        last_s = time.monotonic() + end_s
        for thread in self._threads:
            thread.join(max(0.0, last_s - time.monotonic()))

    def _listen(self, rank: int) -> None:
        said = torch.empty(1, dtype=torch.int32)
        try:
            while True:
                self._way.take(said, rank)
                if int(said) == _Says.ENDS:
                    self._leave(rank)
                    return
                with self._lock:
                    if rank in self._missed:
                        self._missed[rank] = 0
        except RuntimeError:
            self._lose(rank, "it ended")

    def _count(self) -> None:
        while not self._is_over.wait(BEAT_S):
            with self._lock:
                for rank in self._missed:
                    self._missed[rank] += 1
                silent = [rank for rank, missed in self._missed.items() if missed > MISSED]
            for rank in silent:
                self._lose(rank, "it is silent")

    def _leave(self, rank: int) -> bool:
        """Expect nothing more of a rank; whether anything was."""
        with self._lock:
            return self._missed.pop(rank, None) is not None

    def _lose(self, rank: int, why: str) -> None:
        if self._leave(rank) and not self._is_over.is_set():
            self._gone(rank, why)


class Beating:
    """What another rank than 0 says, from a thread of its own. lost: called there, once, when rank 0 is gone."""

    def __init__(self, way: Ranks, lost: Callable[[], None]) -> None:
        self._way, self._lost, self._is_over = way, lost, threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Say that this rank ends. Raises RuntimeError when rank 0 is gone."""
        self._is_over.set()
        self._thread.join()
        self._way.give(torch.tensor([_Says.ENDS], dtype=torch.int32), 0)

    def _beat(self) -> None:
        lives = torch.tensor([_Says.LIVES], dtype=torch.int32)
        try:
            while not self._is_over.wait(BEAT_S):
                self._way.give(lives, 0)
        except RuntimeError:
            self._lost()
