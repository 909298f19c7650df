"""A connection of the link for asyncio: all flows of a client share it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from deltaline import link
from deltaline.conversation import Conversation, Region
from deltaline.link_socket import LinkSocket
from deltaline.wire import Buffer
from deltaline_client._exceptions import DeadlineExceeded, DeltalineError
from deltaline_client._transport.caller import Caller
from deltaline_client._transport.channels.async_stream import Mailbox
from deltaline_client._transport.flow import Call
from deltaline_client._transport.link.answer import answer_of, read
from deltaline_client._transport.link.connect import Where
from deltaline_client._transport.link.steps import LinkSteps
from deltaline_client._transport.statuses import from_status

T = TypeVar("T")


class AsyncLink:
    """A connection to the process of server_epoch, of one event loop. `send` raises nothing for one that broke: its
    mailbox gets the error."""

    def __init__(self, connected: socket.socket, welcome: link.Welcome, caller: Caller) -> None:
        self._caller, self.server_epoch = caller, welcome.server_epoch
        self._conversation = Conversation(welcome.message_bytes, from_status)
        self._socket = LinkSocket(connected, self._conversation)
        self._steps = LinkSteps(self._conversation, caller)
        # Memory that was asked for, by its size, until somebody takes it: who asked may be gone when it comes.
        self._asked: dict[int, asyncio.Future[Region | DeltalineError]] = {}

    @property
    def is_over(self) -> bool:
        """Whether it carries nothing more."""
        return self._socket.is_over

    def is_to(self, where: Where) -> bool:
        """Whether it carries calls to the process that is there."""
        return not self.is_over and where.server_epoch in (None, self.server_epoch)

    @property
    def lacks_memory(self) -> bool:
        """Whether it is over since the server gave no memory for messages."""
        return self._conversation.lacks_memory

    def send(self, number: int, request: Sequence[Buffer], mailbox: Mailbox) -> None:
        """Send a step; its answer comes to the mailbox under `number`."""
        self._steps.send(number, request, mailbox.put)
        self._socket.flush()

    async def call(self, command: Call) -> Any:
        """Make one attempt at a method. Raises DeltalineError."""
        bodies: asyncio.Queue[bytes | None] = asyncio.Queue()
        ended: asyncio.Future[DeltalineError | None] = asyncio.get_running_loop().create_future()
        conversation, method, request = self._conversation, command.method, command.request
        if conversation.error is not None:
            raise conversation.error

        def end(error: DeltalineError | None) -> None:
            _settle(ended, error)
            bodies.put_nowait(None)

        call = conversation.begin(
            method.path,
            bodies.put_nowait,
            end,
            timeout_s=command.timeout_s,
            metadata=self._caller.metadata(command.server),
        )
        try:
            async with asyncio.timeout(command.timeout_s):
                if isinstance(request, Message):
                    conversation.send(call, request.SerializeToString(), is_last=True)
                else:
                    # In a thread: the next part may have to be read from a disk first.
                    while (part := await asyncio.to_thread(next, request, None)) is not None and not ended.done():
                        conversation.send(call, part.SerializeToString())
                        self._socket.flush()
                        while call.outbox and not ended.done():
                            await self._socket.until_moved()
                    conversation.send(call, None, is_last=True)
                self._socket.flush()
                came = []
                while (body := await bodies.get()) is not None:
                    if command.take is None:
                        came.append(body)
                    else:
                        await asyncio.to_thread(command.take, read(method, body))  # it may write to a disk
                error = await ended
        except TimeoutError as late:
            raise DeadlineExceeded("no answer in time") from late
        finally:
            conversation.cancel(call)
            self._socket.flush()
        if command.take is not None and error is None:
            return None
        return answer_of(method, came, error)

    async def memory(self, size_bytes: int, timeout_s: float) -> Region:
        """Link memory of at least so many bytes, for as long as the connection lives; what was asked for in this size
        and came too late, if any. One at a time may wait for it. Raises DeltalineError."""
        made = self._asked.get(size_bytes)
        if made is None or (made.done() and isinstance(made.result(), DeltalineError)):  # there may be some by now
            made = self._asked[size_bytes] = asyncio.get_running_loop().create_future()
            self._conversation.ask_memory(size_bytes, made.set_result)
            self._socket.flush()
        try:
            async with asyncio.timeout(timeout_s):
                result = await asyncio.shield(made)
        except TimeoutError as late:
            raise DeadlineExceeded("no memory in time") from late
        del self._asked[size_bytes]
        if isinstance(result, DeltalineError):
            raise result
        return result

    def close(self, error: DeltalineError) -> None:
        """End it: what waits gets the error. Idempotent."""
        self._socket.close(error)


def _settle(waiting: asyncio.Future[T], result: T) -> None:
    """Give a result to who waits for it, unless that was cancelled."""
    if not waiting.done():
        waiting.set_result(result)
