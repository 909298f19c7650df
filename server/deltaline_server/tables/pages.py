"""The pages of keys and values: which are free, which line has which, and how many hold each.

Nothing here grows with the tokens of a sequence but its row of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Lines = NDArray[np.int64]
Pages = NDArray[np.int32]


@dataclass(frozen=True)
class PagesPlaced:
    """What the device has to be told of lines that others' pages were given: all in one go, in all layers.

    lines int64 [n]; pages int32 [n, most]: the first ones of each line's row of the table, what is behind a line's own
    means nothing. copies int64 [2, m]: pages, and those that become copies of them.
    """

    lines: Lines
    pages: Pages
    copies: NDArray[np.int64]


class PagePool:
    """Hands out pages 1 .. num_pages, each of page_size tokens. Page 0 is nobody's.

    A line's pages are for its tokens in order: with n pages it may have n * page_size tokens. It keeps them until it is
    released, whatever becomes of the tokens: what was granted once is not granted again, nor is a part given back.
    Several may hold a page that is full of committed tokens, which nobody writes; one that is not full has one holder.
    A page is free when its last holder lets go. spans: those whose layers keep keys, so that their steps need pages.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, max_context: int, num_lines: int, spans: Collection[int]
    ) -> None:
        """max_context: most tokens of a line, for which there must be pages. num_lines: the null line not counted."""
        if not 1 <= max_context <= num_pages * page_size:
            raise ValueError(f"max_context: expected 1 .. {num_pages * page_size}, got {max_context}")
        self.num_pages, self.page_size, self.max_context = num_pages, page_size, max_context
        self.spans = frozenset(spans)
        self.num_givable: Callable[[], int] = lambda: 0
        """How many pages more would be free if all were let go of that may be."""
        self.make_room: Callable[[int], None] = lambda num_pages: None
        """Called when so many pages are lacking, of those: they are to be let go of."""
        self._free = list(range(num_pages, 0, -1))
        self._references = np.zeros(num_pages + 1, dtype=np.int64)
        self._table = np.zeros((num_lines + 1, -(-max_context // page_size)), dtype=np.int32)
        self._count = np.zeros(num_lines + 1, dtype=np.int64)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lacking(self, lines: Lines, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which lines (none twice) can't get pages for `ends` tokens each, also where room is made, bool [N]; those in
        front come first.

        Changes nothing. ends int64 [N], at most max_context.
        """
        wanted = self._wanted(lines, ends)
        is_lacking, left = np.zeros(len(lines), dtype=np.bool_), len(self._free)
        if int(wanted.sum()) > left:
            left += self.num_givable()
            for i, count in enumerate(wanted.tolist()):
                if count > left:
                    is_lacking[i] = True
                else:
                    left -= count
        return is_lacking

    def grant(self, lines: Lines, ends: NDArray[np.int64]) -> None:
        """Give lines (none twice) the pages that they want for `ends` tokens each, for which room is made if need be.

        Raises ValueError when there are too few; then none is given.
        """
        wanted = self._wanted(lines, ends)
        if (num_lacking := int(wanted.sum()) - len(self._free)) > 0:
            self.make_room(num_lacking)
        if int(wanted.sum()) > len(self._free):
            raise ValueError(f"ends: expected tokens on {len(self._free)} more pages at most, got {wanted.sum()}")
        for i in np.flatnonzero(wanted).tolist():
            line, count = int(lines[i]), int(wanted[i])
            first = int(self._count[line])
            self._table[line, first : first + count] = pages = [self._free.pop() for _ in range(count)]
            self._references[pages] = 1
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

    def of(self, line: int, num_tokens: int) -> Pages:
        """The pages of a line's first tokens, int32: a copy."""
        return self._table[line, : min(-(-num_tokens // self.page_size), int(self._count[line]))].copy()

    def release(self, line: int) -> None:
        """Let go of all pages of a line. Idempotent."""
        self.drop(self._table[line, : self._count[line]])
        self._count[line] = 0

    # -- states that are captured ----------------------------------------------------------------------------------

    def is_cut(self, num_tokens: int) -> bool:
        """Whether so many tokens leave a page that is not full: each who goes on from there needs a copy of it."""
        return num_tokens % self.page_size > 0

    def capture(self, line: int, num_tokens: int, new_line: int) -> Pages:
        """Return the pages of a line's first tokens, int32, as held by a captured state; the line's row, with what
        was granted beyond these tokens, is new_line's (which may be the same) from now on.

        A last page that is not full is the captured state's alone, and the line has a free page in its place, which is
        to become its copy (`placed`). Raises ValueError when there is none; then nothing has changed.
        """
        pages = self._table[line, : -(-num_tokens // self.page_size)].copy()
        copies = self._take_copies(num_tokens, 1)
        self._references[pages] += 1
        count = int(self._count[line])
        row = self._table[line, :count].copy()
        if copies:
            row[len(pages) - 1] = copies[0]
            self._references[pages[-1]] -= 1
        self._count[line] = 0
        self._table[new_line, :count] = row
        self._count[new_line] = count
        return pages

    def share(self, line: int, num_tokens: int) -> tuple[Pages, int]:
        """Return the pages of a line's first tokens, int32, as held by a captured state beside the line, which keeps
        its own; and the page of which the last one is to become a copy, 0 where that is full and no copy.

        Raises ValueError where a copy is needed and no page is free; then nothing has changed.
        """
        pages = self._table[line, : -(-num_tokens // self.page_size)].copy()
        copies, source = self._take_copies(num_tokens, 1), 0
        self._references[pages[: num_tokens // self.page_size]] += 1
        if copies:
            source, pages[-1] = int(pages[-1]), copies[0]
        return pages, source

    def take(self, num_tokens: int) -> Pages:
        """Pages for so many tokens, int32, as held by a captured state. Raises ValueError when too few are free."""
        count = -(-num_tokens // self.page_size)
        if count > len(self._free):
            raise ValueError(f"num_tokens: expected tokens on {len(self._free)} pages at most, got {num_tokens}")
        pages = np.array([self._free.pop() for _ in range(count)], dtype=np.int32)
        self._references[pages] = 1
        return pages

    def restore(self, pages: Pages, num_tokens: int, lines: Lines) -> None:
        """Let lines without pages go on behind a captured state's tokens, as `capture` leaves its own.

        Raises ValueError when each needs a page of its own and there are too few; then nothing has changed.
        """
        num_full, copies = num_tokens // self.page_size, self._take_copies(num_tokens, len(lines))
        self._table[lines, :num_full] = pages[:num_full]
        self._references[pages[:num_full]] += len(lines)
        if copies:
            self._table[lines, num_full] = copies
        self._count[lines] = len(pages)

    def placed(self, lines: Lines, states: Iterable[tuple[Pages, int]]) -> PagesPlaced:
        """What the device has to be told of lines that go on behind captured states: of each its pages and tokens."""
        states = list(states)
        rows = np.zeros((len(lines), max((len(pages) for pages, _ in states), default=0)), dtype=np.int32)
        copies = []
        for i, (pages, num_tokens) in enumerate(states):
            rows[i, : len(pages)] = self._table[lines[i], : len(pages)]
            if self.is_cut(num_tokens):
                copies.append((int(pages[-1]), int(rows[i, len(pages) - 1])))
        return PagesPlaced(lines, rows, np.array(copies, dtype=np.int64).reshape(-1, 2).T)

    def move(self, line: int, new_line: int) -> PagesPlaced:
        """Let a line's pages be those of another, which has none. Returns what the device has to be told."""
        count = int(self._count[line])
        self._table[new_line, :count] = self._table[line, :count]
        self._count[[line, new_line]] = 0, count
        rows = self._table[[new_line], :count]
        return PagesPlaced(np.array([new_line], dtype=np.int64), rows, np.zeros((2, 0), dtype=np.int64))

    def drop(self, pages: Pages) -> None:
        """Let go of pages (none twice)."""
        self._references[pages] -= 1
        self._free += pages[self._references[pages] == 0][::-1].tolist()

    def references(self) -> NDArray[np.int64]:
        """How many hold each page, int64 [num_pages + 1]: a copy."""
        return self._references.copy()

    def check_batch(self, write_line: NDArray[np.int32], position: NDArray[np.int32]) -> None:
        """Raise ValueError if a row (int32 [N] each) writes into a page that others hold too."""
        is_cut = (write_line > 0) & (position % self.page_size > 0)
        pages = self._table[write_line[is_cut], position[is_cut] // self.page_size]
        if (self._references[pages] > 1).any():
            raise ValueError("batch: a row writes a page that others may read")

    def check_integrity(self, used: NDArray[np.bool_], captured: Iterable[tuple[Pages, int]] = ()) -> None:
        """Raise ValueError unless each page is free or held as often as is counted, and only lines that are written
        (bool [L]) and captured states have any; of those the pages and tokens are given."""
        if self._count[~used].any():
            raise ValueError("page pool: a line that is not in use has pages")
        held, cut = np.zeros(len(self._references), dtype=np.int64), []
        for line in np.flatnonzero(self._count).tolist():
            np.add.at(held, self._table[line, : self._count[line]], 1)
        for pages, num_tokens in captured:
            np.add.at(held, pages, 1)
            cut += pages[num_tokens // self.page_size :].tolist()
        pages = np.concatenate([np.array(self._free, dtype=np.int64), np.flatnonzero(held)])
        if len(pages) != self.num_pages or not (np.sort(pages) == np.arange(1, self.num_pages + 1)).all():
            raise ValueError("page pool: a page is held twice, or lost, or the reserved one is handed out")
        if (held != self._references).any():
            raise ValueError("page pool: a page is held by others than are counted")
        if (held[cut] > 1).any():
            raise ValueError("page pool: a page that is not full has several holders")

    def _take_copies(self, num_tokens: int, count: int) -> list[int]:
        """Free pages for copies of a last page that is not full; empty where it is."""
        if not self.is_cut(num_tokens):
            return []
        if count > len(self._free):
            raise ValueError(f"num_tokens: expected {count} free pages for copies of the last, got {len(self._free)}")
        copies = [self._free.pop() for _ in range(count)]
        self._references[copies] = 1
        return copies

    def _wanted(self, lines: Lines, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages that lines lack for `ends` tokens each, int64 [N]."""
        wanted: NDArray[np.int64] = np.maximum(-(-ends // self.page_size) - self._count.take(lines), 0)
        return wanted
