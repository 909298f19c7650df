"""An engine with a model, its state and adapters, on a device: what it makes of batches, as values and as bits."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rigs.adapter_cases import fill_slots, random_adapter
from rigs.limits import make_limits
from rigs.line_batches import CHUNK, MAX_DRAFT, NUM_LINES, WAIT_S

from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.computing import make_executor
from deltaline_server.engine.engine import Engine
from deltaline_server.engine.executor import Executor
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.model import AdapterOptions, Model, ModelOptions, load_model

NUM_SLOTS, MAX_RANK = 7, 16


class Side:
    """An engine with its model and state, on a device; with adapter slots 0 .. 4 full, or without slots."""

    def __init__(self, config: Path, device: str, has_adapters: bool = True) -> None:
        options = ModelOptions(
            torch.device(device),
            random_init=config,
            dtype=torch.bfloat16,
            spans=(range(2), range(2, 3)),
            adapters=AdapterOptions(NUM_SLOTS, MAX_RANK) if has_adapters else None,
        )
        self.model: Model = load_model(options)
        pool = self.model.make_pool(StateOptions(NUM_LINES, MAX_DRAFT))
        self.executor: Executor = make_executor(
            self.model, pool, make_limits(short_rows=NUM_LINES, long_rows=2, chunk_tokens=CHUNK)
        )
        self.engine = Engine(self.executor, self.model.device)
        self.engine.start()
        self.engine.prepare(lambda done, total: None).result(WAIT_S)
        if has_adapters:
            self.fill({slot: slot for slot in range(5)})

    def fill(self, seeds: dict[int, int]) -> None:
        """Copy the adapters of some seeds to slots."""
        assert self.model.adapters is not None
        made = {
            slot: random_adapter(self.model.layout, seed, MAX_RANK, dora=seed % 2 > 0) for slot, seed in seeds.items()
        }
        fill_slots(self.model.adapters, made)

    def run(self, batches: Sequence[StepBatch]) -> list[BatchResult]:
        """Submit all batches at once; return the results in their order."""
        done: queue.SimpleQueue[BatchResult] = queue.SimpleQueue()
        for batch in batches:
            self.engine.submit(batch, done.put)
        results = [done.get(timeout=WAIT_S) for _ in batches]
        assert not any(result.failed for result in results)
        return results

    def forget(self) -> None:
        """Begin with fresh lines."""
        self.engine.zero_lines(np.arange(1, NUM_LINES + 1))


def with_adapters(batch: StepBatch, rng: np.random.Generator, slots: Sequence[int]) -> StepBatch:
    """The batch with adapters of these slots, -1 for none."""
    num_rows = batch.control.shape[1] - 1
    return replace(batch, adapter_places=rng.choice(np.array(slots, dtype=np.int32), num_rows))


def values(result: BatchResult) -> NDArray[np.float32]:
    return result.hidden.astype(np.float32)


def bits(result: BatchResult) -> NDArray[np.uint16]:
    return result.hidden.view(np.uint16)
