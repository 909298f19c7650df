"""What a front end does with a call: its messages go to the core as they are, and what comes back to the client."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.rpc import code_pb2, error_details_pb2, status_pb2

from deltaline import link
from deltaline.conversation import LinkCall
from deltaline.link_socket import LinkSocket
from deltaline_server.front.link.held import Held
from deltaline_server.front.trust.peer import Peer

# Replies that clients are slow to read, all together: beyond it the call that has most of them is ended.
HELD_BYTES = 256 * 2**20
# What a stream may send ahead of what the core's handler has taken: more than the small messages that the core takes
# before it says so.
AHEAD_BYTES = link.STREAM_MESSAGES // 2 * link.MAX_PACKET_BYTES

_log = logging.getLogger(__name__)
_DETAILS, _PUSHBACK = "grpc-status-details-bin", "grpc-retry-pushback-ms"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Forward(grpc.GenericRpcHandler):
    """Handles the methods of services by forwarding them; parses nothing."""

    def __init__(self, core: LinkSocket[status_pb2.Status], services: Iterable[ServiceDescriptor]) -> None:
        self._core, self._held = core, Held(HELD_BYTES)
        self._handlers = {
            path: self._handler(path, method)
            for service in services
            for method in service.methods
            for path in [f"/{service.full_name}/{method.name}"]
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method, None for an unknown one."""
        return self._handlers.get(handler_call_details.method)

    def _handler(self, path: str, method: MethodDescriptor) -> Any:
        # Not by a lambda: gRPC looks what kind of function it is.
        one = partial(self._one, path, method.client_streaming)
        many = partial(self._many, path, method.client_streaming)
        if method.client_streaming:
            if method.server_streaming:
                return grpc.stream_stream_rpc_method_handler(many)
            return grpc.stream_unary_rpc_method_handler(one)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(many)
        return grpc.unary_unary_rpc_method_handler(one)

    async def _one(self, path: str, is_stream: bool, body: Any, context: Any) -> bytes:
        """A call with one reply. body: its message, or gRPC's iterator of a stream of them."""
        async with self._begun(path, is_stream, body, context) as call:
            del body
            return await call.reply() or b""
        raise AssertionError("abort() raises")

    async def _many(self, path: str, is_stream: bool, body: Any, context: Any) -> AsyncIterator[bytes]:
        """A call with many replies."""
        async with self._begun(path, is_stream, body, context) as call:
            del body
            while (reply := await call.reply()) is not None:
                yield reply  # goes on when gRPC has taken it
                call.given(reply)

    @asynccontextmanager
    async def _begun(self, path: str, is_stream: bool, body: Any, context: Any) -> AsyncIterator[_Call]:
        """A call whose messages go to the core; it ends with the block."""
        call, sending = _Call(self._core, self._held, path, context), None
        try:
            if is_stream:
                sending = asyncio.create_task(call.send_all(context))
            else:
                call.send(body, is_last=True)
                del body
            yield call
        except _Ended as ended:
            await _abort(context, ended.status)
        except Exception:
            _log.exception("a call failed")
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the front end failed")
        finally:
            call.close()
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)


class _Ended(Exception):
    """The core ended a call with a status that is not OK."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__()
        self.status = status


class _Call:
    """A call on its way to the core and back."""

    def __init__(self, core: LinkSocket[status_pb2.Status], held: Held, path: str, context: Any) -> None:
        self._core, self._held, self._share = core, held, held.join(self._cut)
        self._replies: deque[bytes | status_pb2.Status | None] = deque()
        self._came = asyncio.Event()
        self._ahead: deque[int] = deque()
        self._read_bytes = 0
        self._call: LinkCall[status_pb2.Status] = core.conversation.begin(
            path,
            self._take,
            self._end,
            timeout_s=context.time_remaining(),
            metadata=tuple(pair for pair in context.invocation_metadata() or () if isinstance(pair[1], str)),
            client=Peer.of(context).packed(),
        )
        if core.conversation.error is not None:
            self._end(core.conversation.error)

    def send(self, body: bytes | None, *, is_last: bool) -> None:
        """Send a message, None for none."""
        self._core.conversation.send(self._call, body, is_last=is_last)
        self._core.flush()

    async def send_all(self, context: Any) -> None:
        """Send what the client sends, as fast as the core takes it."""
        while (body := await context.read()) is not grpc.aio.EOF:
            self._ahead.append(len(body))
            self.send(body, is_last=False)
            del body
            while not self._call.is_over and self._is_ahead():
                await self._core.until_moved()
        self.send(None, is_last=True)

    def _is_ahead(self) -> bool:
        """Whether the client has to wait."""
        num_waiting = len(self._call.outbox) + link.STREAM_MESSAGES - self._call.credit
        while len(self._ahead) > num_waiting:
            self._ahead.popleft()
        return bool(self._call.outbox) or sum(self._ahead) >= AHEAD_BYTES

    async def reply(self) -> bytes | None:
        """The next reply, None behind the last. Raises _Ended."""
        while not self._replies:
            self._came.clear()
            await self._came.wait()
        reply = self._replies.popleft()
        if isinstance(reply, status_pb2.Status):
            raise _Ended(reply)
        return reply

    def given(self, reply: bytes) -> None:
        """The client has taken a reply."""
        self._held.give_back(self._share, len(reply))
        self._read_bytes += len(reply)
        if self._read_bytes >= link.UNREAD_BYTES // 2:
            self._core.conversation.took(self._call, self._read_bytes)
            self._core.flush()
            self._read_bytes = 0

    def close(self) -> None:
        """The call is over for the client. Idempotent."""
        self._core.conversation.cancel(self._call)
        self._core.flush()
        self._held.leave(self._share)

    def _take(self, body: bytes) -> None:
        self._replies.append(body)
        self._came.set()
        self._held.take(self._share, len(body))

    def _end(self, status: status_pb2.Status | None) -> None:
        self._replies.append(status)
        self._came.set()

    def _cut(self, why: str) -> None:
        """It holds too much: what its client has not read is dropped."""
        self._core.conversation.cancel(self._call)
        self._replies.clear()
        self._held.leave(self._share)
        self._end(status_pb2.Status(code=code_pb2.UNAVAILABLE, message=why))


async def _abort(context: Any, status: status_pb2.Status) -> None:
    """End a call with a status as the core's own gRPC would. Raises AbortError."""
    trailing: list[tuple[str, str | bytes]] = []
    if status.details:
        trailing.append((_DETAILS, status.SerializeToString()))
    retry = error_details_pb2.RetryInfo()
    if any(detail.Unpack(retry) for detail in status.details):
        trailing.append((_PUSHBACK, str(round(retry.retry_delay.ToNanoseconds() * 1e-6))))
    await context.abort(_CODES[status.code], status.message, tuple(trailing))
