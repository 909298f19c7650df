"""A connection of the link for asyncio: all flows of a client share it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from deltaline import link
from deltaline.wire import Buffer
from deltaline_client._exceptions import DeadlineExceeded, DeltalineError, Unavailable
from deltaline_client._transport.flow import Answer, Call, Region
from deltaline_client._transport.link.connect import FD_SPACE, received_files
from deltaline_client._transport.link.conversation import Conversation, answer_of
from deltaline_client._transport.link.steps import LinkSteps
from deltaline_client._transport.tracing import metadata

T = TypeVar("T")


class AsyncLink:
    """A connection, of one event loop. `send` raises nothing for one that broke: its mailbox gets the error."""

    def __init__(self, connected: socket.socket, welcome: link.Welcome) -> None:
        self._socket, self._loop = connected, asyncio.get_running_loop()
        self._conversation = Conversation(welcome.message_bytes)
        self._steps = LinkSteps(self._conversation)
        self._buffer = memoryview(bytearray(link.MAX_PACKET_BYTES))
        self._is_full = False
        # Set whenever packets have come or gone.
        self._moved = asyncio.Event()
        self._loop.add_reader(connected, self._read)

    @property
    def is_over(self) -> bool:
        """Whether it carries nothing more."""
        return self._conversation.error is not None

    def send(self, number: int, request: Sequence[Buffer], mailbox: asyncio.Queue[Answer]) -> None:
        """Send a step; its answer comes to the mailbox under `number`."""
        self._steps.send(number, request, mailbox.put_nowait)
        self._flush()

    async def call(self, command: Call) -> Any:
        """Make one attempt at a method. Raises DeltalineError."""
        bodies: list[bytes] = []
        ended: asyncio.Future[DeltalineError | None] = self._loop.create_future()
        conversation, method, request = self._conversation, command.method, command.request
        call = conversation.begin(
            method.path,
            bodies.append,
            partial(_settle, ended),
            timeout_s=command.timeout_s,
            metadata=metadata(),
        )
        try:
            async with asyncio.timeout(command.timeout_s):
                if isinstance(request, Message):
                    conversation.send(call, request.SerializeToString(), is_last=True)
                else:
                    # In a thread: the next part may have to be read from a disk first.
                    while (part := await asyncio.to_thread(next, request, None)) is not None and not ended.done():
                        conversation.send(call, part.SerializeToString())
                        self._flush()
                        while call.outbox and not ended.done():
                            self._moved.clear()
                            await self._moved.wait()
                    conversation.send(call, None, is_last=True)
                self._flush()
                error = await ended
        except TimeoutError as late:
            raise DeadlineExceeded("no answer in time") from late
        finally:
            conversation.cancel(call)
            self._flush()
        return answer_of(method, bodies, error)

    async def memory(self, size_bytes: int, timeout_s: float) -> Region:
        """Link memory of at least so many bytes, for as long as the connection lives. Raises DeltalineError."""
        made: asyncio.Future[Region | DeltalineError] = self._loop.create_future()
        self._conversation.ask_memory(size_bytes, partial(_settle, made))
        self._flush()
        try:
            async with asyncio.timeout(timeout_s):
                result = await made
        except TimeoutError as late:
            raise DeadlineExceeded("no memory in time") from late
        if isinstance(result, DeltalineError):
            raise result
        return result

    def close(self, error: DeltalineError) -> None:
        """End it: what waits gets the error. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        self._conversation.fail(error)
        self._moved.set()

    def _read(self) -> None:
        """Take a packet."""
        try:
            size, ancillary, _, _ = self._socket.recvmsg_into([self._buffer], FD_SPACE)
        except (BlockingIOError, ConnectionResetError):  # told once, ahead of the last packets
            return
        except OSError:
            size, ancillary = 0, []
        if size:
            self._conversation.received(self._buffer[:size], received_files(ancillary) if ancillary else ())
        self._moved.set()
        if size and self._conversation.error is None:
            if self._conversation.unsent or self._conversation.control:
                self._flush()
        else:
            self.close(Unavailable("the local link broke"))

    def _flush(self) -> None:
        if self._conversation.error is not None:
            return
        is_full = not self._conversation.flush(self._write)
        if is_full != self._is_full:
            self._is_full = is_full
            if is_full:
                self._loop.add_writer(self._socket, self._write_more)
            else:
                self._loop.remove_writer(self._socket)

    def _write_more(self) -> None:
        self._flush()
        self._moved.set()

    def _write(self, pieces: Sequence[Buffer]) -> bool:
        try:
            self._socket.sendmsg(pieces)
        except BlockingIOError:
            return False
        except OSError:  # what the server said before is read first
            return True
        return True


def _settle(waiting: asyncio.Future[T], result: T) -> None:
    """Give a result to who waits for it, unless that was cancelled."""
    if not waiting.done():
        waiting.set_result(result)
