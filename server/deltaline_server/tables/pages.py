"""The pages of keys and values: which are free, and which line has which.

Nothing here grows with the tokens of a sequence but its row of the table.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

Lines = NDArray[np.int64]


class PagePool:
    """Hands out pages 1 .. num_pages, each of page_size tokens. Page 0 is nobody's.

    A line's pages are for its tokens in order: with n pages it may have n * page_size tokens. It keeps them until it is
    released, whatever becomes of the tokens: what was granted once is not granted again, nor is a part given back.
    spans: those whose layers keep keys, so that their steps need pages.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, max_context: int, num_lines: int, spans: Collection[int]
    ) -> None:
        """max_context: most tokens of a line, for which there must be pages. num_lines: the null line not counted."""
        if not 1 <= max_context <= num_pages * page_size:
            raise ValueError(f"max_context: expected 1 .. {num_pages * page_size}, got {max_context}")
        self.num_pages, self.page_size, self.max_context = num_pages, page_size, max_context
        self.spans = frozenset(spans)
        self._free = list(range(num_pages, 0, -1))
        self._table = np.zeros((num_lines + 1, -(-max_context // page_size)), dtype=np.int32)
        self._count = np.zeros(num_lines + 1, dtype=np.int64)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def lacking(self, lines: Lines, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which lines (none twice) can't get pages for `ends` tokens each, bool [N]; those in front come first.

        Changes nothing. ends int64 [N], at most max_context.
        """
        wanted = self._wanted(lines, ends)
        is_lacking, left = np.zeros(len(lines), dtype=np.bool_), len(self._free)
        if int(wanted.sum()) > left:
            for i, count in enumerate(wanted.tolist()):
                if count > left:
                    is_lacking[i] = True
                else:
                    left -= count
        return is_lacking

    def grant(self, lines: Lines, ends: NDArray[np.int64]) -> None:
        """Give lines (none twice) the pages that they want for `ends` tokens each.

        Raises ValueError when there are too few; then none is given.
        """
        wanted = self._wanted(lines, ends)
        if int(wanted.sum()) > len(self._free):
            raise ValueError(f"ends: expected tokens on {len(self._free)} more pages at most, got {wanted.sum()}")
        for i in np.flatnonzero(wanted).tolist():
            line, count = int(lines[i]), int(wanted[i])
            first = int(self._count[line])
            self._table[line, first : first + count] = [self._free.pop() for _ in range(count)]
            self._count[line] = first + count

    def begun(
        self, lines: NDArray[np.int32], begins: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """The pages that begin within rows of tokens: int32 [3, n], the line, the place in it and the page of each.

        Row i has tokens begins[i] .. begins[i] + lengths[i] - 1 of lines[i], for which pages were granted; none of line
        -1 has any.
        """
        first = -(-begins // self.page_size)
        counts = np.where(lines < 0, 0, -(-(begins + lengths) // self.page_size) - first)
        of_entry = np.repeat(lines, counts)
        before = np.cumsum(counts) - counts
        places = np.repeat(first - before, counts) + np.arange(len(of_entry))
        return np.stack((of_entry, places, self._table[of_entry, places])).astype(np.int32, copy=False)

    def release(self, line: int) -> None:
        """Take back all pages of a line. Idempotent."""
        self._free += self._table[line, : self._count[line]][::-1].tolist()
        self._count[line] = 0

    def check_integrity(self, used: NDArray[np.bool_]) -> None:
        """Raise ValueError unless each page is free or one line's, once, and only lines in use (bool [L]) have any."""
        if self._count[~used].any():
            raise ValueError("page pool: a line that is not in use has pages")
        held = [self._table[line, : self._count[line]] for line in np.flatnonzero(self._count).tolist()]
        pages = np.concatenate([np.array(self._free, dtype=np.int32), *held])
        if len(pages) != self.num_pages or not (np.sort(pages) == np.arange(1, self.num_pages + 1)).all():
            raise ValueError("page pool: a page is held twice, or lost, or the reserved one is handed out")

    def _wanted(self, lines: Lines, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages that lines lack for `ends` tokens each, int64 [N]."""
        wanted: NDArray[np.int64] = np.maximum(-(-ends // self.page_size) - self._count.take(lines), 0)
        return wanted
