"""The engine without a service: batches of decode rows, submitted two deep by this process. What throughput is held to.

The one place of this package that knows how the engine is driven.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np

from deltaline_bench.service.size import Size
from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.config import Config
from deltaline_server.runtime import Runtime
from deltaline_server.telemetry.metrics import Metrics

DEPTH = 2
WARM_UP = 5


async def rows_per_second(size: Size, model: Path, rows: int) -> tuple[float, float]:
    """Decode batches of `rows` rows for the size's time; return rows per second and the share of the time computed."""
    config = Config(
        random_init=str(model),
        dtype=size.dtype,
        max_sequences=size.max_sequences,
        batch_rows=size.batch_rows,
        chunk_tokens=size.chunk_tokens,
        metrics_port=-1,
    )
    call_soon = asyncio.get_running_loop().call_soon_threadsafe
    runtime = await asyncio.to_thread(Runtime.build, config, Metrics([]), time.monotonic, call_soon)
    runtime.engine.start()
    try:
        await runtime.prepare(lambda done, total: None)
        return await asyncio.to_thread(_loop, runtime, size, rows)
    finally:
        await asyncio.to_thread(runtime.engine.close)


def _loop(runtime: Runtime, size: Size, rows: int) -> tuple[float, float]:
    batch = _decode_batch(runtime, rows)
    room = threading.Semaphore(DEPTH)
    compute_s: list[float] = []
    problems: list[str] = []

    def receive(result: BatchResult) -> None:
        if result.failed or not result.finite.all():
            problems.append("a batch failed")
        compute_s.append(result.compute_s)
        room.release()

    def run(seconds: float, batches: int) -> tuple[int, float]:
        compute_s.clear()
        begin_s, submitted = time.perf_counter(), 0
        while submitted < batches and time.perf_counter() - begin_s < seconds:
            room.acquire()
            runtime.engine.submit(batch, receive)
            submitted += 1
        for _ in range(DEPTH):
            room.acquire()
        took_s = time.perf_counter() - begin_s
        for _ in range(DEPTH):
            room.release()
        return submitted, took_s

    run(60.0, WARM_UP)
    batches, took_s = run(size.throughput_s, 10**9)
    if problems:
        raise RuntimeError(f"engine: {problems[0]}")
    return batches * rows / took_s, min(1.0, sum(compute_s) / took_s)


def _decode_batch(runtime: Runtime, rows: int) -> StepBatch:
    """A batch of decode rows on lines of their own; the same one may be computed again and again."""
    control = np.zeros((7, rows + 1), np.int32)
    control[0] = np.arange(rows + 1)
    control[1, :rows] = control[2, :rows] = np.arange(1, rows + 1)
    control[3, :rows] = 1
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((rows, runtime.model.hidden_size), dtype=np.float32).astype(runtime.model.numpy_dtype)
    return StepBatch(0, control, rows, (hidden,), None)
