"""A connection of the link for threads: one flow at a time has it, and waits on its socket itself."""

from __future__ import annotations

import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from google.protobuf.message import Message

from deltaline import link
from deltaline.conversation import Conversation, Region
from deltaline.link_socket import receive, send
from deltaline.wire import Buffer
from deltaline_client._exceptions import DeadlineExceeded, DeltalineError, Unavailable
from deltaline_client._transport.caller import Caller
from deltaline_client._transport.flow import Answer, Call
from deltaline_client._transport.link.answer import answer_of, read
from deltaline_client._transport.link.steps import LinkSteps
from deltaline_client._transport.statuses import from_status

_LONGEST_POLL_S = 3600.0


class BlockingLink:
    """A connection to the process of server_epoch. `send` and `receive` raise nothing for one that broke: what waits
    gets its error."""

    def __init__(self, connected: socket.socket, welcome: link.Welcome, caller: Caller) -> None:
        self._socket, self._caller, self.server_epoch = connected, caller, welcome.server_epoch
        self._conversation = Conversation(welcome.message_bytes, from_status)
        self._steps = LinkSteps(self._conversation, caller)
        # Memory that was asked for, by its size, until somebody takes it: who asked may be gone when it comes.
        self._asked: dict[int, list[Region | DeltalineError]] = {}
        self._buffer = memoryview(bytearray(link.MAX_PACKET_BYTES))
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._is_full = False
        self._send = partial(send, connected)
        self._why: DeltalineError = Unavailable("the local link broke")

    @property
    def is_over(self) -> bool:
        """Whether it carries nothing more."""
        return self._conversation.error is not None

    @property
    def lacks_memory(self) -> bool:
        """Whether it is over since the server gave no memory for messages."""
        return self._conversation.lacks_memory

    def send(self, number: int, request: Sequence[Buffer], answers: deque[Answer]) -> None:
        """Send a step; its answer comes to `answers` under `number`, in a later `receive`."""
        self._steps.send(number, request, answers.append)
        self._flush()

    def receive(self, answers: deque[Answer], timeout_s: float) -> Answer | None:
        """The next answer to a step; None when the time is over."""
        if not answers:
            self._wait(answers.__len__, timeout_s)
        return answers.popleft() if answers else None

    def call(self, command: Call) -> Any:
        """Make one attempt at a method. Raises DeltalineError."""
        bodies: deque[bytes] = deque()
        ends: list[DeltalineError | None] = []
        until_s = time.monotonic() + command.timeout_s
        conversation, method, request = self._conversation, command.method, command.request
        if conversation.error is not None:
            raise conversation.error
        call = conversation.begin(
            method.path,
            bodies.append,
            ends.append,
            timeout_s=command.timeout_s,
            metadata=self._caller.metadata(command.server),
        )

        def wait(is_done: Callable[[], object]) -> None:
            self._wait(lambda: ends or is_done(), until_s - time.monotonic())
            if not (ends or is_done()):
                raise DeadlineExceeded("no answer in time")

        try:
            if isinstance(request, Message):
                conversation.send(call, request.SerializeToString(), is_last=True)
            else:
                for part in request:
                    conversation.send(call, part.SerializeToString())
                    wait(lambda: not call.outbox)  # the next may have to be read from a disk, when this one is gone
                    if ends:
                        break
                else:
                    conversation.send(call, None, is_last=True)
            while command.take is not None and (bodies or not ends):
                wait(lambda: bodies)
                while bodies:
                    command.take(read(method, bodies.popleft()))
            wait(lambda: False)
        finally:
            if not call.is_over:
                conversation.cancel(call)
                self._flush()
        if command.take is not None and ends[0] is None:
            return None
        return answer_of(method, bodies, ends[0])

    def memory(self, size_bytes: int, timeout_s: float) -> Region:
        """Link memory of at least so many bytes, for as long as the connection lives; what was asked for in this size
        and came too late, if any. Raises DeltalineError."""
        made = self._asked.get(size_bytes)
        if made is None or (made and isinstance(made[0], DeltalineError)):  # there may be some by now
            made = self._asked[size_bytes] = []
            self._conversation.ask_memory(size_bytes, made.append)
        self._wait(lambda: made, timeout_s)
        if not made:
            raise DeadlineExceeded("no memory in time")
        del self._asked[size_bytes]
        if isinstance(made[0], DeltalineError):
            raise made[0]
        return made[0]

    def end(self, error: DeltalineError) -> None:
        """End it, from any thread: whoever waits on it gets the error."""
        self._why = error
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; nobody waits on it."""
        self._conversation.fail(self._why)
        self._socket.close()

    def _wait(self, is_done: Callable[[], object], timeout_s: float) -> None:
        """Send and take packets until something is done, the time is over or the connection is."""
        until_s, conversation = time.monotonic() + timeout_s, self._conversation
        while conversation.error is None:
            if conversation.unsent or conversation.control:
                self._flush()
            if is_done():
                return
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            if self._poll.poll(math.ceil(min(left_s, _LONGEST_POLL_S) * 1000)):
                self._read()

    def _read(self) -> None:
        """Take a packet, if there is one."""
        if not receive(self._socket, self._buffer, self._conversation):
            self._conversation.fail(self._why)

    def _flush(self) -> None:
        is_full = not self._conversation.flush(self._send)
        if is_full != self._is_full:
            self._is_full = is_full
            self._poll.modify(self._socket, select.POLLIN | select.POLLOUT if is_full else select.POLLIN)
