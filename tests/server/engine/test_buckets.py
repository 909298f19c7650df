"""Buckets: every batch within the limits has one, and a small one; and how a batch lies in their layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rigs.limits import make_limits

from deltaline_server.batch import StepBatch
from deltaline_server.engine.batch_layout import Layout, fill_adapters, fill_pages
from deltaline_server.engine.graphs import Bucket, Graphs, make_buckets


class Finder:
    """Finds buckets as graphs do that have captured these."""

    def __init__(self, buckets: list[Bucket], draft: int) -> None:
        unused: Any = None
        self._graphs, self._draft = Graphs(unused, unused, buckets), draft

    def find(self, lengths: list[int], has_adapters: bool = False) -> Bucket:
        """The bucket of a batch with rows of these lengths."""
        control = np.zeros((7, len(lengths) + 1), dtype=np.int32)
        control[0, 1:] = np.cumsum(lengths)
        places = np.full(len(lengths), -1, dtype=np.int32) if has_adapters else None
        num_short = sum(n <= self._draft for n in lengths)
        return self._graphs.find(StepBatch(0, control, num_short, (), None, adapter_places=places))


@pytest.mark.parametrize(("rows", "draft"), [(1, 1), (1, 4), (6, 3), (64, 8), (100, 5)])
def test_every_batch_within_the_limits_has_a_bucket_and_a_small_one(rows: int, draft: int) -> None:
    chunk = 1000
    buckets = make_buckets(make_limits(short_rows=rows, long_rows=3, chunk_tokens=chunk), draft)
    find = Finder(buckets, draft).find
    assert len(set(buckets)) == len(buckets) < 60
    for short in range(1, rows + 1):
        decode = find([1] * short)
        assert decode.longest == 1 and decode.layout.tokens < 2 * short
        assert find([draft] * short).layout.tokens < max(4 * short * draft, 2 * 4)
    for tokens in (draft + 1, 256, 257, chunk):
        alone = find([tokens])
        assert alone.layout.tokens <= max(256 + rows, 2 * tokens) and alone.longest >= tokens
        long = [tokens] if tokens < 3 * (draft + 1) else [draft + 1, draft + 1, tokens - 2 * (draft + 1)]
        for short_lengths in ([], [1] * rows, [draft] * rows):
            bucket = find([*short_lengths, *long])
            layout = bucket.layout
            assert layout.rows - layout.short_rows >= len(long) and layout.short_rows >= len(short_lengths)
            assert bucket.longest >= max(long) and bucket.longest_short >= max(short_lengths, default=0)


@pytest.mark.parametrize("lengths", [[1] * 9, [1] * 8 + [200] * 4, [1040]], ids=["short", "rows", "tokens"])
def test_a_batch_beyond_the_limits_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="within the limits"):
        Finder(make_buckets(make_limits(short_rows=8, long_rows=3, chunk_tokens=1000), 4), 4).find(lengths)


def test_batches_with_adapters_have_buckets_of_their_own() -> None:
    limits = make_limits(short_rows=12, long_rows=3, chunk_tokens=1000)
    plain, buckets = make_buckets(limits, 4), make_buckets(limits, 4, has_adapters=True)
    assert [bucket for bucket in buckets if not bucket.layout.has_adapters] == plain
    assert len(buckets) == 2 * len(plain)
    finder, of_plain = Finder(buckets, 4), Finder(plain, 4)
    for lengths in ([1] * 5, [1] * 12, [4, 1, 3], [1, 1, 900], [700]):
        for has_adapters in (False, True, False):
            found = finder.find(lengths, has_adapters)
            assert found.layout.has_adapters == has_adapters
            assert replace(found.layout, has_adapters=False) == of_plain.find(lengths).layout
    with pytest.raises(ValueError, match="within the limits, got 5 short rows, 0 long rows, 5 tokens, adapters"):
        of_plain.find([1] * 5, True)


def test_buckets_of_a_model_with_pages_have_room_for_them() -> None:
    limits = make_limits(short_rows=100, long_rows=3, chunk_tokens=1000)
    plain, buckets = make_buckets(limits, 5), make_buckets(limits, 5, page_size=16)
    assert [replace(bucket, layout=replace(bucket.layout, page_size=0)) for bucket in buckets] == plain
    rng = np.random.default_rng(0)
    for bucket in buckets:
        layout = bucket.layout
        for _ in range(20):  # rows of random lengths at the worst positions: each begins a page with its first token
            cuts = sorted(rng.integers(0, layout.tokens + 1, layout.rows - 1).tolist())
            lengths = np.diff([0, *cuts, layout.tokens])
            assert (-(-lengths // 16)).sum() <= layout.num_pages


@pytest.mark.parametrize("has_adapters", [False, True])
def test_the_pages_of_a_batch_lie_behind_its_fields(has_adapters: bool) -> None:
    layout = Layout(4, 9, 150, has_adapters, page_size=64)
    assert (layout.num_pages, Layout(4, 9, 5, page_size=64).num_pages) == (11, 5)
    assert layout.control_bytes == -(-(layout.field_bytes + 3 * 11 * 4) // 256) * 256
    without = replace(layout, page_size=0)
    assert (without.num_pages, without.control_bytes) == (0, -(-layout.field_bytes // 256) * 256)
    assert layout.field_bytes == (8 if has_adapters else 7) * 10 * 4
    region = np.full((3, 11), 99, dtype=np.int32)
    fill_pages(region, np.array([[2, 3], [0, 7], [5, 6]], dtype=np.int32))
    assert region[:, :2].tolist() == [[2, 3], [0, 7], [5, 6]] and not region[:, 2:].any()


@pytest.mark.parametrize("num_short", [0, 2, 3])
def test_adapters_of_a_batch_lie_where_its_rows_do(num_short: int) -> None:
    field = np.full(10, 99, dtype=np.int32)
    places = np.array([5, -1, 3], dtype=np.int32)
    fill_adapters(field, places, num_short, Layout(4, 9, 100))
    expected = np.full(10, -1, dtype=np.int32)
    expected[:num_short] = places[:num_short]
    expected[4 : 7 - num_short] = places[num_short:]
    np.testing.assert_array_equal(field, expected)
