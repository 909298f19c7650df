"""The lines of the state pool: which are free and which are in use. A line's pages go with it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.tables.pages import PagePool

NULL_LINE = 0


class LinePool:
    """Hands out lines 1 .. num_lines, the lowest first, so that a batch's lines tend to form a run.

    `zero` is called with every line that is handed out, before `allocate` returns; it may zero them later, as long as
    it does so before the next batch runs. There is no other way to get a line. pages: those that lines get beside; they
    go back with the line. None where no layer keeps keys.
    """

    def __init__(
        self, num_lines: int, zero: Callable[[NDArray[np.int64]], None], pages: PagePool | None = None
    ) -> None:
        self.num_lines, self.pages = num_lines, pages
        self._zero = zero
        self._free = list(range(1, num_lines + 1))
        self._references = np.zeros(num_lines + 1, dtype=np.int32)

    @property
    def num_used(self) -> int:
        return self.num_lines - len(self._free)

    def allocate(self, count: int) -> NDArray[np.int64]:
        """Take `count` zeroed lines with one reference each, int64 [count].

        Raises RequestError NO_FREE_LINES when fewer are free; then none is taken.
        """
        if count > len(self._free):
            raise RequestError(
                Reason.NO_FREE_LINES,
                f"{count} sequences asked for, {len(self._free)} of {self.num_lines} lines are free",
                retry_after_s=1.0,
            )
        lines = np.array([heapq.heappop(self._free) for _ in range(count)], dtype=np.int64)
        self._references[lines] = 1
        self._zero(lines)
        return lines

    def release(self, lines: Iterable[int]) -> None:
        """Drop one reference of each line; a line without references is free. The null line is passed over."""
        for line in lines:
            if line == NULL_LINE:
                continue
            if self._references[line] < 1:
                raise ValueError(f"line: expected one in use, got {line}, which is free")
            self._references[line] -= 1
            if self._references[line] == 0:
                if self.pages is not None:
                    self.pages.release(line)
                heapq.heappush(self._free, int(line))

    def check_integrity(self) -> None:
        """Raise ValueError unless every line is either free or referenced, and the null line is neither."""
        free = np.zeros(self.num_lines + 1, dtype=bool)
        free[self._free] = True
        if len(self._free) != int(free.sum()) or free[NULL_LINE] or self._references[NULL_LINE] != 0:
            raise ValueError("line pool: a line is free twice, or the null line is in the pool")
        if (free[1:] == (self._references[1:] > 0)).any():
            raise ValueError("line pool: a line is both free and in use, or neither")
        if self.pages is not None:
            self.pages.check_integrity(self._references > 0)
