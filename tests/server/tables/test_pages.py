"""Pages by line: none is anybody else's, none is lost, and what is told of a batch is what begins in it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from deltaline_server.tables.lines import LinePool
from deltaline_server.tables.pages import PagePool


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def int32s(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def make(num_pages: int = 8, max_context: int = 0) -> PagePool:
    return PagePool(
        num_pages=num_pages, page_size=4, max_context=max_context or 4 * num_pages, num_lines=5, spans=[0, 2]
    )


def table(pool: PagePool, line: int, tokens: int) -> list[int]:
    """The pages of a line for so many tokens."""
    entries = pool.begun(int32s(line), int32s(0), int32s(tokens))
    assert entries.dtype == np.int32 and entries[0].tolist() == [line] * entries.shape[1]
    assert entries[1].tolist() == list(range(-(-tokens // 4)))
    return list(entries[2].tolist())


@pytest.mark.parametrize("line", [1, 5])
def test_the_first_and_the_last_line_have_pages(line: int) -> None:
    pool = make()
    pool.grant(ints(line), ints(32))
    assert table(pool, line, 32) == list(range(1, 9))


def test_tokens_get_as_many_pages_as_they_need_and_nothing_twice() -> None:
    pool = make()
    pool.grant(ints(2, 1), ints(5, 4))
    assert (table(pool, 2, 5), table(pool, 1, 4), pool.num_used) == ([1, 2], [3], 3)
    pool.grant(ints(2, 1), ints(5, 4))  # a retry
    pool.grant(ints(2), ints(8))  # within what it has
    pool.grant(ints(2), ints(3))  # a draft was rejected
    assert pool.num_used == 3
    pool.grant(ints(2), ints(9))
    assert table(pool, 2, 9) == [1, 2, 4]
    pool.check_integrity(np.array([False, True, True, False, False, False]))


def test_pages_come_back_with_their_line_and_once() -> None:
    pool = make(4)
    pool.grant(ints(1, 2), ints(8, 8))
    pool.release(1)
    pool.release(1)
    assert pool.num_used == 2
    pool.grant(ints(3), ints(8))
    assert sorted(table(pool, 3, 8)) == [1, 2]
    pool.check_integrity(np.array([False, False, True, True, False, False]))


def test_who_comes_first_gets_the_last_pages() -> None:
    pool = make(4)
    pool.grant(ints(1), ints(4))
    lines, ends = ints(2, 1, 3, 4), ints(9, 5, 1, 0)
    assert pool.lacking(lines, ends).tolist() == [False, True, True, False]
    assert pool.lacking(lines[1:], ends[1:]).tolist() == [False, False, False]
    assert pool.num_used == 1
    with pytest.raises(ValueError, match="expected tokens on 3 more pages at most, got 5"):
        pool.grant(lines, ends)
    assert pool.num_used == 1
    pool.grant(lines[[0, 3]], ends[[0, 3]])
    assert pool.num_used == 4


def test_a_context_beyond_the_pages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_context: expected 1 \.\. 32, got 33"):
        make(8, 33)


def test_a_damaged_pool_is_noticed() -> None:
    used = np.array([False, True, False, False, False, False])
    pool = make()
    pool.grant(ints(1, 2), ints(4, 4))
    with pytest.raises(ValueError, match="a line that is not in use has pages"):
        pool.check_integrity(used)
    pool.release(2)
    pool.check_integrity(used)
    pool.num_pages += 1
    with pytest.raises(ValueError, match="held twice, or lost"):
        pool.check_integrity(used)


def test_a_line_that_is_released_gives_its_pages_back() -> None:
    pages = make()
    lines = LinePool(5, lambda _: None, pages)
    first, second = lines.allocate(2).tolist()
    pages.grant(ints(first, second), ints(6, 1))
    lines.check_integrity()
    lines.release([first])
    assert pages.num_used == 1
    lines.check_integrity()
    pages.grant(ints(first), ints(6))
    with pytest.raises(ValueError, match="not in use"):
        lines.check_integrity()
