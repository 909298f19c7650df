"""Values that are not finite are found wherever they lie, in one look and by several threads."""

from __future__ import annotations

import asyncio
import itertools
import threading
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rigs.until import until

from deltaline_server import finite
from deltaline_server.finite import BLOCK, PART, THREADS, FiniteCheck, all_finite, finite_rows

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [*itertools.product(DTYPES, (np.inf, -np.nan)), (np.float32, -np.inf), (np.float32, np.nan)],
)
async def test_a_value_that_is_not_finite_is_found_anywhere(dtype: type, value: float) -> None:
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    values: Any = np.full((17, BLOCK // 12), info.max, dtype)
    assert values.size > BLOCK > THREADS * PART // 2
    values[::2] = -info.max
    values[1, ::3] = info.smallest_subnormal
    check = FiniteCheck()
    assert all_finite(values) and await check.all_finite(values)
    flat = values.reshape(-1)
    part = -(-len(flat) // THREADS)
    for at in (0, part - 1, part, BLOCK - 1, BLOCK, len(flat) - 1):
        before, flat[at] = flat[at], value
        assert not all_finite(values) and not await check.all_finite(values)
        row = at // values.shape[1]
        expected = [not 0 <= row < 2, not 2 <= row < 4, row < 4]
        assert finite_rows(values, np.array([0, 2, 4])).tolist() == expected
        flat[at] = before
    check.close()


@pytest.mark.parametrize("dtype", DTYPES)
async def test_few_values_are_looked_at_too(dtype: type) -> None:
    check = FiniteCheck()
    for count in (1, 2, THREADS + 1, PART, PART + 1):
        values: Any = np.ones((1, count), dtype)
        assert await check.all_finite(values)
        values[0, -1] = np.nan
        assert not await check.all_finite(values)
    check.close()


async def test_a_large_tensor_wakes_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, num_wakes = asyncio.get_running_loop(), itertools.count()
    wake = loop.call_soon_threadsafe

    def counted(*told: Any, **how: Any) -> asyncio.Handle:
        next(num_wakes)
        return wake(*told, **how)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    check = FiniteCheck()
    assert await check.all_finite(np.zeros((THREADS, PART), np.float32))
    check.close()
    assert next(num_wakes) == 1


async def test_a_look_that_is_given_up_leaves_its_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = list[object](), threading.Event()

    def held(values: object) -> bool:
        begun.append(values)
        return go.wait(60)

    monkeypatch.setattr(finite, "all_finite", held)
    check, values = FiniteCheck(), np.zeros((THREADS, PART), np.float32)
    given_up = [asyncio.create_task(check.all_finite(values)) for _ in range(3)]
    await until(lambda: len(begun) == THREADS)
    for task in given_up:
        task.cancel()
    await asyncio.wait(given_up)
    go.set()
    assert all(task.cancelled() for task in given_up) and await check.all_finite(values)
    check.close()
    assert len(begun) == 2 * THREADS, "those that had begun, and those of the last"


async def test_no_values_are_finite() -> None:
    check = FiniteCheck()
    assert await asyncio.wait_for(check.all_finite(np.zeros((0, 64), np.float32)), 5)
    check.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_told_apart_without_anything_of_their_size(dtype: type) -> None:
    values: Any = np.ones((4096, 1024), dtype)
    values[5, 7], values[4095, 1023] = np.nan, -np.inf
    tracemalloc.start()
    finite = finite_rows(values, np.array([0, 5, 6, 4095]))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert finite.tolist() == [True, False, True, False]
    assert most < 1 << 16
