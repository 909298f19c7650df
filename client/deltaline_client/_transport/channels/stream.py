"""The stream of steps for threads: one StepStream per way to a server, shared by all calls.

A stream opens with the first step and lives until it breaks or the client disconnects; the next step opens another.
When it breaks, every step that waits for its answer gets the error: whether it was applied is not known.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from deltaline.wire import Buffer
from deltaline_client._exceptions import DeltalineError, Disconnected
from deltaline_client._transport.caller import Caller, traceparent
from deltaline_client._transport.channels.channel import error_of
from deltaline_client._transport.flow import Answer
from deltaline_client._transport.messages import read_stream_response, stream_request
from deltaline_client._transport.pending import Pending
from deltaline_client._transport.token import Header

Mailbox = queue.SimpleQueue[Answer]


class StepStream:
    """Sends steps and delivers their answers to the mailboxes of the calls that wait for them. Threads may share it."""

    def __init__(self, open_stream: Callable[..., Any], caller: Caller, server: str = "") -> None:
        """open_stream: makes the RPC from an iterator of requests, as grpc's stream_stream callables do. caller: its
        client; with another token there is another stream. server: the name of the one that is meant, "" for none."""
        self._open_stream, self._caller, self._server = open_stream, caller, server
        self._token = caller.token
        self._header: Header | None = None
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[bytes | None] | None = None
        self._pending = Pending()
        self._is_closed = self.has_answered = False

    def close(self) -> None:
        """Send nothing more, since the channel is about to close: a step that comes now was surely not applied."""
        with self._lock:
            self._is_closed = True

    def send(self, number: int, request: Sequence[Buffer], mailbox: Mailbox) -> None:
        """Send a step; its answer, or the error that ended the stream, comes to the mailbox under `number`."""
        with self._lock:
            if self._is_closed:
                mailbox.put((number, Disconnected()))
                return
            if self._token is not None:
                self._take_header(self._token.header())
            if self._outbox is None:
                self._outbox, self._pending = self._open()
            message = stream_request(self._pending.add(number, mailbox.put), request, traceparent())
            self._outbox.put(message)

    def leave(self) -> None:
        """Let the next step open another stream, which may be brought to another server; this one ends once what it was
        sent is answered."""
        with self._lock:
            self._end()

    def _take_header(self, header: Header) -> None:
        """Leave a stream that was opened with another token."""
        if header != self._header:
            self._end()
        self._header = header

    def _end(self) -> None:
        if self._outbox is not None:
            self._outbox.put(None)
            self._outbox = None

    def _open(self) -> tuple[queue.SimpleQueue[bytes | None], Pending]:
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        metadata = self._caller.headers(self._server)
        pending, call = Pending(), self._open_stream(iter(outbox.get, None), metadata=metadata)
        threading.Thread(target=self._read, args=(call, outbox, pending), name="deltaline-stream", daemon=True).start()
        return outbox, pending

    def _read(self, call: Any, outbox: queue.SimpleQueue[bytes | None], pending: Pending) -> None:
        """Deliver answers until the stream ends, then its error to all that still wait."""
        error: DeltalineError | None = None
        try:
            for body in call:
                pending.deliver(*read_stream_response(body))
                self.has_answered = True
        except DeltalineError as unreadable:
            error = unreadable
            call.cancel()
        except grpc.RpcError as failure:
            error = error_of(failure)
        finally:  # also after a bug: a stream without a reader must not take more steps
            with self._lock:
                if self._outbox is outbox:
                    self._outbox = None
            outbox.put(None)  # ends the thread of gRPC that waits for more to send
            pending.fail(error)
