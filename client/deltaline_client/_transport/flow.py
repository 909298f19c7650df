"""Flows: what the client does, written once as generators that know no I/O.

A flow yields a command (Call, Sleep, Send, Receive, Found, Reroute, MayGo, TakeMemory), is sent what that gives (or is
thrown an exception), and returns its result. Calls have one response; steps go by Send and Receive over a stream of
steps, many in flight at once. The two drivers are `Client` (threads) and `AsyncClient` (asyncio), over gRPC or the
local link; `blocking` and `awaited` turn a flow into their methods.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

from google.protobuf.message import Message

from deltaline.wire import Buffer

P = ParamSpec("P")
T = TypeVar("T")
H = TypeVar("H")
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True)
class Method(Generic[Request, Response]):
    """A method of the service: its full name, and the types of its request and response.

    takes_stream: whether it takes a stream of requests in place of one. gives_stream: the same of its responses.
    """

    path: str
    request_type: type[Request]
    response_type: type[Response]
    takes_stream: bool = False
    gives_stream: bool = False


class Server(NamedTuple):
    """A process that holds something of this client: its epoch, and the name of its server, "" for none."""

    epoch: int
    name: str


@dataclass(frozen=True)
class Call:
    """Make one attempt at a method. Resumed with the response, or thrown a DeltalineError.

    request: of a method that takes a stream, an iterator that raises nothing and may take its time, in any thread.
    server: which it means, None for any.
    take: of a method that gives a stream, called with each response in turn, in any thread; resumed with None then.
    What it raises ends the flow.
    """

    method: Method[Any, Any]
    request: Message | Iterator[Message]
    timeout_s: float
    server: Server | None = None
    take: Callable[[Any], object] | None = None


@dataclass(frozen=True)
class Sleep:
    """Wait. Resumed with None."""

    seconds: float


@dataclass(frozen=True)
class Send:
    """Put a step on the stream. Resumed with None at once; the Answer comes by Receive.

    number: names the step within the flow. request: a serialised StepRequest as pieces, copied before the flow goes on.
    server: which holds its sequences.
    """

    number: int
    request: Sequence[Buffer]
    server: Server


@dataclass(frozen=True)
class Receive:
    """Wait for an answer to any Send of this flow. Resumed with an Answer, or with None when the time is over."""

    timeout_s: float


@dataclass(frozen=True)
class Found:
    """A server of this host has told of its local link. Resumed with whether the calls of this client go by it."""

    path: str
    uid: int
    server_epoch: int


@dataclass(frozen=True)
class Reroute:
    """A call about a server failed, or came to another. Resumed with whether the next will go another way."""

    server: Server
    came_elsewhere: bool


@dataclass(frozen=True)
class MayGo:
    """Resumed with whether calls of this client may go to a server that another has named."""

    server: Server


@dataclass(frozen=True)
class TakeMemory:
    """Ask a server for link memory. Resumed with a Region, or None where it is reached by gRPC; thrown a
    DeltalineError."""

    server: Server
    size_bytes: int
    timeout_s: float


Answer: TypeAlias = tuple[int, Any]
"""The number of a Send, and its StepAnswer or the DeltalineError that took its place."""

Flow: TypeAlias = Generator[Call | Sleep | Send | Receive | Found | Reroute | MayGo | TakeMemory, Any, T]


def call(
    method: Method[Request, Response],
    request: Request | Iterator[Request],
    timeout_s: float,
    server: Server | None = None,
) -> Flow[Response]:
    """Make one attempt at a method and return its response. Raises DeltalineError."""
    return cast(Response, (yield Call(method, request, timeout_s, server)))


def stream(
    method: Method[Request, Response],
    request: Request,
    timeout_s: float,
    server: Server | None,
    take: Callable[[Response], object],
) -> Flow[None]:
    """Make one attempt at a method that gives a stream, and let `take` have each response. Raises DeltalineError, and
    what `take` raises."""
    yield Call(method, request, timeout_s, server, take)


def blocking(flow: Callable[Concatenate[H, P], Flow[T]]) -> Callable[Concatenate[H, P], T]:
    """Make the method that runs a flow on its object and returns the result."""

    @functools.wraps(flow)
    def method(self: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return cast(T, cast(Any, self)._run(flow(self, *args, **kwargs)))

    return _described(method, flow)


def awaited(flow: Callable[Concatenate[H, P], Flow[T]]) -> Callable[Concatenate[H, P], Coroutine[Any, Any, T]]:
    """Make the coroutine method that runs a flow on its object and returns the result."""

    @functools.wraps(flow)
    async def method(self: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return cast(T, await cast(Any, self)._run(flow(self, *args, **kwargs)))

    return _described(method, flow)


def _described(method: Callable[P, T], flow: Callable[..., Any]) -> Callable[P, T]:
    """Give a method the signature that help() should show: `self` first, and the flow's result as what is returned."""
    signature = inspect.signature(flow)
    first, *others = signature.parameters.values()
    returned = str(signature.return_annotation).removeprefix("Flow[").removesuffix("]")
    shown = signature.replace(
        parameters=[first.replace(name="self", annotation=inspect.Parameter.empty), *others], return_annotation=returned
    )
    setattr(method, "__signature__", shown)  # noqa: B010 - a callable's type has no such attribute
    return method
