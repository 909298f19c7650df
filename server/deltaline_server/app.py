"""The server as a whole: wiring, start, leases, drain and stop.

Life: start (load, listen, ready) -> serve -> drain -> stop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.internal import api_implementation

from deltaline import link
from deltaline_server.config import Config
from deltaline_server.front import adapter_service, layer_service
from deltaline_server.front.adapter_service import AdapterService
from deltaline_server.front.admin_service import AdminService
from deltaline_server.front.ends.processes import FrontEndError, FrontEnds
from deltaline_server.front.grpc_port import MESSAGE_SLACK_BYTES, SERVICES, grpc_options, reflection_handler
from deltaline_server.front.health import Health
from deltaline_server.front.identity import Identity
from deltaline_server.front.interceptor import Interceptor
from deltaline_server.front.layer_service import LayerService
from deltaline_server.front.link.connection import Served
from deltaline_server.front.link.held import Held, most_bytes
from deltaline_server.front.link.listener import Listener
from deltaline_server.front.link.methods import Methods
from deltaline_server.front.port.descriptors import DescriptorError, connections
from deltaline_server.front.port.gate import Gate
from deltaline_server.front.states.state_service import StateService
from deltaline_server.front.trust.principals import open_principals
from deltaline_server.front.trust.refusals import Refusals
from deltaline_server.front.trust.tls import Tls
from deltaline_server.front.trust.turns import Turns
from deltaline_server.log import Progress, event, told
from deltaline_server.ports import PortError, bind_grpc, bind_http, bind_link, open_tls, ways_in
from deltaline_server.ranks.place import Place
from deltaline_server.runtime import LEASE_TICK_S, Runtime
from deltaline_server.telemetry.audit import AuditError, open_audit
from deltaline_server.telemetry.collector import begin_tracing, end_tracing
from deltaline_server.telemetry.gauges import add_gauges
from deltaline_server.telemetry.http_port import MAX_CONNECTIONS, HttpPort
from deltaline_server.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)

# Time for replies that are ready to leave when the server stops.
STOP_GRACE_S = 2.0
# A device thread that has not taken a turn for so long is stuck. Compiling kernels on first use takes less.
STUCK_S = 120.0
WATCH_TICK_S = 0.05
# How often files that may change are looked at.
RELOAD_TICK_S = 1.0


class StartError(RuntimeError):
    """The server can't start; the message is one line for the operator."""


class Server:
    """One server: `async with Server(config) as server` starts it, and stops it at the end of the block.

    Attributes: has_started, true once clients may come, a moment before it is ready. Once started: port and
    metrics_port (0 when there is none) as bound, address of gRPC, identity, link, principals, runtime, metrics.
    """

    def __init__(
        self,
        config: Config,
        place: Place | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """place: rank 0's; None where there are no ranks. loaded: called when all is, before anyone is served."""
        self.config, self._place = config, place
        self.port = self.metrics_port = 0
        self.address = ""
        self._clock, self._loaded = clock, loaded
        self._message_bytes = config.inline_limit_bytes + MESSAGE_SLACK_BYTES
        self.metrics, self.identity = Metrics(SERVICES), Identity()
        self.gate = Gate()
        self._http: HttpPort | None = None
        self._tls: Tls | None = None
        self.link = Listener(None)
        self.front_ends = FrontEnds(clock)
        self.has_started = self._is_ready = self._is_interrupted = self._has_failed = False
        self._over = asyncio.Event()
        self._grace_s = STOP_GRACE_S
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, load, serve. Returns once the server is ready.

        Raises: StartError, ConfigError, ModelError; then nothing is left behind.
        """
        if api_implementation.Type() != "upb":
            raise StartError(f"protobuf: expected its upb implementation, got {api_implementation.Type()}")
        self._tracing = begin_tracing(self.config, self._clock)
        self.principals = open_principals(self.config.principals, self.config.host)
        try:
            self._audit = open_audit(self.config.audit_log, self._clock)
            num_ports = max(1, (self.config.uds is not None) + (not self.config.front_ends))
            num_connections = connections(num_ports, MAX_CONNECTIONS if self.config.metrics_port >= 0 else 0)
        except (AuditError, DescriptorError) as error:
            raise StartError(str(error)) from error
        self._refusals, self._turns = Refusals(self._clock), Turns(self._clock)
        interceptor = Interceptor(
            self.metrics,
            self.principals,
            self._tracing,
            self.gate,
            self._audit,
            self._refusals,
            self.identity,
            self._turns,
            self.config.max_sequences,
        )
        options = grpc_options(self._message_bytes, connections=num_connections, max_age_s=self.config.max_age_s)
        self._server = grpc.aio.server(interceptors=[interceptor], options=options)
        runtime: Runtime | None = None
        try:
            self._listen()
            self.runtime = runtime = await self._load()
            runtime.engine.start()
            await self._prepare(runtime)
            served = self._register(runtime, interceptor)
            await self._server.start()
        except BaseException:
            await self._server.stop(None)
            await asyncio.gather(self.link.stop(0.0), self.front_ends.stop(0.0))
            if runtime is not None:
                await runtime.close()
            await self._close_telemetry()
            raise
        self._loaded()
        self.has_started = True
        self._tasks = [
            asyncio.create_task(self._every(LEASE_TICK_S, runtime.reap), name="leases"),
            asyncio.create_task(self._every(WATCH_TICK_S, self._watch), name="watch"),
            asyncio.create_task(self._every(RELOAD_TICK_S, self.principals.reload), name="principals"),
        ]
        try:
            await self._start_front_ends(served)
        except BaseException:
            await self.stop()
            raise
        self._is_ready = True
        local = {"name": self.identity.name or "none"} | ways_in(self.config, self.link, self.principals)
        event(_log, "ready", address=self.address, metrics_port=self.metrics_port, **local)

    async def _start_front_ends(self, served: Served) -> None:
        """Start them, unless it is over meanwhile: clients of the first may drain it. Raises StartError."""
        starting = asyncio.create_task(self.front_ends.start(self.config.front_ends, served, self._front_end()))
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((starting, over), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
        except FrontEndError as error:
            raise StartError(f"--front-ends: {error}") from error
        finally:
            over.cancel()
            starting.cancel()

    def drain(self, timeout_s: float | None = None) -> None:
        """Begin the drain, as Drain.begin; the end of it is that of `wait`."""
        self.runtime.drain.begin(timeout_s)

    def interrupt(self) -> None:
        """What a signal does: the first drains, the second stops at once."""
        if self._is_interrupted:
            event(_log, "stopping at once")
            self._grace_s = 0.0
            self._over.set()
        self._is_interrupted = True
        self.drain()

    async def wait(self) -> int:
        """Wait for the end of a drain or the loss of the device; return the exit code, 0 after a drain."""
        await self._over.wait()
        return int(self._has_failed)

    async def stop(self) -> None:
        """Refuse new calls, let replies leave, finish what the device has, and free everything. Idempotent."""
        self._is_ready = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._health.close()
        self.runtime.scheduler.stop()
        self._layer_service.stepping.end_streams()
        await asyncio.gather(*(one.stop(self._grace_s) for one in (self._server, self.link, self.front_ends)))
        with suppress(TimeoutError):
            await asyncio.wait_for(self.runtime.scheduler.drained(), self._grace_s)
        self.runtime.scheduler.halt()
        self._layer_service.stepping.close()
        # What waits for a rank that is gone waits for ever.
        limit_s = STOP_GRACE_S if self._place is not None and self.runtime.engine.failed() else None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._free(), limit_s)
        await self._close_telemetry()
        event(_log, "stopped")

    async def _free(self) -> None:
        await self._state_service.close()
        await self.runtime.close()

    def _listen(self) -> None:
        """Bind everything that calls come by. Raises StartError."""
        config = self.config
        try:
            self._tls = open_tls(config)
            host, self.port = bind_grpc(config, self._server, self.front_ends, self._tls)
            self.address, self.identity.name = f"{host}:{self.port}", config.name(self.port)
            self.link = bind_link(config, self.port)
            self._http = bind_http(
                config, self.metrics.registry, self._tls, is_live=self._is_live, is_ready=self._takes_work
            )
        except PortError as error:
            raise StartError(str(error)) from error
        self.metrics_port = 0 if self._http is None else self._http.port

    async def _load(self) -> Runtime:
        """Build the runtime in a thread, and say what is going on."""
        config, begin_s, progress = self.config, self._clock(), Progress(self._clock)
        event(
            _log, "loading", model=config.model or config.random_init, layers=config.layers or "all", scope=config.scope
        )
        call_soon = asyncio.get_running_loop().call_soon_threadsafe
        observer = self.metrics if self._tracing is None else self._tracing.observer(self.metrics)
        building = asyncio.to_thread(Runtime.build, config, observer, self._clock, call_soon, progress, self._place)
        runtime = await told(building, _log, "still loading", progress)
        stages: dict[str, Any] = {f"{stage}_s": seconds for stage, seconds in progress.seconds.items()}
        event(
            _log,
            "loaded",
            seconds=self._clock() - begin_s,
            **stages,
            **runtime.figures(),
        )
        return runtime

    async def _prepare(self, runtime: Runtime) -> None:
        """Make the device ready for batches, and say how far it is; find snapshots."""
        await runtime.find_stored(self.principals.number_of, self.identity.name)
        begin_s, progress = self._clock(), Progress(self._clock)
        progress.begin("graphs")
        await told(runtime.prepare(progress.report), _log, "preparing", progress)
        event(_log, "prepared", seconds=self._clock() - begin_s, graphs=progress.done)

    def _front_end(self) -> list[str]:
        """What starts a front end."""
        config = self.config
        options = (self.address, str(self._message_bytes), config.log_level, config.log_format)
        tls = (config.tls_cert or "", config.tls_key or "", config.tls_client_ca or "", str(config.max_age_s or 0))
        return [sys.executable, "-P", "-m", "deltaline_server.front.ends", *options, *tls]

    def _register(self, runtime: Runtime, interceptor: Interceptor) -> Served:
        """Hand the services and gauges to gRPC, to the link and to the metrics; return what the link serves."""
        table, scheduler, info = runtime.table, runtime.scheduler, runtime.info()
        info.link_path, info.link_uid = self.link.path, os.geteuid()
        info.server, self.identity.server_epoch = self.identity.name, table.server_epoch
        self._layer_service = LayerService(
            table=table,
            scheduler=scheduler,
            served=runtime.served(),
            identity=self.identity,
            observer=self.metrics,
            principals=self.principals,
            refusals=self._refusals,
            turns=self._turns,
            clock=self._clock,
            tracing=self._tracing,
            states=runtime.states,
            passage=runtime.passage,
        )
        admin = AdminService(info=info, table=table, scheduler=scheduler, regions=runtime.regions, drain=runtime.drain)
        self._health = Health(
            {"": self._is_live, layer_service.NAME: self._takes_work, adapter_service.NAME: self._takes_adapters}
        )
        adapters = AdapterService(runtime.adapters).handlers()
        own = [self._layer_service.handlers(), adapters, admin.handlers(), self._health.handlers()]
        self._state_service = StateService(
            states=runtime.states,
            passage=runtime.passage,
            table=table,
            served=runtime.served(),
            identity=self.identity,
            guesses=self._layer_service.guesses,
            principals=self.principals,
            mover=runtime.mover,
            settle=scheduler.settle,
            clock=self._clock,
        )
        handlers = (*own, self._state_service.handlers(), reflection_handler())
        self._server.add_generic_rpc_handlers(handlers)
        served = Served(
            find=Methods(handlers, interceptor).find,
            regions=runtime.link_regions,
            held=Held(most_bytes(self.config.queue_bytes)),
            observer=self.metrics,
            server_epoch=table.server_epoch,
            message_bytes=self._message_bytes,
            buffer=memoryview(bytearray(link.MAX_PACKET_BYTES)),
        )
        self.link.serve(served)
        runs = {"version": info.version, "python": platform.python_version(), **info.versions, "device": info.device}
        self.metrics.build_info(runs)
        add_gauges(
            self.metrics,
            table=table,
            snapshots=runtime.states.snapshots,
            scheduler=scheduler,
            regions=runtime.regions,
            link_regions=runtime.link_regions,
            link_connections=lambda: self.link.num_connections,
            counts=runtime.executor.counts,
            adapters=None if runtime.adapters is None else runtime.adapters.registry,
            front_ends=self.front_ends,
            tls=self._tls,
            principals=self.principals,
            unknown_handles=lambda: self._layer_service.guesses.num_unknown,
            tiers=runtime.tiers.by_name,
            moves=runtime.mover,
        )
        return served

    def _is_live(self) -> bool:
        """Whether the device thread takes its turns; a start may take as long as it does."""
        if not self.has_started:
            return True
        return not self.runtime.engine.failed() and self.runtime.engine.heartbeat_s() < STUCK_S

    def _takes_work(self) -> bool:
        return self._is_ready and not self.runtime.table.is_draining and self._is_live()

    def _takes_adapters(self) -> bool:
        return self._takes_work() and self.runtime.adapters is not None

    def _watch(self) -> None:
        """End the server when its device is lost or its scheduler broke, since no later batch can be right, and when
        its drain is over."""
        if self._over.is_set():
            return
        if self.runtime.engine.failed() or self.runtime.scheduler.has_failed:
            what = "the device is lost" if self.runtime.engine.failed() else "the scheduler failed"
            event(_log, what, level=logging.ERROR)
            self._has_failed = True
            self._over.set()
        elif self.runtime.drain.is_over():
            self._over.set()

    async def _close_telemetry(self) -> None:
        if self._http is not None:
            await asyncio.to_thread(self._http.close)
        await end_tracing(self._tracing)
        if self._audit is not None:
            self._audit.close()

    async def _every(self, seconds: float, action: Callable[[], object]) -> None:
        """Call an action again and again; its failure is logged and ends the server."""
        try:
            while True:
                await asyncio.sleep(seconds)
                action()
        except Exception:
            _log.exception("a periodic task failed")
            self._has_failed = True
            self._over.set()
