"""The stream of steps for asyncio, as `stream` is for threads: one per way to a server, shared by all
calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from deltaline.wire import Buffer
from deltaline_client._exceptions import Cancelled, DeltalineError, Disconnected, Unavailable
from deltaline_client._transport.caller import Caller, traceparent
from deltaline_client._transport.channels.channel import error_of
from deltaline_client._transport.flow import Answer
from deltaline_client._transport.messages import read_stream_response, stream_request
from deltaline_client._transport.pending import Pending
from deltaline_client._transport.token import Header


class Mailbox:
    """Answers to the steps of one flow, which alone waits for them."""

    def __init__(self) -> None:
        self._answers = deque[Answer]()
        self._came: asyncio.Future[None] | None = None

    def put(self, answer: Answer) -> None:
        """Add an answer."""
        self._answers.append(answer)
        if self._came is not None:
            _wake(self._came)

    def is_empty(self) -> bool:
        """Whether none is there."""
        return not self._answers

    async def take(self, timeout_s: float) -> Answer | None:
        """The next answer; None when the time is over."""
        if not self._answers:
            loop = asyncio.get_running_loop()
            self._came = loop.create_future()
            timer = loop.call_later(timeout_s, _wake, self._came)
            try:
                await self._came
            finally:
                timer.cancel()
                self._came = None
        return self._answers.popleft() if self._answers else None


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class AsyncStepStream:
    """Sends steps and delivers their answers to the mailboxes of the calls that wait for them.

    Reading and writing are tasks of the stream's own: gRPC cancels a stream when a task that waits for it is cancelled,
    and one call's cancellation must not break the others.
    """

    def __init__(self, open_stream: Callable[..., Any], caller: Caller, server: str = "") -> None:
        """open_stream: makes the RPC, as grpc.aio's stream_stream callables do. caller: its client; with another token
        there is another stream. server: the name of the one that is meant, "" for none."""
        self._open_stream, self._caller, self._server = open_stream, caller, server
        self._token = caller.token
        self._header: Header | None = None
        self._live: _Live | None = None
        # Those that were left, until what they were sent is answered.
        self._ending: list[_Live] = []
        self._is_closed = self.has_answered = False

    def send(self, number: int, request: Sequence[Buffer], mailbox: Mailbox) -> None:
        """Send a step; its answer, or the error that ended the stream, comes to the mailbox under `number`."""
        if self._is_closed:
            mailbox.put((number, Disconnected()))
            return
        if self._token is not None:
            self._take_header(self._token.header())
        if self._live is None or self._live.is_over:
            self._live = _Live(self, self._open_stream(metadata=self._caller.headers(self._server)))
        self._live.send(number, request, mailbox)

    async def close(self) -> None:
        """End the stream, and take no more steps; those that wait get an error."""
        self._is_closed = True
        for live in (*self._ending, *([] if self._live is None else [self._live])):
            await live.close()

    def leave(self) -> None:
        """Let the next step open another stream, which may be brought to another server; this one ends once what it was
        sent is answered."""
        if self._live is not None:
            self._live.finish()
            self._ending = [live for live in (*self._ending, self._live) if not live.is_over]
            self._live = None

    def _take_header(self, header: Header) -> None:
        """Leave a stream that was opened with another token."""
        if header != self._header:
            self.leave()
        self._header = header


class _Live:
    """One RPC, from its first step to its end."""

    def __init__(self, stream: AsyncStepStream, call: Any) -> None:
        self._stream, self._call = stream, call
        self._pending = Pending()
        self._outbox: deque[bytes] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._reader = asyncio.create_task(self._read())
        self.is_over = self._is_last = False

    def finish(self) -> None:
        """Send no more than what waits."""
        self._is_last = True
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    def send(self, number: int, request: Sequence[Buffer], mailbox: Mailbox) -> None:
        correlation_id = self._pending.add(number, mailbox.put)
        self._outbox.append(stream_request(correlation_id, request, traceparent()))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Write what waits; gRPC takes one message at a time, and holds it while the server does not read."""
        try:
            while self._outbox:
                await self._call.write(self._outbox.popleft())
            if self._is_last:
                await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            self._outbox.clear()  # the stream is over: the reader learns why
        finally:
            self._writer = None

    async def _read(self) -> None:
        """Deliver answers until the stream ends, then its error to all that still wait."""
        error: DeltalineError | None = None
        try:
            async for body in self._call:  # read() would drop what came before the stream broke
                self._pending.deliver(*read_stream_response(body))
                self._stream.has_answered = True
        except DeltalineError as unreadable:
            error = unreadable
            self._call.cancel()
        except grpc.aio.AioRpcError as failure:
            # A write on a broken connection makes grpc.aio report an internal error of its own in place of the cause.
            is_own = failure.code() is grpc.StatusCode.INTERNAL
            error = Unavailable("the connection broke") if is_own else error_of(failure)
        except asyncio.CancelledError:
            error = Cancelled("the client was disconnected")
        finally:
            self.is_over = True
            self._pending.fail(error)

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._reader, *([self._writer] if self._writer else []), return_exceptions=True)
