"""What a front end does with a call: its messages go to the core as they are, and what comes back to the client."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, deque
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
from deltaline_server.errors import RequestError
from deltaline_server.front import replies
from deltaline_server.front.ends.reader import Reader
from deltaline_server.front.link.held import Held
from deltaline_server.front.port.gate import Entered, Gate, when_done
from deltaline_server.front.trust.peer import Peer

# Replies that clients are slow to read, all together: beyond it the client that has most of them loses those that wait.
HELD_BYTES = 256 * 2**20
# What a stream may send ahead of what the core's handler has taken: more than the small messages that the core takes
# before it says so.
AHEAD_BYTES = link.STREAM_MESSAGES // 2 * link.MAX_PACKET_BYTES

_log = logging.getLogger(__name__)
_DETAILS, _PUSHBACK = "grpc-status-details-bin", "grpc-retry-pushback-ms"
_FAILED = "the front end failed"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Forward(grpc.GenericRpcHandler):
    """Handles the methods of services by forwarding them; parses nothing.

    refused: how many calls were refused here, by the name of the reason, and not told to the core yet.
    """

    def __init__(self, core: LinkSocket[status_pb2.Status], services: Iterable[ServiceDescriptor], gate: Gate) -> None:
        self._core, self._held, self._gate = core, Held(HELD_BYTES), gate
        self._readers: dict[str, Reader] = {}
        self.refused = Counter[str]()
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
        # A stream of requests to gRPC even where there is one: it is read when there is room for it. Not by a lambda:
        # gRPC looks what kind of function it is.
        if method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(partial(self._many, path, method.client_streaming))
        return grpc.stream_unary_rpc_method_handler(partial(self._one, path, method.client_streaming))

    async def _one(self, path: str, is_stream: bool, _: object, context: Any) -> bytes:
        """A call with one reply."""
        async with self._begun(path, is_stream, context) as call:
            return await call.reply() or b""
        raise AssertionError("abort() raises")

    async def _many(self, path: str, is_stream: bool, _: object, context: Any) -> AsyncIterator[bytes]:
        """A call with many replies."""
        async with self._begun(path, is_stream, context) as call:
            while (reply := await call.reply()) is not None:
                yield reply  # goes on when gRPC has taken it
                call.given(reply)

    @asynccontextmanager
    async def _begun(self, path: str, is_stream: bool, context: Any) -> AsyncIterator[_Call]:
        """A call whose messages go to the core; it ends with the block."""
        call, sending = None, None
        try:
            entered = self._gate.enter(path, context)
            call = self._call(path, context)
            if is_stream:
                sending = asyncio.create_task(call.send_all(context))
                sending.add_done_callback(call.sent_all)
            else:
                await call.send_one(entered, context)
            yield call
        except RequestError as error:
            self.refused[error.refusal.reason.name] += 1
            await _abort(context, replies.status(error.refusal))
        except _Ended as ended:
            await entered.hold(ended.hold_s, ended.status.code)
            await _abort(context, ended.status)
        except (grpc.aio.AbortError, grpc.aio.InternalError):  # ended already, by its client perhaps
            raise
        except MemoryError:
            os.abort()  # as gRPC does: what is left of this process answers nobody in time
        except Exception:
            _log.exception("a call failed")
            await context.abort(grpc.StatusCode.UNAVAILABLE, _FAILED)
        finally:
            if call is not None:
                call.close()
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    def _call(self, path: str, context: Any) -> _Call:
        """A call that begins. What gRPC has of its replies is its client's until gRPC is done with it.

        Raises RequestError REPLIES_UNREAD.
        """
        peer = context.peer()
        reader = self._readers.get(peer)
        if reader is None:
            reader = self._readers[peer] = Reader(self._held)
        reader.check()
        call = _Call(self._core, reader, path, context)

        def over(_: object) -> None:
            call.close()  # a generator's own end comes later
            if reader.leave(call.unread):
                del self._readers[peer]

        when_done(over)
        return call


class _Ended(Exception):
    """The core ended a call with a status that is not OK, to be kept back for so long."""

    def __init__(self, status: status_pb2.Status, hold_s: float) -> None:
        super().__init__()
        self.status, self.hold_s = status, hold_s


class _Call:
    """A call on its way to the core and back."""

    def __init__(self, core: LinkSocket[status_pb2.Status], reader: Reader, path: str, context: Any) -> None:
        self._core, self._reader, self.unread = core, reader, reader.join(self._cut)
        self._replies: deque[bytes | status_pb2.Status | None] = deque()
        self._came: asyncio.Future[None] | None = None
        self._ahead: deque[int] = deque()
        self._read_bytes = 0
        self._call: LinkCall[status_pb2.Status] = core.conversation.begin(
            path,
            self._take,
            self._end,
            timeout_s=context.time_remaining(),
            metadata=_texts(context.invocation_metadata() or ()),
            client=Peer.of(context).packed(),
        )
        if core.conversation.error is not None:
            self._end(core.conversation.error)

    async def send_one(self, entered: Entered, context: Any) -> None:
        """Send the one message of a client that does not stream, when there is room for it. Raises as `request`."""
        async with self._reader.requests:
            self._reader.check()  # more may have come while this one waited
            self._send(await entered.request(context), is_last=True)
            while self._call.outbox and not self._replies:
                await self._core.until_moved()

    def _send(self, body: bytes | None, *, is_last: bool) -> None:
        """Send a message, None for none."""
        self._core.conversation.send(self._call, body, is_last=is_last)
        self._core.flush()

    async def send_all(self, context: Any) -> None:
        """Send what the client sends, as fast as the core takes it."""
        while (body := await context.read()) is not grpc.aio.EOF:
            self._ahead.append(len(body))
            self._send(body, is_last=False)
            del body
            while not self._call.is_over and self._is_ahead():
                await self._core.until_moved()
        self._send(None, is_last=True)

    def sent_all(self, sending: asyncio.Task[None]) -> None:
        """`send_all` is over: the call ends where it failed, since the core waits for the rest."""
        error = None if sending.cancelled() else sending.exception()
        if isinstance(error, MemoryError):
            os.abort()  # as where it is raised in the call itself
        if error is not None and not self._call.is_over:
            _log.error("a call failed", exc_info=error)
            self.close()
            self._end(status_pb2.Status(code=code_pb2.UNAVAILABLE, message=_FAILED))

    def _is_ahead(self) -> bool:
        """Whether the client has to wait."""
        num_waiting = len(self._call.outbox) + link.STREAM_MESSAGES - self._call.credit
        while len(self._ahead) > num_waiting:
            self._ahead.popleft()
        return bool(self._call.outbox) or sum(self._ahead) >= AHEAD_BYTES

    async def reply(self) -> bytes | None:
        """The next reply, None behind the last. Raises _Ended."""
        while not self._replies:
            self._came = asyncio.get_running_loop().create_future()
            await self._came
        if isinstance(self._replies[0], bytes):
            await self._reader.turn(self.unread, len(self._replies[0]))
        reply = self._replies.popleft()
        if isinstance(reply, status_pb2.Status):
            raise _Ended(reply, self._call.hold_s)
        return reply

    def given(self, reply: bytes) -> None:
        """gRPC has sent a reply."""
        self._reader.was_read(self.unread, len(reply))
        self._read_bytes += len(reply)
        if self._read_bytes >= link.UNREAD_BYTES // 2:
            self._core.conversation.took(self._call, self._read_bytes)
            self._core.flush()
            self._read_bytes = 0

    def close(self) -> None:
        """The call is over for the client. Idempotent."""
        if not self._call.is_over:
            self._core.conversation.cancel(self._call)
            self._core.flush()

    def _take(self, body: bytes) -> None:
        self._add(body)
        self._reader.came(self.unread, len(body))

    def _end(self, status: status_pb2.Status | None) -> None:
        self._add(status)

    def _add(self, reply: bytes | status_pb2.Status | None) -> None:
        self._replies.append(reply)
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    def _cut(self, why: str) -> None:
        """Its client has too much unread: the replies that gRPC does not have are dropped."""
        self._core.conversation.cancel(self._call)
        self._replies.clear()
        self._end(status_pb2.Status(code=code_pb2.UNAVAILABLE, message=why))


def _texts(metadata: Iterable[tuple[str, str | bytes]]) -> link.Metadata:
    """Those of a call's metadata that the link carries: gRPC lets zero bytes pass, which stand between texts there."""
    return tuple((name, value) for name, value in metadata if isinstance(value, str) and "\0" not in name + value)


async def _abort(context: Any, status: status_pb2.Status) -> None:
    """End a call with a status as the core's own gRPC would. Raises AbortError."""
    trailing: list[tuple[str, str | bytes]] = []
    if status.details:
        trailing.append((_DETAILS, status.SerializeToString()))
    retry = error_details_pb2.RetryInfo()
    if any(detail.Unpack(retry) for detail in status.details):
        trailing.append((_PUSHBACK, str(round(retry.retry_delay.ToNanoseconds() * 1e-6))))
    await context.abort(_CODES[status.code], status.message, tuple(trailing))
