"""What the command line reads and prints with: times, tables whose columns line up, and a line that shows progress."""

from __future__ import annotations

import sys
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Return rows as text. align: "<" or ">" per column."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def seconds_up_to(most_s: float, spelled: str) -> Callable[[str], float]:
    """What reads an option that is a time above 0. It raises ArgumentTypeError."""

    def read(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= most_s:
            raise ArgumentTypeError(f"expected a number of seconds above 0, {spelled} at most, got {text!r}")
        return seconds

    return read


def plural(number: int, noun: str) -> str:
    """Return the noun as it goes with the number."""
    return noun if number == 1 else f"{noun}s"


class ProgressLine:
    """Shows how far something is on stderr: rewritten in place on a terminal, a line at its end elsewhere.

    shown: how a count is printed. Threads may share it. Use as a context manager; nothing done, nothing shown.
    """

    _EVERY_S = 0.1

    def __init__(self, what: str, shown: Callable[[int], str] = str) -> None:
        self._what, self._shown = what, shown
        self._done, self._total = 0, ""
        self._begin_s, self._shown_s = time.monotonic(), 0.0
        self._lock = threading.Lock()
        self._in_place = sys.stderr.isatty()

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        with self._lock:
            self._move(self._done + count)

    def reach(self, done: int, total: int) -> None:
        """So many are done, of so many."""
        with self._lock:
            self._total = f" of {self._shown(total)}"
            self._move(done)

    def interrupt(self, text: str) -> None:
        """Print a line of text after how far it is; what follows is shown below it."""
        with self._lock:
            if self._done or self._shown_s:
                self._show(end="\n")
            print(text, file=sys.stderr, flush=True)
            self._done, self._shown_s = 0, 0.0

    def _move(self, done: int) -> None:
        self._done = done
        now_s = time.monotonic()
        if self._in_place and now_s - self._shown_s > self._EVERY_S:
            self._shown_s = now_s
            self._show(end="")

    def _show(self, end: str) -> None:
        # What was there before may have been longer.
        start, rest = ("\r", "\x1b[K") if self._in_place else ("", "")
        took_s, done = time.monotonic() - self._begin_s, self._shown(self._done)
        print(f"{start}{self._what}: {done}{self._total}, {took_s:.1f} s{rest}", end=end, file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._done or self._shown_s:
            self._show(end="\n")
