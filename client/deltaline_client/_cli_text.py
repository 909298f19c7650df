"""What the command line prints with: tables whose columns line up, and a line that shows progress."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Return rows as text. align: "<" or ">" per column."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def mebibytes(count: int) -> str:
    """Return a number of bytes in a readable unit."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


class ProgressLine:
    """Shows how far something is on stderr: rewritten in place on a terminal, a line at its end elsewhere.

    total: how many there will be, None where that is not known. Threads may share it. Use as a context manager.
    """

    _EVERY_S = 0.1

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total, self._done = what, total, 0
        self._begin_s, self._shown_s = time.monotonic(), 0.0
        self._lock = threading.Lock()
        self._in_place = sys.stderr.isatty()

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        with self._lock:
            self._done += count
            now_s = time.monotonic()
            if self._in_place and now_s - self._shown_s > self._EVERY_S:
                self._shown_s = now_s
                self._show(end="")

    def _show(self, end: str) -> None:
        start = "\r" if self._in_place else ""
        took_s = time.monotonic() - self._begin_s
        of = "" if self._total is None else f"/{self._total}"
        print(f"{start}{self._what}: {self._done}{of}, {took_s:.1f} s", end=end, file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exception: object) -> None:
        self._show(end="\n")
