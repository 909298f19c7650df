"""Whether the ranks of a server live: rank 0 and each of the others say so to each other, again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import IntEnum

import torch

from deltaline_server.ranks.ways import Ranks

BEAT_S = 0.5
# Time for the other one to say that it ends.
END_S = 5.0
# Beats that may be missing. They are counted by a clock that stands still when all of the host does.
MISSED = 7


class _Says(IntEnum):
    """What a rank says of itself."""

    LIVES = 0
    ENDS = 1


class Pulse:
    """What this rank says to another one, and hears of it. It speaks, listens and counts on threads of their own, as it
    may wait for ever to be heard.

    gone: called once, on such a thread, when the other one ends without a word or falls silent, with why. Rank 0 ends
    all: where this one has not by the time that it would be silent, what this one waits for may never come.
    """

    def __init__(self, way: Ranks, rank: int, gone: Callable[[str], None]) -> None:
        """way: of the pulses alone. rank: the other one."""
        self._way, self._rank, self._gone = way, rank, gone
        # None before the other one has said anything: it may have more to prepare.
        self._missed: int | None = None
        self._is_expected = True
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._threads = [
            threading.Thread(target=do, name=f"rank {rank}", daemon=True) for do in (self._speak, self._listen)
        ]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._count, name=f"count {rank}", daemon=True).start()

    def stop(self, end_s: float = END_S) -> None:
        """Say that this rank ends, and give the other one so many seconds to say so too."""
        self._is_over.set()
        last_s = time.monotonic() + end_s
        for thread in self._threads:
            thread.join(max(0.0, last_s - time.monotonic()))

    def _speak(self) -> None:
        try:
            self._say(_Says.LIVES)  # at once: nothing is expected of who has said nothing yet
            while not self._is_over.wait(BEAT_S):
                self._say(_Says.LIVES)
            self._say(_Says.ENDS)
        except RuntimeError:
            self._lose("it ended")

    def _say(self, what: _Says) -> None:
        self._way.give(torch.tensor([what], dtype=torch.int32), self._rank)

    def _listen(self) -> None:
        said = torch.zeros(1, dtype=torch.int32)
        try:
            while int(said) != _Says.ENDS:
                self._way.take(said, self._rank)
                self._missed = 0
        except RuntimeError:
            self._lose("it ended")
        else:
            if self._rank:
                self._leave()

    def _count(self) -> None:
        while not self._is_over.wait(BEAT_S):
            if self._missed is None:
                continue
            self._missed += 1
            if self._missed > MISSED:
                self._lose("it is silent")
                return

    def _leave(self) -> bool:
        """Expect nothing more of the other one; whether anything was."""
        with self._lock:
            was, self._is_expected = self._is_expected, False
        return was

    def _lose(self, why: str) -> None:
        if self._leave() and not self._is_over.is_set():
            self._gone(why)
