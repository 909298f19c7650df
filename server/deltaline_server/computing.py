"""What computes batches in one process, built from a configuration: a model or a rank's share of one, its state, and
its device.

Building reads files and allocates memory on the device: it takes from a second to minutes.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from deltaline_server import __version__
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.config import Config
from deltaline_server.engine.executor import CpuExecutor, Executor
from deltaline_server.engine.graphs import buckets_of
from deltaline_server.engine.rank_executor import LeadingExecutor
from deltaline_server.layers.state_pool import StateOptions, StatePool
from deltaline_server.layers.streams import StreamEnds
from deltaline_server.log import Progress
from deltaline_server.models.config import Scope
from deltaline_server.models.kernel_check import self_test
from deltaline_server.models.model import AdapterOptions, Model, ModelOptions, check_model, load_model
from deltaline_server.models.servable import Auto
from deltaline_server.ranks.group import Group, GroupError, LostRankError
from deltaline_server.ranks.place import Place
from deltaline_server.ranks.ways import Ranks, Ways
from deltaline_server.snapshots import layout
from deltaline_server.snapshots.tiers import Shared
from deltaline_server.step import Limits

# Long rows of a batch. Each has to be large for its kernels to be fast.
MAX_LONG_ROWS = 8
# How long a server over ranks has to end once one of them is gone, in which callers are told. Threads may wait for ever
# for a device that waits for what that rank sends.
END_S = 3.5


@dataclass(frozen=True)
class Computing:
    """A loaded model, its state, and what computes it.

    options: what the model was loaded with. limits: of batches. executor: of all ranks on rank 0, else of this one.
    """

    options: ModelOptions
    limits: Limits
    model: Model
    pool: StatePool
    executor: Executor
    ways: Ways | None = None
    """To the other ranks; None where there are none."""

    @classmethod
    def load(cls, config: Config, place: Place | None, progress: Progress | None = None) -> Self:
        """Load the model, test the kernels on its device and allocate its state. Raises ModelError; LostRankError.

        From then on fp32 products are full fp32 (no TF32) in this process, whatever rank it is.

        place: among ranks, None where the process is a server by itself. progress: told the stages, and of the weights
        how many layers are loaded.
        """
        progress = progress or Progress()
        options = model_options(config, place)
        if place is None or place.world_size == 1:
            return cls._load(config, options, progress)
        check(config, place)
        group = Group(place, options.device)
        try:
            loaded = cls._load(config, replace(options, ranks=group.ranks), progress)
        except Exception as error:
            # Of a fault its own log has the text, which may be of many lines and say anything.
            why = str(error) if isinstance(error, ModelError) else f"it failed to load ({type(error).__name__})"
            with suppress(LostRankError):  # or this rank's own reason would not be told
                group.fail(why)
            raise
        try:
            group.agree(loaded.identity() | {"way of adding": group.ranks.way})
        except GroupError as error:
            raise ModelError(str(error)) from error
        ways = Ways.open(group.ranks)
        if place.rank:
            return replace(loaded, ways=ways)
        return replace(loaded, ways=ways, executor=LeadingExecutor(loaded.executor, ways, _end_in_time))

    @classmethod
    def _load(cls, config: Config, options: ModelOptions, progress: Progress) -> Self:
        """The same, of this process alone."""
        torch.set_float32_matmul_precision("highest")
        if config.threads:
            torch.set_num_threads(config.threads)
        check_adapter_memory(options)
        progress.begin("weights")
        model = load_model(options, progress.report)
        state, limits = state_options(config), make_limits(config)
        progress.begin("kernels")
        self_test(model, state)
        progress.begin("state")
        pool = model.make_pool(state)
        executor = make_executor(model, pool, limits)
        progress.end()
        return cls(options, limits, model, pool, executor)

    @property
    def shared(self) -> Shared | None:
        """By what rank 0 has states gathered and scattered on all ranks; None where there are none."""
        if self.ways is None or not isinstance(self.executor, LeadingExecutor):
            return None
        return self.ways.states, self.executor.tell_transfer

    @property
    def adapter_way(self) -> Ranks | None:
        """To the other ranks' places of adapters; None where there are none."""
        return None if self.ways is None else self.ways.adapters

    def identity(self) -> dict[str, str]:
        """What has to be the same on all ranks, by name: weights, what is computed of them, and what computes it."""
        pool, adapters = self.pool, self.options.adapters
        kv = None if pool.kv is None else (pool.kv.num_pages, pool.kv.page_size, pool.kv.max_context)
        return {
            "model and weights": self.model.fingerprint(pool.state_dtype, layout.VERSION).hex()[:16],
            "limits of batches": str(self.limits),
            "lines, drafts and pages": str((pool.num_lines, pool.max_draft, kv)),
            "adapter places": str(adapters),
            "ends of streams": self.options.stream_ends.value,
            "layers that are computed before graphs are captured": str(self.model.distinct(pool)),
            "versions": f"deltaline {__version__}, torch {torch.__version__}",
        }


def _end_in_time() -> None:
    """End this process where it has not ended by itself: its event loop may wait for the rank that is gone."""
    timer = threading.Timer(END_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def make_executor(model: Model, pool: StatePool, limits: Limits) -> Executor:
    """Make what computes batches within the limits on the model's device."""
    if model.device.type == "cpu":
        return CpuExecutor(model, pool)
    from deltaline_server.engine.cuda_executor import CudaExecutor  # it needs triton, which is installed on Linux alone

    return CudaExecutor(model, pool, buckets_of(model, pool, limits))


def check_adapter_memory(options: ModelOptions) -> None:
    """Raise ModelError unless a GPU has room for the adapters; allocate nothing."""
    if options.adapters is not None and options.device.type == "cuda":
        needed, (free, _) = check_model(options), torch.cuda.mem_get_info(options.device)
        if needed > free:
            raise ModelError(f"--adapter-slots, --max-adapter-rank: expected at most {free} bytes, got {needed}")


def check(config: Config, place: Place | None = None) -> None:
    """Judge the model's files and its state's size as `Computing.load` does; allocate nothing. Raises ModelError."""
    check_model(model_options(config, place), state_options(config))


def make_limits(config: Config) -> Limits:
    """The bounds of requests, of the queue and of batches."""
    return Limits(
        max_sequences=config.max_sequences,
        max_draft_tokens=config.max_draft_tokens,
        max_lease_ms=config.max_lease_ms,
        inline_limit_bytes=config.inline_limit_bytes,
        queue_rows=config.queue_rows,
        queue_bytes=config.queue_bytes,
        chunk_tokens=config.chunk_tokens,
        short_rows=min(config.batch_rows, config.max_sequences),
        long_rows=min(MAX_LONG_ROWS, config.max_sequences),
    )


def device_type(config: Config) -> str:
    """What a server with these options computes on, "cuda" or "cpu"; where the options say it, none is looked for."""
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_of(config: Config, place: Place | None = None) -> torch.device:
    """What the process computes on. Raises ModelError when there is no such device."""
    if device_type(config) == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelError("--device: expected a CUDA device, found none")
    needed, found = config.tensor_parallel if place is None else place.local_size, torch.cuda.device_count()
    if needed > found:
        raise ModelError(f"--tensor-parallel: expected at most {found}, the GPUs of this host, got {needed}")
    return torch.device("cuda") if place is None else torch.device("cuda", place.local_rank)


def model_options(config: Config, place: Place | None = None, device: torch.device | None = None) -> ModelOptions:
    """What the model module is asked to load; of what ranks share, rank 0's.

    device: None for what the process computes on; then raises ModelError as `device_of`.
    """
    return ModelOptions(
        device=device or device_of(config, place),
        model=None if config.model is None else Path(config.model),
        random_init=None if config.random_init is None else Path(config.random_init),
        seed=config.seed,
        layers=config.layer_range,
        spans=Auto.AUTO if config.finds_spans else config.span_ranges,
        scope=Scope(config.scope),
        dtype=None if config.dtype == "auto" else getattr(torch, config.dtype),
        adapters=AdapterOptions(config.adapter_slots, config.max_adapter_rank) if config.adapter_bytes else None,
        max_context=config.max_context,
        stream_ends=StreamEnds(config.stream_ends),
        rank=0 if place is None else place.rank,
        world_size=config.tensor_parallel if place is None else place.world_size,
    )


def state_options(config: Config) -> StateOptions:
    """How much state the model is given."""
    return StateOptions(
        num_lines=config.max_sequences,
        snapshot_lines=config.snapshot_lines_beside(config.max_sequences) + spare_lines_of(config),
        max_draft=config.max_draft_tokens,
        state_dtype=getattr(torch, config.state_dtype),
        limit_bytes=config.state_bytes,
        page_size=config.page_size,
    )


def spare_lines_of(config: Config) -> int:
    """Lines that stand in for those of snapshots which are being copied to host memory, one at a time."""
    return int(config.host_state_bytes > 0)
