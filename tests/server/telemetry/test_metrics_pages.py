"""How often the registry is read for pages, and how old what is given again may be."""

from __future__ import annotations

import gzip
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, Gauge

from deltaline_server.telemetry.metrics_pages import FRESH_S, PAGES_PER_S, MetricsPages

TEXT, OPEN_METRICS = "", "application/openmetrics-text"


class Pages:
    """Pages over one gauge, which counts how often it was read, on a clock that the test sets."""

    def __init__(self) -> None:
        registry, self.now_s = CollectorRegistry(), 0.0
        numbers = itertools.count(1)
        self.num_read, self.fails = 0, False
        self._pages = MetricsPages(registry, lambda: self.now_s)

        def read() -> int:
            assert not self.fails
            self.num_read = next(numbers)
            return self.num_read

        Gauge("read", "How often.", registry=registry).set_function(read)

    def read(self, accept: str = TEXT) -> int:
        """The number on the page that is given."""
        page = self._pages.page(accept)
        assert gzip.decompress(page.zipped) == page.plain
        return int(float(page.plain.split(b"\nread ")[1].split()[0]))


def test_few_who_ask_each_have_a_page_of_their_own() -> None:
    pages = Pages()
    for number in range(1, 30):
        assert pages.read((TEXT, OPEN_METRICS)[number % 2]) == number
        pages.now_s += 1 / 8


def test_beyond_some_a_second_the_last_page_is_given_again() -> None:
    pages = Pages()
    read = [pages.read() for _ in range(100)]
    assert read == [*range(1, PAGES_PER_S), *[PAGES_PER_S] * (101 - PAGES_PER_S)]
    pages.now_s += 1.5 / PAGES_PER_S
    assert [pages.read() for _ in range(100)] == [PAGES_PER_S + 1] * 100
    pages.now_s += 60.0
    assert pages.read() == PAGES_PER_S + 2
    for _ in range(100):
        pages.read()
    assert pages.num_read == 2 * PAGES_PER_S + 1, "nobody saves for later what nobody asked for"


def test_a_page_is_fresh_after_a_second_whoever_asks_for_the_other_format() -> None:
    pages = Pages()
    first = pages.read(OPEN_METRICS)
    seen = list[int]()
    for _ in range(40):
        for _ in range(20):
            pages.read(TEXT)
        seen.append(pages.read(OPEN_METRICS))
        pages.now_s += FRESH_S / 20
    assert seen[:20] == [first] * 20 and seen[20] > first, "a second is over"
    assert pages.num_read <= PAGES_PER_S * 3 + 3


def test_one_page_is_made_at_a_time_by_however_many_threads() -> None:
    registry, at_once, most = CollectorRegistry(), threading.Semaphore(1), list[bool]()

    def read() -> float:
        most.append(at_once.acquire(blocking=False))
        threading.Event().wait(0.01)
        at_once.release()
        return 0.0

    Gauge("read", "Once.", registry=registry).set_function(read)
    pages = MetricsPages(registry, lambda: 0.0)
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(pages.page, [TEXT, OPEN_METRICS] * 32))
    assert set(most) == {True} and len(most) <= PAGES_PER_S + 1


def test_a_page_that_fails_is_made_again() -> None:
    pages = Pages()
    pages.fails = True
    with pytest.raises(AssertionError):
        pages.read()
    pages.fails = False
    assert pages.read() == 1
