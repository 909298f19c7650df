"""The model with everything that keeps and computes its sequences, built from a configuration.

Building reads files and allocates memory on the device: it takes from a second to minutes. Nothing is started.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from deltaline import wire
from deltaline.v1 import admin_service_pb2 as pb
from deltaline.v1 import tensor_pb2
from deltaline_server import __version__
from deltaline_server.adapters.adapters import Adapters
from deltaline_server.adapters.copier import CallSoon
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.computing import Computing, make_limits, spare_lines_of
from deltaline_server.config import Config
from deltaline_server.engine.engine import Engine
from deltaline_server.engine.executor import Executor, Report
from deltaline_server.front.reply_bytes import most_step_bytes
from deltaline_server.front.requests import Served
from deltaline_server.layers.state_pool import StatePool
from deltaline_server.log import Progress
from deltaline_server.memory.pinning import CudaPinning
from deltaline_server.memory.regions import Regions
from deltaline_server.models.config import Scope
from deltaline_server.models.model import Model
from deltaline_server.moving.drain import Drain
from deltaline_server.moving.mover import Mover
from deltaline_server.ranks.place import Place
from deltaline_server.scheduling.observer import Observer
from deltaline_server.scheduling.scheduler import Scheduler
from deltaline_server.snapshots import layout
from deltaline_server.snapshots.moves import STORED_LIMIT
from deltaline_server.snapshots.sequences.in_order import InOrder
from deltaline_server.snapshots.sequences.passage import Passage
from deltaline_server.snapshots.states import States
from deltaline_server.snapshots.tiers import Tiers
from deltaline_server.step import WAYPOINT_TOKENS
from deltaline_server.tables.captured.capture import Capture
from deltaline_server.tables.captured.snapshots import SnapshotTable
from deltaline_server.tables.captured.waypoints import WaypointTable
from deltaline_server.tables.kept_replies import KeptReplies
from deltaline_server.tables.ledger import StepLedger
from deltaline_server.tables.lines import LinePool
from deltaline_server.tables.pages import PagePool
from deltaline_server.tables.sequence_adapters import SequenceAdapters
from deltaline_server.tables.sequences import SequenceTable

MAX_STEPS_IN_FLIGHT = 8
# How often leases are checked, seconds.
LEASE_TICK_S = 1.0
_VERSIONED = ("torch", "triton", "grpcio", "protobuf", "numpy")


@dataclass(frozen=True)
class Runtime:
    """A loaded model, its state, the device thread (not started), the sequences and their scheduler."""

    config: Config
    model: Model
    pool: StatePool
    executor: Executor
    engine: Engine
    table: SequenceTable
    scheduler: Scheduler
    states: States
    passage: Passage
    mover: Mover
    drain: Drain
    regions: Regions
    link_regions: Regions
    """Memory of the local link."""
    adapters: Adapters | None
    """None where the server keeps none."""
    tiers: Tiers

    @classmethod
    def build(
        cls,
        config: Config,
        observer: Observer,
        clock: Callable[[], float],
        call_soon: CallSoon,
        progress: Progress | None = None,
        place: Place | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> Runtime:
        """Load the model, test the kernels on its device and allocate its state. Raises ModelError; LostRankError.

        clock: monotonic seconds. wall_clock: seconds since 1970. call_soon: runs calls on the event loop's thread, from
        any. progress: told the stages, and of the weights how many layers are loaded. place: rank 0's among the ranks
        of a server, None where there are none.
        """
        computing = Computing.load(config, place, progress)
        model, pool, executor, limits = computing.model, computing.pool, computing.executor, computing.limits
        engine = Engine(executor, model.device)
        adapters = Adapters.build(config, model, computing.options, clock, call_soon, computing.adapter_way)
        table = _sequence_table(config, line_pool(config, model, pool, engine), len(model.spans), adapters, clock)
        capture = Capture(table, engine.place_pages)
        snapshots = SnapshotTable(
            table=table,
            capture=capture,
            line_bytes=pool.bytes_per_sequence,
            page_bytes=0 if pool.kv is None else pool.kv.page_bytes,
            fingerprint=model.fingerprint(pool.state_dtype, layout.VERSION),
            lease_tick_s=LEASE_TICK_S,
            clock=clock,
            wall_clock=wall_clock,
            stored_limit=STORED_LIMIT if config.host_state_bytes else 0,
        )
        waypoints = WaypointTable(table, capture, snapshots)
        scheduler = Scheduler(
            table=table, engine=engine, limits=limits, observer=observer, clock=clock, waypoints=waypoints
        )
        if adapters is not None:
            adapters.registry.places.on_copied = scheduler.adapter_wait.copied
        pinning = CudaPinning(model.device) if model.device.type == "cuda" else None
        regions, link_regions = make_regions(config, clock, pinning)
        tiers = Tiers.open(config, model, pool, pinning)
        moves = tiers.moves(model, pool, engine.transfer, snapshots, capture, table.adapters, computing.shared)
        exchange = tiers.exchange(model, pool, moves, snapshots, table.adapters)
        wholes = tiers.wholes(model, moves, table, engine.place_pages, scheduler.reserve_replies)
        in_order = InOrder(table, scheduler)
        states = States(
            table=table, capture=capture, snapshots=snapshots, scheduler=scheduler, in_order=in_order, moves=moves
        )
        passage = Passage(table, in_order, exchange, wholes)
        mover = Mover.of(config, passage, table, tiers.directory, wall_clock)
        drain = Drain(mover, table, scheduler, config.drain_timeout_s, clock)
        return cls(
            config=config,
            model=model,
            pool=pool,
            executor=executor,
            engine=engine,
            table=table,
            scheduler=scheduler,
            states=states,
            passage=passage,
            mover=mover,
            drain=drain,
            regions=regions,
            link_regions=link_regions,
            adapters=adapters,
            tiers=tiers,
        )

    @property
    def device_name(self) -> str:
        """For example "cpu" or "NVIDIA H200"; "2 x NVIDIA H200" where ranks share the model."""
        device, count = self.model.device, self.model.world_size
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return name if count == 1 else f"{count} x {name}"

    async def prepare(self, report: Report) -> None:
        """Let the started engine compile kernels, allocate and capture graphs, so that no batch has to; write no line.

        `report` is called with what is captured, of how much, on the engine's thread. Raises: ModelError.
        """
        try:
            await asyncio.wrap_future(self.engine.prepare(report))
        except Exception as error:
            raise ModelError(f"the first batch failed on this device: {error}") from error

    async def find_stored(self, number_of: Callable[[str], int | None], name: str) -> None:
        """Find the snapshots that an earlier server left in files, and where sequences live that one of this name has
        moved. To be called once, before the first call is taken.

        number_of: a principal's number by its name, None where there can be no such. Raises ModelError.
        """
        try:
            await self.states.find_stored(number_of)
        except OSError as error:
            raise ModelError(f"--state-dir: expected a folder that can be read ({error.strerror})") from error
        if self.mover.records is not None:
            await self.mover.records.load(name)

    def reap(self) -> None:
        """End what has outlived its lease. To be called on the event loop, again and again."""
        self.table.reap()
        self.states.snapshots.reap()
        self.regions.reap()
        self.link_regions.reap()

    async def close(self) -> None:
        """Finish loads and what the device has, then free shared memory. Idempotent."""
        await self.drain.close()
        self.mover.close()
        if self.adapters is not None:
            await self.adapters.close()
        await self.passage.close()
        await self.states.close()
        await asyncio.to_thread(self.engine.close)
        await self.regions.close()
        await self.link_regions.close()
        await self.tiers.close()

    def served(self) -> Served:
        """What requests are read against."""
        return Served(make_limits(self.config), self.model.ends, self.model.numpy_dtype, self.regions)

    def figures(self) -> dict[str, Any]:
        """What a line of the log tells of what was loaded."""
        config, model, pool = self.config, self.model, self.pool
        return {
            "model_type": model.config.model_type,
            "spans": ",".join(f"{span.start}:{span.stop}" for span in model.spans),
            "left_out": model.left_out or "none",
            "streams": model.block_sizes["streams"],
            "device": self.device_name,
            "dtype": model.numpy_dtype.name,
            "max_sequences": config.max_sequences,
            "state_bytes": pool.total_bytes,
            "sequence_state_bytes": pool.bytes_per_sequence,
            "kv_pages": 0 if pool.kv is None else pool.kv.num_pages,
            "kv_page_bytes": 0 if pool.kv is None else pool.kv.page_bytes,
            "max_context": 0 if pool.kv is None else pool.kv.max_context,
            "adapter_bytes": config.adapter_bytes,
            "adapter_slot_bytes": 0 if model.adapters is None else model.adapters.total_bytes,
        }

    def info(self) -> pb.GetServerInfoResponse:
        """The answer of GetServerInfo."""
        config, model = self.config, self.model
        return pb.GetServerInfoResponse(
            server_epoch=self.table.server_epoch,
            version=__version__,
            model_type=model.config.model_type,
            spans=[
                pb.LayerSpan(first=span.start, count=len(span), **ends.streams)
                for span, ends in zip(model.spans, model.ends, strict=True)
            ],
            scope=pb.SCOPE_BLOCK if model.scope is Scope.BLOCK else pb.SCOPE_MIXER,
            hidden_size=model.hidden_size,
            dtype=wire.data_type(model.numpy_dtype),
            state_dtype=_wire_dtype(self.pool.state_dtype),
            max_sequences=config.max_sequences,
            max_draft_tokens=config.max_draft_tokens,
            max_steps_in_flight=MAX_STEPS_IN_FLIGHT,
            inline_limit_bytes=config.inline_limit_bytes,
            default_lease_ms=config.default_lease_ms,
            max_lease_ms=config.max_lease_ms,
            device=self.device_name,
            sequence_state_bytes=self.pool.bytes_per_sequence,
            versions=_versions(),
            shared_memory_bytes=config.shared_memory_bytes,
            adapter_bytes=config.adapter_bytes,
            adapter_slots=0 if self.adapters is None else self.adapters.registry.places.num_places,
            max_adapter_rank=0 if self.adapters is None else config.max_adapter_rank,
            kv_pages=0 if self.pool.kv is None else self.pool.kv.num_pages,
            kv_page_tokens=0 if self.pool.kv is None else self.pool.kv.page_size,
            kv_page_bytes=0 if self.pool.kv is None else self.pool.kv.page_bytes,
            max_context=0 if self.pool.kv is None else self.pool.kv.max_context,
            serves_state=True,
            snapshot_lines=config.snapshot_lines_beside(config.max_sequences),
            waypoint_tokens=WAYPOINT_TOKENS,
            max_reply_bytes=most_step_bytes(config.inline_limit_bytes),
        )


def make_regions(config: Config, clock: Callable[[], float], pinning: CudaPinning | None) -> tuple[Regions, Regions]:
    """The shared memory beside gRPC, and that of the local link, which ends with its connections."""
    regions = Regions(
        limit_bytes=config.shared_memory_bytes,
        default_lease_s=config.default_lease_ms / 1000,
        max_lease_s=config.max_lease_ms / 1000,
        clock=clock,
        pinning=pinning,
    )
    link_regions = Regions(
        limit_bytes=config.link_memory_bytes,
        default_lease_s=math.inf,
        max_lease_s=math.inf,
        clock=clock,
        pinning=pinning,
        beside=regions,
    )
    return regions, link_regions


def line_pool(config: Config, model: Model, pool: StatePool, engine: Engine) -> LinePool:
    """What hands out the lines of a pool, and their pages."""
    snapshot_lines, spare_lines = config.snapshot_lines_beside(config.max_sequences), spare_lines_of(config)
    return LinePool(pool.num_lines, engine.zero_lines, page_pool(model, pool), snapshot_lines, spare_lines)


def _sequence_table(
    config: Config, lines: LinePool, num_spans: int, adapters: Adapters | None, clock: Callable[[], float]
) -> SequenceTable:
    """The sequences of a server, with the books of their steps; none is open."""
    return SequenceTable(
        lines=lines,
        ledger=StepLedger(num_spans, config.max_sequences, MAX_STEPS_IN_FLIGHT),
        replies=KeptReplies(num_spans, config.max_sequences, config.reply_bytes),
        adapters=SequenceAdapters(config.max_sequences, None if adapters is None else adapters.registry),
        num_slots=config.max_sequences,
        default_lease_s=config.default_lease_ms / 1000,
        max_lease_s=config.max_lease_ms / 1000,
        lease_tick_s=LEASE_TICK_S,
        clock=clock,
    )


def page_pool(model: Model, pool: StatePool) -> PagePool | None:
    """What hands out the pages of a pool, None where it has none."""
    if pool.kv is None:
        return None
    kv = pool.kv
    return PagePool(
        num_pages=kv.num_pages,
        page_size=kv.page_size,
        max_context=kv.max_context,
        num_lines=pool.num_lines,
        spans=model.paged_spans,
    )


def _wire_dtype(dtype: torch.dtype) -> tensor_pb2.DataType.ValueType:
    return tensor_pb2.DATA_TYPE_BFLOAT16 if dtype is torch.bfloat16 else tensor_pb2.DATA_TYPE_FLOAT32


def _versions() -> dict[str, str]:
    """Versions of what computes and serves."""
    found = {}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # triton is not installed everywhere
            continue
    return found
