"""grpc.health.v1: whether the process lives ("") and whether LayerService takes new work.

Touches no device: liveness is the device thread's heartbeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
from grpc_health.v1 import health_pb2

from deltaline_server.front.interceptor import Context

NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WATCH_TICK_S = 0.25

_Status = health_pb2.HealthCheckResponse


class Health:
    """The health service. `services` maps each service name to what tells whether it serves."""

    def __init__(self, services: dict[str, Callable[[], bool]]) -> None:
        self._services = services
        self._closed = asyncio.Event()

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a grpc.aio server registers."""
        request = health_pb2.HealthCheckRequest.FromString
        response = health_pb2.HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            NAME,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self.check, request, response),
                "Watch": grpc.unary_stream_rpc_method_handler(self.watch, request, response),
            },
        )

    def close(self) -> None:
        """End the watches, so that they don't hold up the server's end."""
        self._closed.set()

    async def check(self, message: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Answer once; NOT_FOUND for an unknown service."""
        if message.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _Status(status=self._status(message.service))

    async def watch(
        self, message: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Answer now and after each change, until the server ends."""
        last = None
        while not self._closed.is_set():
            status = self._status(message.service)
            if status != last:
                last = status
                yield _Status(status=status)
            try:
                await asyncio.wait_for(self._closed.wait(), WATCH_TICK_S)
            except TimeoutError:
                continue

    def _status(self, service: str) -> int:
        is_serving = self._services.get(service)
        if is_serving is None:
            return int(_Status.SERVICE_UNKNOWN)
        return int(_Status.SERVING if is_serving() else _Status.NOT_SERVING)
