"""What surrounds every RPC: who it is from, parsing, errors, and the standard gRPC metrics.

A handler behind it gets parsed messages; it may raise `RequestError`, and whatever else
it raises reaches the client as INTERNAL with an id that the log has beside the traceback, and nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import grpc
from grpc.aio import ServicerContext

from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.front import replies
from deltaline_server.front.audited import AUDITED
from deltaline_server.front.identity import Identity
from deltaline_server.front.port.gate import Entered, Gate
from deltaline_server.front.requests import most_bytes, parse
from deltaline_server.front.trust.principals import Principals, current_principal
from deltaline_server.front.trust.refusals import Refusals
from deltaline_server.front.trust.turns import Turns
from deltaline_server.telemetry.audit import Audit
from deltaline_server.telemetry.metrics import Metrics, RpcMetrics

if TYPE_CHECKING:
    from deltaline_server.telemetry.tracing import Tracing  # OpenTelemetry may not be installed

_log = logging.getLogger(__name__)
_CODES = {code.value[0]: code for code in grpc.StatusCode}
TRACED = "/deltaline.v1."
_STEP = f"{TRACED}LayerService/Step"

# Subscripted in the type stubs only.
Context: TypeAlias = "ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Enter: TypeAlias = Callable[[Any], Entered]


def bug(error: BaseException) -> Refusal:
    """Log an unexpected exception with its traceback and return what the client may know of it: an opaque id."""
    error_id = secrets.token_hex(8)
    _log.error("internal error %s", error_id, exc_info=error)
    return Refusal(Reason.BUG, f"internal error {error_id}", {"id": error_id})


async def abort(context: Context, refusal: Refusal) -> None:
    """End the RPC with the status of a refusal: code, message, details, and the pushback that gRPC's retries obey.

    The context keeps the exception that this raises, and the exception the context by its frames, until the garbage
    collector comes: what these frames hold should be little, so not the message.
    """
    made = replies.status(refusal)
    metadata: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", made.SerializeToString())]
    if refusal.retry_after_s is not None:
        metadata.append(("grpc-retry-pushback-ms", str(round(refusal.retry_after_s * 1000))))
    await context.abort(_CODES[made.code], made.message, tuple(metadata))


def empty_frames(error: BaseException | None) -> None:
    """Let go of what an exception's frames hold, and those of what it came from: messages, slices of shared memory."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__context__


class _Requests:
    """The messages of a stream, parsed. It holds none: gRPC's own iterator would hold the last one of an idle stream,
    and a generator that of a handler that waits with it. turns: of messages that are a call each; None for others."""

    __slots__ = ("_context", "_deserialize", "_rpc", "_turns")

    def __init__(
        self, context: Context, rpc: RpcMetrics, deserialize: Callable[[bytes], Any], turns: Turns | None = None
    ) -> None:
        self._context, self._rpc, self._deserialize, self._turns = context, rpc, deserialize, turns

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        body = await self._context.read()
        if body is grpc.aio.EOF:
            raise StopAsyncIteration
        if self._turns is not None and (wait_s := self._turns.wait_s(current_principal().number)):
            await asyncio.sleep(wait_s)
        self._rpc.received.value += 1
        return parse(self._deserialize, body)


class Interceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all services of a server, the library's (reflection) included."""

    def __init__(
        self,
        metrics: Metrics,
        principals: Principals,
        tracing: Tracing | None = None,
        gate: Gate | None = None,
        audit: Audit | None = None,
        refusals: Refusals | None = None,
        identity: Identity | None = None,
        turns: Turns | None = None,
        max_sequences: int = 1,
    ) -> None:
        """gate: of the gRPC port; None for one whose clients are trusted, whose refusals go uncounted as well. audit:
        None where nobody reads it. identity: None for a server that no call can mean by a name. turns: of calls with
        one request and one reply; None where all are from one principal. max_sequences: that one request may name."""
        self._metrics, self._principals, self._tracing = metrics, principals, tracing
        self._gate, self._audit, self._refusals, self._identity = gate, audit, refusals, identity
        self._turns, self._most_bytes = turns, most_bytes(max_sequences)
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the wrapped handler of a method; None for an unknown one, which gRPC answers with UNIMPLEMENTED."""
        method = handler_call_details.method
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._wrapped[method] = self.wrap(handler, method, self._gate)
        return self._wrapped[method]

    def wrap(
        self,
        handler: Any,
        method: str,
        gate: Gate | None = None,
        *,
        in_pieces: bool = False,
    ) -> Handler:
        """The same handler with everything that this module adds, taking and giving bytes.

        in_pieces: replies that a handler makes in pieces are given so. gate: what counts its calls; then it takes the
        one message of a call itself, as it takes those of a stream.
        """
        # Long, since it is four kinds of calls that share these: as methods they would pass them on in each step.
        rpc, enter = self._metrics.rpcs[method], None if gate is None else partial(gate.enter, method)
        deserialize = handler.request_deserializer or bytes
        serialize: Callable[[Any], bytes] = handler.response_serializer or bytes
        if in_pieces and handler.response_serializer is replies.JOIN:
            serialize = cast(Any, list)
        # Probes are not worth a trace, and of a stream each step has its own (stepping.py).
        traced = method if method.startswith(TRACED) else None
        audited = AUDITED.get(method) if self._audit is not None else None
        limit_bytes = None if method == _STEP else self._most_bytes
        # Of our own streams' messages steps have theirs (stepping.py); reflection answers each.
        turns = None if method.startswith(TRACED) else self._turns

        async def unary(body: Any, context: Context) -> bytes:
            async with self._call(method, rpc, enter, context, traced, self._turns) as entered:
                if entered is not None:
                    body = await entered.request(context)
                rpc.received.value += 1
                try:
                    message = parse(deserialize, body, limit_bytes)
                finally:
                    del body  # a refusal that is kept back keeps no message
                values = {} if audited is None else audited.values(message)
                answer = handler.unary_unary(message, context)
                del message  # see abort
                response = serialize(await answer)
                rpc.sent.value += 1
                if audited is not None:
                    self._did(audited.what, context, values)
                if entered is not None:
                    entered.hand_over(response)
                return response
            raise AssertionError("abort() raises")

        async def unary_stream(body: Any, context: Context) -> AsyncIterator[bytes]:
            async with self._call(method, rpc, enter, context) as entered:
                if entered is not None:
                    body = await entered.request(context)
                rpc.received.value += 1
                try:
                    message = parse(deserialize, body, limit_bytes)
                finally:
                    del body
                untold = audited
                async with aclosing(handler.unary_stream(message, context)) as responses:
                    async for response in responses:
                        if untold is not None:  # now: who has taken all of it need not wait for the end
                            self._did(untold.what, context, untold.values(message))
                            untold = None
                        rpc.sent.value += 1
                        yield serialize(response)
                        del response

        async def stream_unary(_: AsyncIterator[bytes], context: Context) -> bytes:
            async with self._call(method, rpc, enter, context, traced):
                response = serialize(await handler.stream_unary(_Requests(context, rpc, deserialize), context))
                rpc.sent.value += 1
                if audited is not None:
                    self._did(audited.what, context, audited.values(response))
                return response
            raise AssertionError("abort() raises")

        async def stream_stream(_: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            async with (
                self._call(method, rpc, enter, context),
                aclosing(handler.stream_stream(_Requests(context, rpc, deserialize, turns), context)) as responses,
            ):
                async for response in responses:
                    rpc.sent.value += 1
                    yield serialize(response)
                    del response  # it may be a view of what is kept, and the stream idle

        takes_stream = handler.request_streaming or gate is not None
        if handler.response_streaming:
            made: Any = stream_stream if handler.request_streaming else unary_stream
            kinds = (grpc.unary_stream_rpc_method_handler, grpc.stream_stream_rpc_method_handler)
        else:
            made = stream_unary if handler.request_streaming else unary
            kinds = (grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler)
        return kinds[takes_stream](made)

    def _did(self, what: str, context: Context, values: Mapping[str, object]) -> None:
        """Tell the audit what a call did."""
        assert self._audit is not None
        self._audit.done(what, current_principal().name, context.peer(), **values)

    @asynccontextmanager
    async def _call(
        self,
        method: str,
        rpc: RpcMetrics,
        enter: Enter | None,
        context: Context,
        traced: str | None = None,
        turns: Turns | None = None,
    ) -> AsyncIterator[Entered | None]:
        """Count a call, judge who it is from, let it wait for its turn, and trace it if its path is given; turn what it
        raises into its status."""
        begin_s, end_s, span, principal = time.perf_counter(), 0.0, None, None
        entered: Entered | None = None
        if self._tracing is not None and traced is not None:
            span = self._tracing.begin_call(traced, context.invocation_metadata())
        rpc.started.value += 1
        code = grpc.StatusCode.OK
        try:
            entered = None if enter is None else enter(context)
            principal = self._principals.admit(method, context)
            if self._identity is not None:
                self._identity.check(method, context)
            if turns is not None and (wait_s := turns.wait_s(None if principal is None else principal.number)):
                await asyncio.sleep(wait_s)
            yield entered
        except RequestError as error:
            self._metrics.refused(error.refusal.reason, 1)
            # Who was not let in may be known all the same: ROLE_MISSING says it.
            name = error.refusal.metadata.get("principal", "") if principal is None else principal.name
            if self._audit is not None:
                self._audit.refused(method, name, context.peer(), error.refusal.reason.name)
            if span is not None:
                span.refused(error.refusal)
            code = _CODES[error.refusal.reason.code]
            empty_frames(error)
            # Beyond the gate's limit nothing is kept: that takes places.
            if self._refusals is not None and (enter is None or entered is not None):
                end_s = time.perf_counter()
                hold_s = self._refusals.hold_s(name)
                if entered is None:
                    await cast(Any, context).hold(hold_s)
                else:
                    await entered.hold(hold_s, error.refusal.reason.code)
            await abort(context, error.refusal)
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.InternalError:  # the client left while it was answered
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.AbortError:  # a handler set its own status
            code = _CODES.get(cast("int", context.code()), grpc.StatusCode.UNKNOWN)
            raise
        except Exception as error:
            code = grpc.StatusCode.INTERNAL
            self._metrics.refused(Reason.BUG, 1)
            refusal = bug(error)
            empty_frames(error)
            await abort(context, refusal)
        finally:
            rpc.handled[code].value += 1
            rpc.seconds.observe((end_s or time.perf_counter()) - begin_s)
            if span is not None:
                span.end_call(code)
