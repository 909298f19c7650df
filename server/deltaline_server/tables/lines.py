"""The lines of the state pool: which are free, and who holds the others. A written line's pages go with it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.tables.pages import PagePool, Pages

NULL_LINE = 0


class LinePool:
    """Hands out lines 1 .. num_lines, the lowest first, so that a batch's lines tend to form a run.

    A line is written by the one who got it, until it is frozen: from then on nobody writes it, any number may hold it,
    and it is free when the last of them lets go. At most snapshot_lines are frozen at a time, so that as many as there
    are sequences are left for these, and num_lent more: lines that are frozen for as long as they are copied.

    `zero` is called with every line that is handed out to be read before it is written, before `allocate` returns; it
    may zero them later, as long as it does so before the next batch runs. There is no other way to get a line. pages:
    those that lines get beside; they go back with the line. None where no layer keeps keys.
    """

    def __init__(
        self,
        num_lines: int,
        zero: Callable[[NDArray[np.int64]], None],
        pages: PagePool | None = None,
        snapshot_lines: int = 0,
        spare_lines: int = 0,
    ) -> None:
        """spare_lines: of num_lines, those that are for neither sequences nor snapshots, and may be lent."""
        self.num_lines, self.snapshot_lines, self.pages = num_lines, snapshot_lines, pages
        self.spare_lines = spare_lines
        self.num_frozen = self.num_lent = 0
        self._zero = zero
        self._free = list(range(1, num_lines + 1))
        self._references = np.zeros(num_lines + 1, dtype=np.int64)
        self._is_frozen = np.zeros(num_lines + 1, dtype=np.bool_)

    @property
    def num_used(self) -> int:
        return self.num_lines - len(self._free)

    @property
    def num_freezable(self) -> int:
        """Lines that may be frozen beside those that are."""
        return self.snapshot_lines + min(self.num_lent, self.spare_lines) - self.num_frozen

    def allocate(self, count: int, *, zeroes: bool = True) -> NDArray[np.int64]:
        """Take `count` lines with one reference each, int64 [count], zeroed unless each is written before it is read.

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
        if zeroes:
            self._zero(lines)
        return lines

    def freeze(self, line: int) -> None:
        """Let a line be written no more; who wrote it still holds it. Its pages are to be elsewhere."""
        if self._references[line] != 1 or self._is_frozen[line] or not self.num_freezable:
            raise ValueError(f"line: expected one that is written, and room for a frozen one, got {line}")
        self._is_frozen[line] = True
        self.num_frozen += 1

    def thaw(self, line: int) -> None:
        """Let a frozen line be written again, by the only one who holds it."""
        if not self._is_frozen[line]:
            raise ValueError(f"line: expected a frozen one, got {line}")
        self._is_frozen[line] = False
        self._references[line] = 1
        self.num_frozen -= 1

    def hold(self, lines: NDArray[np.int64], count: int = 1) -> None:
        """Add `count` references of each frozen line as often as it is named. The null line is passed over."""
        lines = lines[lines != NULL_LINE]
        if not self._is_frozen[lines].all():
            raise ValueError(f"lines: expected frozen ones, got {lines.tolist()}")
        np.add.at(self._references, lines, count)

    def release(self, lines: Iterable[int]) -> None:
        """Drop one reference of each line; a line without references is free. The null line is passed over."""
        for line in lines:
            if line == NULL_LINE:
                continue
            if self._references[line] < 1:
                raise ValueError(f"line: expected one in use, got {line}, which is free")
            self._references[line] -= 1
            if self._references[line] == 0:
                if self._is_frozen[line]:
                    self._is_frozen[line] = False
                    self.num_frozen -= 1
                elif self.pages is not None:
                    self.pages.release(line)
                heapq.heappush(self._free, int(line))

    def references(self) -> NDArray[np.int64]:
        """How many hold each line, int64 [num_lines + 1]: a copy."""
        return self._references.copy()

    def check_batch(self, read_line: NDArray[np.int32], write_line: NDArray[np.int32]) -> None:
        """Raise ValueError if a row (int32 [N] each) reads a line that is not its own and may be written, or writes one
        that others may read."""
        writes = write_line[write_line > NULL_LINE]
        if self._is_frozen[writes].any():
            raise ValueError("batch: a row writes a line that others may read")
        reads = read_line[(read_line > NULL_LINE) & (read_line != write_line)]
        if not self._is_frozen[reads].all():
            raise ValueError("batch: a row reads a line that another may write")

    def check_integrity(
        self, references: NDArray[np.int64] | None = None, captured: Sequence[tuple[Pages, int]] = ()
    ) -> None:
        """Raise ValueError unless every line is either free or referenced, the null line is neither, and the pages
        agree with the lines that are written and with captured states, whose pages and tokens are given.

        references: how many each line is known to have, int64 [num_lines + 1].
        """
        free = np.zeros(self.num_lines + 1, dtype=bool)
        free[self._free] = True
        if len(self._free) != int(free.sum()) or free[NULL_LINE] or self._references[NULL_LINE] != 0:
            raise ValueError("line pool: a line is free twice, or the null line is in the pool")
        if (free[1:] == (self._references[1:] > 0)).any():
            raise ValueError("line pool: a line is both free and in use, or neither")
        if (self._is_frozen & free).any() or int(self._is_frozen.sum()) != self.num_frozen:
            raise ValueError("line pool: the count of frozen lines is wrong, or one is free")
        if self.num_frozen > self.snapshot_lines + self.spare_lines:
            raise ValueError("line pool: more lines are frozen than may be")
        if (self._references[~self._is_frozen] > 1).any():
            raise ValueError("line pool: a line that is written has several holders")
        if references is not None and (references != self._references).any():
            raise ValueError("line pool: references and their holders disagree")
        if self.pages is not None:
            self.pages.check_integrity(self.is_written, captured)

    @property
    def is_written(self) -> NDArray[np.bool_]:
        """Which lines somebody may write, bool [num_lines + 1]."""
        written: NDArray[np.bool_] = (self._references > 0) & ~self._is_frozen
        return written
