"""The model as a server has it, built by what builds a server's, and its batches.

The one place of this package that knows how batches are computed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from deltaline_bench.model.shapes import Shape
from deltaline_kernels.rows import NUM_FIELDS
from deltaline_server.batch import StepBatch
from deltaline_server.computing import (
    make_executor,
    make_limits,
    model_options,
    state_options,
)
from deltaline_server.config import Config
from deltaline_server.engine.executor import Executor
from deltaline_server.engine.graphs import buckets_of
from deltaline_server.layers.state_pool import StateOptions, StatePool, plan_state
from deltaline_server.log import Progress
from deltaline_server.models.kernel_check import self_test
from deltaline_server.models.model import Model, load_model
from deltaline_server.step import Limits

WARM_UP = 3


@dataclass(frozen=True)
class ServedModel:
    """A model with its state, and what computes its batches. context: tokens that a row of a decode sees."""

    model: Model
    pool: StatePool
    executor: Executor
    context: int

    @classmethod
    def build(
        cls, shape: Shape, rows: Sequence[int], tokens: int, progress: Progress, *, all_graphs: bool = False
    ) -> ServedModel:
        """Build what decodes of so many rows and a prefill of so many tokens need. Raises ModelError.

        progress: told what a server's is. all_graphs: capture all graphs that a server has, not only those that are
        measured.
        """
        config = server_config(shape, rows, tokens)
        progress.begin("weights")
        model = load_model(model_options(config), progress.report)
        options = state_options(config)
        progress.begin("kernels")
        self_test(model, options)
        progress.begin("state")
        pool = model.make_pool(_few_pages(model, options))
        limits = make_limits(config)
        executor = make_executor(model, pool, limits) if all_graphs else _few_graphs(model, pool, limits, rows, tokens)
        progress.begin("graphs")
        with torch.inference_mode():
            executor.prepare(progress.report)
        progress.end()
        return cls(model, pool, executor, 0 if pool.kv is None else config.page_size)

    def decode(self, rows: int) -> StepBatch:
        """A decode of so many rows, each on a line of its own and the last token of a page of its own."""
        control = np.zeros((NUM_FIELDS, rows + 1), np.int32)
        control[0] = np.arange(rows + 1)
        control[1:3, :rows] = np.arange(1, rows + 1)
        control[3, :rows] = 1
        control[6, :rows] = max(self.context - 1, 0)
        return self._batch(control, rows)

    def prefill(self, tokens: int) -> StepBatch:
        """The first tokens of one sequence."""
        control = np.zeros((NUM_FIELDS, 2), np.int32)
        control[0, 1] = tokens
        control[2, 0], control[3, 0] = 1, tokens
        return self._batch(control, 0)

    @torch.inference_mode()
    def compute(self, batch: StepBatch) -> float:
        """Compute a batch and return the seconds that it took on the device. Raises RuntimeError where outputs are not
        finite."""
        result = self.executor.launch(batch).result()
        if not result.finite.all():
            raise RuntimeError("a batch: expected finite outputs, got others")
        return result.compute_s

    def measure(self, batch: StepBatch, rounds: int) -> float:
        """The median seconds of computation. Raises as `compute`."""
        return statistics.median([self.compute(batch) for _ in range(WARM_UP + rounds)][WARM_UP:])

    def _batch(self, control: NDArray[np.int32], num_short: int) -> StepBatch:
        tokens, model = int(control[0, -1]), self.model
        hidden = np.random.default_rng(0).standard_normal((tokens, model.hidden_size), dtype=np.float32)
        batch = StepBatch(0, control, num_short, (hidden.astype(model.numpy_dtype),), None)
        if self.pool.kv is None:
            return batch
        # Each row has pages behind those of the rows before it.
        lines, ends = control[2, :-1], control[6, :-1] + np.diff(control[0])
        counts = -(-ends // self.pool.kv.page_size)
        places = np.concatenate([np.arange(count) for count in counts])
        new_pages = np.stack((np.repeat(lines, counts), places, np.arange(1, len(places) + 1))).astype(np.int32)
        return replace(batch, new_pages=new_pages)


def server_config(shape: Shape, rows: Sequence[int], tokens: int) -> Config:
    """The configuration of a server of a model for batches of up to so many rows, and of so many tokens."""
    return Config(
        model=str(shape.path) if shape.is_checkpoint else None,
        random_init=None if shape.is_checkpoint else str(shape.path),
        layers=None if shape.num_layers is None else f"0:{shape.num_layers}",
        max_sequences=max(rows),
        snapshot_lines=0,
        batch_rows=max(rows),
        chunk_tokens=tokens,
        max_context=tokens,
        metrics_port=-1,
    )


def _few_graphs(model: Model, pool: StatePool, limits: Limits, rows: Sequence[int], tokens: int) -> Executor:
    """What computes decodes of so many rows, and one row of so many tokens, and nothing else on a GPU."""
    if model.device.type == "cpu":
        return make_executor(model, pool, limits)
    from deltaline_server.engine.cuda_executor import CudaExecutor  # it needs triton

    buckets, sizes = (
        buckets_of(model, pool, limits),
        [*((count, 0, count, 1, 1) for count in rows), (0, 1, tokens, 0, tokens)],
    )
    wanted = {next(bucket for bucket in buckets if bucket.holds(*size)) for size in sizes}
    return CudaExecutor(model, pool, [bucket for bucket in buckets if bucket in wanted])


def _few_pages(model: Model, options: StateOptions) -> StateOptions:
    """The state with no more pages than the batches need."""
    plan = plan_state(model.shapes, options, model.dtype)
    if plan.kv is None:
        return options
    needed = options.num_lines + plan.kv.max_pages
    spare = max(plan.kv.num_pages - needed, 0)
    return replace(options, limit_bytes=plan.total_bytes - spare * plan.kv.page_bytes)
