"""AdminService: what is served, how full the server is, shared memory, and the drain."""

from __future__ import annotations

import grpc

from deltaline.v1 import admin_service_pb2 as pb
from deltaline_server.errors import Reason, RequestError
from deltaline_server.front.interceptor import Context
from deltaline_server.front.trust.principals import current_principal
from deltaline_server.memory.regions import Regions
from deltaline_server.moving.drain import Drain
from deltaline_server.scheduling.scheduler import Scheduler
from deltaline_server.tables.sequences import SequenceTable

NAME = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
MAX_DRAIN_MS = 24 * 3600 * 1000


class AdminService:
    """The handlers of AdminService. They take parsed messages and return serialised replies."""

    def __init__(
        self,
        *,
        info: pb.GetServerInfoResponse,
        table: SequenceTable,
        scheduler: Scheduler,
        regions: Regions,
        drain: Drain,
    ) -> None:
        self._info = info.SerializeToString()
        self._table, self._scheduler, self._regions, self._drain = table, scheduler, regions, drain

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a grpc.aio server registers."""
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            NAME,
            {
                "GetServerInfo": unary(self.get_server_info, pb.GetServerInfoRequest.FromString),
                "GetLoad": unary(self.get_load, pb.GetLoadRequest.FromString),
                "CreateSharedMemory": unary(self.create_shared_memory, pb.CreateSharedMemoryRequest.FromString),
                "ReleaseSharedMemory": unary(self.release_shared_memory, pb.ReleaseSharedMemoryRequest.FromString),
                "Drain": unary(self.drain, pb.DrainRequest.FromString),
            },
        )

    async def get_server_info(self, message: pb.GetServerInfoRequest, context: Context) -> bytes:
        """Tell what is served."""
        return self._info

    async def get_load(self, message: pb.GetLoadRequest, context: Context) -> bytes:
        """Tell how full the server is."""
        load, pages = self._scheduler.load(), self._table.pages
        return pb.GetLoadResponse(
            sequences_open=self._table.num_open,
            lines_used=self._table.num_lines_used,
            lines_total=self._table.num_lines,
            queued_rows=load.queued_rows,
            queued_rows_limit=load.queued_rows_limit,
            queued_bytes=load.queued_bytes,
            queued_bytes_limit=load.queued_bytes_limit,
            reply_bytes=load.reply_bytes,
            reply_bytes_limit=load.reply_bytes_limit,
            draining=self._table.is_draining,
            kv_pages_used=0 if pages is None else pages.num_used,
            kv_pages_total=0 if pages is None else pages.num_pages,
        ).SerializeToString()

    async def create_shared_memory(self, message: pb.CreateSharedMemoryRequest, context: Context) -> bytes:
        """Make a region."""
        lease_s = message.lease_ms / 1000 if message.lease_ms else None
        principal = current_principal()
        region = await self._regions.create(message.size_bytes, lease_s, principal.number, principal.quotas)
        return pb.CreateSharedMemoryResponse(
            region=region.id,
            name=region.name,
            size_bytes=len(region.memory),
            lease_ms=round(region.lease_s * 1000),
            nonce=region.nonce,
        ).SerializeToString()

    async def release_shared_memory(self, message: pb.ReleaseSharedMemoryRequest, context: Context) -> bytes:
        """End a region."""
        self._regions.release(message.region, (current_principal().number, context.peer()))
        return pb.ReleaseSharedMemoryResponse().SerializeToString()

    async def drain(self, message: pb.DrainRequest, context: Context) -> bytes:
        """Begin the drain."""
        if message.timeout_ms > MAX_DRAIN_MS:
            raise RequestError(
                Reason.INVALID_REQUEST,
                f"timeout_ms: must be in 0 .. {MAX_DRAIN_MS}, got {message.timeout_ms}",
                field="timeout_ms",
            )
        if message.target:
            await self._drain.check(message.target)
        self._drain.begin(message.timeout_ms / 1000 if message.timeout_ms else None, message.target)
        return pb.DrainResponse(sequences_open=self._table.num_open).SerializeToString()
