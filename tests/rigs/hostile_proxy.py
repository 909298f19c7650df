"""A proxy between a client and a server that loses, repeats and delays calls, and single steps of a stream."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio

from deltaline.v1 import layer_service_pb2 as pb

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
TIMEOUT_S = 300.0


class HostileProxy(grpc.GenericRpcHandler):
    """Forwards every call, and every step of a stream in turn.

    fate says what becomes of each: "sent"; "lost" on the way; "unanswered", taken all the same; "doubled", sent a
    second time beside the first, whose reply counts; "late", a reply that takes its time. What is lost of a stream
    breaks it. fates: how many there were of each. steps: those of streams, as they came.
    """

    def __init__(self, server_address: str, fate: Callable[[], str] = lambda: "sent") -> None:
        self._server_address, self._fate = server_address, fate
        self.address = ""
        self.fates: Counter[str] = Counter()
        self.steps: list[pb.StepRequest] = []
        self._strays: set[asyncio.Future[Any]] = set()

    async def __aenter__(self) -> HostileProxy:
        self._channel: Any = grpc.aio.insecure_channel(self._server_address)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.stop(None)
        await asyncio.gather(*self._strays, return_exceptions=True)
        await self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method.endswith("/StepStream"):
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, details.method))
        return grpc.unary_unary_rpc_method_handler(partial(self._call, details.method))

    async def _call(self, method: str, request: bytes, context: Context) -> bytes:
        send = partial(self._channel.unary_unary(method), request, timeout=TIMEOUT_S)
        try:
            return await self._forward(send, send, context)
        except grpc.aio.AioRpcError as error:
            context.set_trailing_metadata(error.trailing_metadata() or ())
            await context.abort(error.code(), error.details() or "")

    async def _stream(self, method: str, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        stream = self._channel.stream_stream(method)()

        async def send(request: bytes) -> bytes:
            await stream.write(request)
            reply: bytes = await stream.read()
            return reply

        try:
            async for request in requests:
                step = pb.StepStreamRequest.FromString(request).step
                self.steps.append(step)
                alone = self._channel.unary_unary(method.replace("StepStream", "Step"))
                again = partial(alone, step.SerializeToString(), timeout=TIMEOUT_S)
                yield await self._forward(partial(send, request), again, context)
        finally:
            stream.cancel()

    async def _forward(
        self, send: Callable[[], Awaitable[bytes]], again: Callable[[], Awaitable[bytes]], context: Context
    ) -> bytes:
        """Send a request, and give its reply; again: sends the same a second time."""
        fate = self._fate()
        self.fates[fate] += 1
        if fate == "lost":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost on the way")
        if fate == "doubled":
            stray = asyncio.ensure_future(again())
            self._strays.add(stray)
            stray.add_done_callback(self._strays.discard)
        reply = await send()
        if fate == "unanswered":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost on the way back")
        if fate == "late":
            await asyncio.sleep(0.01)
        return reply
