"""What a client keeps between calls, and the calls that every room makes, as flows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from deltaline.v1 import admin_service_pb2 as admin
from deltaline_client._arrays import Array
from deltaline_client._exceptions import DeltalineError, StateElsewhere, TransportError
from deltaline_client._seconds import check_seconds
from deltaline_client._shared_memory.regions import SharedMemory
from deltaline_client._table import SequenceTable
from deltaline_client._transport.caller import Caller
from deltaline_client._transport.flow import Flow, Found, Method, Request, Reroute, Response, Server, Sleep, call
from deltaline_client._transport.methods import INFO
from deltaline_client._transport.retry import Attempts, Retry, is_retryable
from deltaline_client._types import ServerInfo

T = TypeVar("T")


class ClientState:
    """A client's settings, and what it has learned of the server."""

    def __init__(self, timeout_s: float, retry: Retry, shared_memory_bytes: int, caller: Caller) -> None:
        check_seconds("timeout", timeout_s)
        self._caller = caller
        self._timeout_s = timeout_s
        self._retry = retry
        self._info: ServerInfo | None = None
        self._shared = SharedMemory(shared_memory_bytes)
        self._table = SequenceTable()
        self._groups: dict[Any, Any] = {}  # what is known of sequences that were stepped together

    def _run(self, flow: Flow[Any]) -> Any:
        """Drive a flow to its end: gives its result, or a coroutine that does."""
        raise NotImplementedError

    def _leave_link(self) -> None:
        """Calls no longer go by the local link."""
        if self._info is not None:
            self._info = replace(self._info, is_linked=False)

    def _attempts(self, timeout_s: float | None = None, retry: Retry | None = None) -> Attempts:
        """The attempts at a call. timeout_s, retry: None for the client's own. Raises ValueError."""
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        return Attempts(retry or self._retry, self._timeout_s if timeout_s is None else timeout_s)


def retried(
    client: ClientState,
    method: Method[Request, Response],
    request: Request,
    server: Server | None = None,
    is_elsewhere: Callable[[Response], bool] = lambda response: False,
) -> Flow[Response]:
    """Call a method whose request is refused or taken as a whole, until it is answered. Raises DeltalineError.

    server: which it means, None for any. is_elsewhere: whether an answer says that this was another server.
    """

    def attempt(timeout_s: float) -> Flow[Response]:
        response = yield from call(method, request, timeout_s, server)
        if is_elsewhere(response):
            raise StateElsewhere("the call came to another server than the one that holds the sequence")
        return response

    return (yield from attempted(client._attempts(), attempt, server))


def attempted(attempts: Attempts, attempt: Callable[[float], Flow[T]], server: Server | None = None) -> Flow[T]:
    """Make attempts, each with the seconds that it may take, until one gives a result. Raises DeltalineError.

    server: which they mean, None for any.
    """
    while True:
        try:
            return (yield from attempt(attempts.next_timeout_s()))
        except DeltalineError as error:
            may_retry = (yield from rerouted(server, error)) or is_retryable(error)
            delay_s = attempts.delay_s(error.retry_after_s) if may_retry else None
            if delay_s is None:
                raise
        yield Sleep(delay_s)


def rerouted(server: Server | None, error: DeltalineError) -> Flow[bool]:
    """A call about a server, None for none, failed: if it did on its way, go another way from now on. Gives whether
    there is one."""
    if server is None or not isinstance(error, TransportError | StateElsewhere):
        return False
    if isinstance(error, StateElsewhere) and error.server:
        return False  # it found its way: what it is about was moved
    is_other: bool = yield Reroute(server, isinstance(error, StateElsewhere))
    return is_other


def answerer(response: Any, asked: Server | None) -> Server:
    """Who gave a reply: the one that was asked, None for any, unless another process did. A server may have no name of
    its own, and be known by the one under which a sequence was moved there."""
    if asked is not None and asked.epoch == response.server_epoch:
        return asked
    return Server(response.server_epoch, response.server)


def info(client: ClientState, *, refresh: bool = False) -> Flow[ServerInfo]:
    """What the server serves, and its limits. Asked for once and remembered; refresh=True asks again.

    `is_linked` says whether the local link carries this client's calls; refresh=True finds one again that it left.
    """
    if client._info is None or refresh:
        message = yield from retried(client, INFO, admin.GetServerInfoRequest())
        found = ServerInfo.from_proto(message)
        if message.link_path:
            is_linked = yield Found(message.link_path, message.link_uid, message.server_epoch)
            found = replace(found, is_linked=is_linked)
            if is_linked:
                client._shared.linked(found.inline_limit_bytes)
        client._info = found
    return client._info


def empty(client: ClientState, shape: Sequence[int]) -> Flow[Array]:
    """An array in the server's type with undefined values, in shared memory where there is some.

    A step takes hidden states that are such an array, or rows of one that lie together, without a copy. While the step
    is unfinished the server may read them there, and compares with them: leave them alone, or its resume may raise
    StepConflict. The memory is the client's again once the array is dropped.
    """
    limits = yield from info(client)
    yield from client._shared.ready(limits, client._attempts())
    return client._shared.empty(shape, limits.dtype)
