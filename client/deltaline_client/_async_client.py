"""The client for asyncio: runs the same flows over a grpc.aio channel."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Self, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from deltaline.address import with_port
from deltaline_client._adapters import calls as adapter_calls
from deltaline_client._adapters.calls import AdaptersRecord
from deltaline_client._exceptions import DeadlineExceeded, DeltalineError, Disconnected, TransportError, Unavailable
from deltaline_client._state import ClientState, empty, info
from deltaline_client._steps import calls, sequences
from deltaline_client._steps import commit as commits
from deltaline_client._steps import step as steps
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._transport.async_stream import AsyncStepStream, Mailbox
from deltaline_client._transport.channel import OPTIONS, bind, bind_stream, error_of
from deltaline_client._transport.flow import Call, Flow, Receive, Send, Sleep, awaited
from deltaline_client._transport.retry import Retry
from deltaline_client._transport.tracing import metadata

T = TypeVar("T")


class AsyncClient(ClientState):
    """A connection to one deltaline server, for asyncio.

        async with AsyncClient("localhost:50051") as client, await client.open() as sequence:
            outputs = await sequence.prefill(hidden)
            output = await sequence.decode(outputs[-1])

    Methods and arguments are those of Client. It belongs to the event loop in which it is first used. A cancelled step
    has an unknown outcome: the sequence remembers it, see AsyncSequence.resume.
    """

    def __init__(
        self, address: str, *, timeout: float = 120.0, retry: Retry | None = None, shared_memory_bytes: int = 0
    ) -> None:
        super().__init__(timeout, retry or Retry(), shared_memory_bytes)
        self._address = with_port(address)
        self._channel: grpc.aio.Channel | None = None
        self._methods: dict[str, Any] = {}
        self._stream: AsyncStepStream | None = None
        self._is_disconnected = False

    async def _run(self, flow: Flow[T]) -> T:
        """Drive a flow to its end, making its calls and waits."""
        if self._is_disconnected and self._channel is None:
            flow.close()
            raise Disconnected
        if self._channel is None or self._stream is None:  # a grpc.aio channel must be made inside its event loop
            self._channel = grpc.aio.insecure_channel(self._address, options=OPTIONS)
            self._methods = bind(self._channel)
            self._stream = AsyncStepStream(bind_stream(self._channel))
        mailbox: Mailbox = asyncio.Queue()
        try:
            command = next(flow)
            while True:
                result: Any = None
                try:
                    match command:
                        case Send():
                            self._stream.send(command.number, command.request, mailbox)
                        case Receive():
                            with suppress(TimeoutError):
                                async with asyncio.timeout(command.timeout_s):
                                    result = await mailbox.get()
                        case Sleep():
                            await asyncio.sleep(command.seconds)
                        case Call():
                            result = await self._answer(command)
                except grpc.RpcError as failure:
                    command = flow.throw(error_of(failure))
                except TransportError as error:
                    command = flow.throw(error)
                except (asyncio.CancelledError, grpc.aio.UsageError):
                    if not self._is_disconnected or _is_cancelled():
                        raise
                    command = flow.throw(Disconnected())
                else:
                    command = flow.send(result)
        except StopIteration as end:
            return cast(T, end.value)
        finally:
            flow.close()

    async def _answer(self, command: Call) -> Any:
        """Make one attempt at a method. Raises grpc.RpcError; TransportError for a stream of requests that broke."""
        method = self._methods[command.method.path]
        if isinstance(command.request, Message):
            return await method(command.request, timeout=command.timeout_s, metadata=metadata())
        call = method(timeout=command.timeout_s, metadata=metadata())
        try:
            # In a thread: the next request may have to be read from a disk first.
            while (request := await asyncio.to_thread(next, command.request, None)) is not None:
                await call.write(request)
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the call is over: awaiting it raises the reason
        except asyncio.CancelledError:
            call.cancel()
            raise
        try:
            return await call
        except grpc.aio.AioRpcError as failure:
            # A write that fails may put an error of grpc.aio's own in the place of the server's status, which is lost.
            if failure.code() is grpc.StatusCode.INTERNAL and not failure.trailing_metadata():
                if not call.time_remaining():
                    raise DeadlineExceeded("no answer in time") from failure
                raise Unavailable("the stream of requests broke") from failure
            raise

    async def open(self, *, lease_s: float | None = None, adapter: str | None = None) -> AsyncSequence:
        """Open a sequence with zero state.

        lease_s: how long it lives without a step; default the server's. adapter: the name of one that is loaded, which
        the sequence has for as long as it lives; default none. Raises as open_many.
        """
        return (await self.open_many(1, lease_s=lease_s, adapter=adapter))[0]

    async def open_many(
        self, count: int, *, lease_s: float | None = None, adapter: str | None = None
    ) -> list[AsyncSequence]:
        """Open `count` sequences with the same adapter, all or none.

        Raises NoFreeLines when so many do not become free in time; AdapterUnknown when no adapter has the name.
        """
        return await self._run(sequences.open_sequences(self, AsyncSequence, count, lease_s, adapter))

    @property
    def adapters(self) -> AsyncAdapters:
        """The adapters of the server: load, unload, list."""
        return AsyncAdapters(self)

    step = awaited(steps.step)
    resume = awaited(steps.resume)
    prefill = awaited(calls.prefill)
    decode = awaited(calls.decode)
    verify = awaited(calls.verify)
    commit = awaited(commits.commit)
    close = awaited(sequences.close)
    describe = awaited(sequences.describe)
    renew = awaited(sequences.renew)
    info = awaited(info)
    empty = awaited(empty)
    load = awaited(sequences.load)
    drain = awaited(sequences.drain)

    async def disconnect(self) -> None:
        """Close the channel. Sequences stay open on the server; shared memory goes.

        Calls under way and later ones raise Disconnected; a step that was under way has an unknown outcome.
        """
        if self._channel is not None and self._stream is not None:
            await self._stream.close()
            await self._run(self._shared.end())
        self._is_disconnected = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.disconnect()


def _is_cancelled() -> bool:
    """Whether the task is to end; else a CancelledError is that of a channel that was closed under its call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncAdapters(AdaptersRecord):
    """The adapters of a server: what `AsyncClient.adapters` is. Methods and arguments are those of Adapters."""

    load = awaited(adapter_calls.load)
    unload = awaited(adapter_calls.unload)
    list = awaited(adapter_calls.list_adapters)


class AsyncSequence(SequenceRecord):
    """One token stream whose state the server holds. Made by AsyncClient.open; `async with` closes it."""

    prefill = awaited(calls.prefill_one)
    decode = awaited(calls.decode_one)
    verify = awaited(calls.verify_one)
    resume = awaited(calls.resume_one)
    commit = awaited(calls.commit_one)
    close = awaited(calls.close_one)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, exception: BaseException | None, traceback: object) -> None:
        try:
            await self.close()
        except DeltalineError:
            if exception is None:  # else the body's error matters more; the lease frees the state
                raise
