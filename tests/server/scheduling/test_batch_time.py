"""The pace: learnt times, and the chunks that follow from them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from deltaline_server.scheduling.batch_time import (
    MEMORY_S,
    MIN_CHUNK_TOKENS,
    PAIR_STRETCH,
    SHORT_MEMORY_S,
    BatchTimeModel,
)

# Seconds of a device whose batches have a fixed part: a chunk a quarter as long takes more than a quarter of the time.
FIXED_S, TOKEN_S, SHORT_S = 0.2e-3, 1.05e-6, 0.67e-3
ROWS = 64


def seconds(num_short: int, tokens: int) -> float:
    return (SHORT_S if num_short else 0.0) + (FIXED_S + TOKEN_S * tokens if tokens else 0.0)


def serve(pace: BatchTimeModel, rounds: int) -> list[int]:
    """Batches of chunks, of which every other one has decodes too, each measured; returns their tokens."""
    chunks: list[int] = []
    before_s = 0.0
    for number in range(rounds):
        num_short = ROWS * (number % 2)
        chunks.append(pace.chunk_tokens(0, num_short, before_s, 0.0))
        before_s = pace.predicted_s(0, num_short, chunks[-1])
        pace.measured(0, num_short, chunks[-1], seconds(num_short, chunks[-1]), 0.0)
    return chunks


def test_a_prefill_alone_has_the_whole_budget() -> None:
    pace = BatchTimeModel(1, 4096)
    assert pace.chunk_tokens(0, 0, 0.0, 0.0) == 4096
    pace.measured(0, ROWS, 0, SHORT_S, 5.0)
    assert pace.chunk_tokens(0, 0, 0.0, 5.0 + SHORT_MEMORY_S / 2) < 4096
    assert pace.chunk_tokens(0, 0, 0.0, 5.0 + 1.01 * SHORT_MEMORY_S) == 4096


@pytest.mark.parametrize("learns_long_first", [True, False])
def test_chunks_settle_at_the_largest_that_decodes_can_bear(learns_long_first: bool) -> None:
    pace = BatchTimeModel(1, 4096)
    if learns_long_first:
        pace.measured(0, 0, 4096, seconds(0, 4096), 0.0)
    pace.measured(0, ROWS, 0, SHORT_S, 0.0)
    sizes = [MIN_CHUNK_TOKENS << i for i in range(5)]
    most_s = PAIR_STRETCH * SHORT_S
    alone = max(size for size in sizes if seconds(0, size) <= most_s - seconds(ROWS, MIN_CHUNK_TOKENS))
    beside = max(size for size in sizes if seconds(ROWS, size) <= most_s - seconds(0, alone))
    assert MIN_CHUNK_TOKENS < beside < alone < 4096  # else this shows nothing
    chunks = serve(pace, 40)
    assert chunks[10:] == [alone, beside] * 15


def test_chunks_beside_decodes_in_every_batch_settle_too() -> None:
    pace = BatchTimeModel(1, 4096)
    pace.measured(0, ROWS, 0, SHORT_S, 0.0)
    took_s: list[float] = []
    for _ in range(40):
        before_s = took_s[-1] if took_s else 0.0
        took_s.append(seconds(ROWS, pace.chunk_tokens(0, ROWS, before_s, 0.0)))
        pace.measured(0, ROWS, pace.chunk_tokens(0, ROWS, before_s, 0.0), took_s[-1], 0.0)
    pairs_s = [first_s + second_s for first_s, second_s in pairwise(took_s[10:])]
    assert 0.6 * PAIR_STRETCH * SHORT_S < min(pairs_s) <= max(pairs_s) <= PAIR_STRETCH * SHORT_S


def test_a_batch_behind_an_idle_device_leaves_half_to_the_next() -> None:
    pace = BatchTimeModel(1, 4096)
    pace.measured(0, 0, 4096, seconds(0, 4096), 0.0)
    pace.measured(0, ROWS, 0, SHORT_S, 0.0)
    chunk = pace.chunk_tokens(0, ROWS, 0.0, 0.0)
    half_s = PAIR_STRETCH / 2 * SHORT_S
    assert pace.predicted_s(0, ROWS, chunk) <= half_s < pace.predicted_s(0, ROWS, 2 * chunk)


def test_chunks_are_the_smallest_where_nothing_is_known() -> None:
    pace = BatchTimeModel(1, 4096)
    assert pace.chunk_tokens(0, ROWS, 0.0, 0.0) == MIN_CHUNK_TOKENS
    pace.measured(0, ROWS, 0, SHORT_S, 0.0)
    assert pace.chunk_tokens(0, ROWS, 0.0, 0.0) == MIN_CHUNK_TOKENS


@pytest.mark.parametrize("budget", [64, 256, 300, 1000, 4096])
def test_chunks_are_within_the_budget(budget: int) -> None:
    pace = BatchTimeModel(1, budget)
    assert pace.chunk_tokens(0, 0, 0.0, 0.0) == budget
    pace.measured(0, ROWS, 0, SHORT_S, 0.0)
    assert all(min(budget, MIN_CHUNK_TOKENS) <= chunk <= budget for chunk in serve(pace, 40))


def test_times_between_and_beyond_what_was_measured() -> None:
    pace = BatchTimeModel(1, 4096)
    assert pace.predicted_s(0, ROWS, 512) == 0.0
    pace.measured(0, ROWS, 0, SHORT_S, 0.0)
    assert pace.predicted_s(0, 2 * ROWS, 0) == SHORT_S  # the nearest number
    for size in (512, 2048):
        pace.measured(0, 0, size, seconds(0, size), 0.0)
    for size in (512, 1024, 2048, 4096):
        assert pace.predicted_s(0, 0, size) == pytest.approx(seconds(0, size))
        assert pace.predicted_s(0, ROWS, size) == pytest.approx(seconds(ROWS, size))
    assert 0 < pace.predicted_s(0, 0, 256) < seconds(0, 512)
    pace.measured(0, ROWS, 1024, 1.5 * seconds(ROWS, 1024), 0.0)
    assert pace.predicted_s(0, ROWS, 1024) == 1.5 * seconds(ROWS, 1024)
    assert pace.predicted_s(0, ROWS, 1000) == pace.predicted_s(0, ROWS, 1024)  # it is padded
    times = [pace.predicted_s(0, ROWS, size) for size in (0, 256, 512, 1024, 2048, 4096)]
    assert all(a < b for a, b in pairwise(times))


def test_a_stall_counts_little() -> None:
    pace = BatchTimeModel(1, 4096)
    pace.measured(0, ROWS, 0, SHORT_S, 0.0)
    pace.measured(0, ROWS, 0, 1000 * SHORT_S, 0.0)
    assert pace.predicted_s(0, ROWS, 0) < 1.5 * SHORT_S


def test_a_stall_does_not_rule_out_a_size_for_good() -> None:
    pace = BatchTimeModel(1, 4096)
    pace.measured(0, ROWS, 0, SHORT_S, 0.0)
    alone, beside = serve(pace, 20)[-2:]
    assert MIN_CHUNK_TOKENS < beside < alone  # else this shows nothing
    for _ in range(20):
        pace.measured(0, ROWS, beside, 100 * SHORT_S, 0.0)
    assert serve(pace, 20)[-2:] == [alone, beside // 2]
    pace.measured(0, ROWS, beside // 2, seconds(ROWS, beside // 2), 1.01 * MEMORY_S)
    assert pace.chunk_tokens(0, ROWS, seconds(0, alone), 1.01 * MEMORY_S) == beside
    assert pace.predicted_s(0, ROWS, 0) == SHORT_S


def test_spans_have_their_own_times() -> None:
    pace = BatchTimeModel(2, 4096)
    pace.measured(1, ROWS, 0, SHORT_S, 0.0)
    assert pace.predicted_s(0, ROWS, 0) == 0.0


def test_a_number_of_rows_that_was_not_met_takes_the_time_of_the_nearest() -> None:
    pace = BatchTimeModel(1, 4096)
    pace.measured(0, 7, 0, 1.0, 0.0)
    pace.measured(0, 63, 0, 2.0, 0.0)
    assert [pace.predicted_s(0, rows, 0) for rows in (1, 8, 31, 200)] == [1.0, 1.0, 2.0, 2.0]


def test_how_fast_prompts_are_prefilled_is_told_once_every_span_has_computed_some() -> None:
    pace = BatchTimeModel(2, 4096)
    pace.measured(0, 0, 4096, 0.4, 0.0)
    assert pace.prefill_tokens_per_s is None
    pace.measured(1, 0, MIN_CHUNK_TOKENS - 1, 0.1, 0.0)
    assert pace.prefill_tokens_per_s is None
    for _ in range(40):
        pace.measured(1, 0, 4096, 0.6, 0.0)
        pace.measured(0, 0, 4096, 0.4, 0.0)
    assert pace.prefill_tokens_per_s == pytest.approx(4096, rel=0.01)


def test_short_rows_beside_a_chunk_are_not_counted_as_its_time() -> None:
    pace = BatchTimeModel(1, 4096)
    pace.measured(0, ROWS, 0, SHORT_S, 0.0)
    for _ in range(40):
        pace.measured(0, ROWS, 4096, seconds(ROWS, 4096), 0.0)
    assert pace.prefill_tokens_per_s == pytest.approx(4096 / seconds(0, 4096), rel=0.01)


def test_a_stall_of_the_first_decodes_does_not_make_chunks_long_for_good() -> None:
    pace = BatchTimeModel(1, 4096)
    pace.measured(0, ROWS, 0, 30 * SHORT_S, 0.0)
    chunks = serve(pace, 400)
    assert seconds(0, chunks[-2]) + seconds(ROWS, chunks[-1]) <= PAIR_STRETCH * SHORT_S
