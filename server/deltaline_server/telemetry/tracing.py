"""Traces: spans of calls, of the stages of their steps and of batches, made with OpenTelemetry's SDK.

Imported only where traces are asked for. A step's span is a child of its caller's (W3C traceparent). The stages of a
step are children of its span, as often as batches took a part of it. Their `compute` links to the span of the batch,
which links to those of all its steps and is the root of a trace of its own, since a batch is nobody's alone. Whether a
call is recorded is the sampler's to say (OTEL_TRACES_SAMPLER); a batch is when one of its steps is.

Spans are made on the event loop once their times are known, and put into a bounded queue; a thread of the SDK sends
them, and what finds the queue full is dropped.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Token
from typing import Any

import grpc
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deltaline_server import __version__
from deltaline_server.errors import Refusal
from deltaline_server.scheduling.observer import BatchTiming, Observer
from deltaline_server.scheduling.scheduled_rows import ScheduledRows
from deltaline_server.step import RowOutcome, StepRequest, StepResult

_log = logging.getLogger(__name__)

_W3C = TraceContextTextMapPropagator()
# The most that is looked at, and what W3C has a member of a tracestate be: the SDK logs what else it finds, and a
# client's words are not for the log.
_MOST_CHARACTERS = {"traceparent": 512, "tracestate": 8192}
_MOST_MEMBERS = 32
_MEMBER = re.compile(
    r"(?P<key>[a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
# Spans that are sent at once. The thread that sends them holds the interpreter while it writes them.
SENT_AT_ONCE = 64
# How long the end of the server waits for what is not sent yet.
FLUSH_S = 2.0
# What a server, by OpenTelemetry's conventions, answers for: other codes are the caller's mistakes.
_SERVERS_FAULTS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}

Answer = Callable[[StepResult | Refusal], None]
Metadata = Iterable[tuple[str, Any]] | None


class Tracing:
    """Makes the spans of one server."""

    def __init__(
        self, processor: SpanProcessor, clock: Callable[[], float], give_up: Callable[[], None] = lambda: None
    ) -> None:
        """processor: gets all spans. clock: the scheduler's, monotonic seconds. give_up: lets the processor's end wait
        for nothing more; from any thread."""
        self._processor, self._clock, self._give_up, self._is_closed = processor, clock, give_up, False
        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "deltaline"}))
        calls = TracerProvider(resource=resource, shutdown_on_exit=False)
        batches = TracerProvider(resource=resource, sampler=ALWAYS_ON, shutdown_on_exit=False)
        for provider in (calls, batches):
            provider.add_span_processor(processor)
        self._calls, self._batches = (provider.get_tracer("deltaline", __version__) for provider in (calls, batches))

    @classmethod
    def to_collector(cls, endpoint: str, clock: Callable[[], float]) -> Tracing:
        """Send the spans to a collector, OTLP over gRPC; one that can't be reached costs spans and log lines only."""
        exporter = OTLPSpanExporter(endpoint=endpoint)
        return cls(BatchSpanProcessor(exporter, max_export_batch_size=SENT_AT_ONCE), clock, exporter.shutdown)

    def close(self) -> None:
        """Send what is not sent yet, for FLUSH_S at most, and end the thread. Blocks. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            timer = threading.Timer(FLUSH_S, self._give_up)
            timer.start()
            self._processor.shutdown()
            timer.cancel()

    def begin_call(self, method: str, metadata: Metadata) -> CallSpan:
        """Begin the span of a call, and make it the current one: of log lines, and of `current`. method: its path."""
        return CallSpan(self._begin(method, parent_of(metadata)), is_current=True)

    def begin_stream(self, method: str, metadata: Metadata) -> Callable[[bytes], CallSpan]:
        """What begins the span of each step on a stream, given the step's own traceparent, empty for the stream's."""
        of_stream = parent_of(metadata)

        def begin_step(traceparent: bytes) -> CallSpan:
            own = parent_of([("traceparent", traceparent.decode("ascii", "replace"))]) if traceparent else of_stream
            is_valid = trace.get_current_span(own).get_span_context().is_valid
            return CallSpan(self._begin(method, own if is_valid else of_stream), is_current=False)

        return begin_step

    def take(self, step: StepRequest) -> None:
        """Let the current call's span be the step's, if it is recorded. Mutates the step."""
        span = trace.get_current_span()
        if span.is_recording():
            step.trace = span
            describe_request(span, step)

    def tell(self, result: StepResult) -> None:
        """Say on the current call's span what became of its step."""
        span = trace.get_current_span()
        if span.is_recording():
            describe_result(span, result)

    def observer(self, inner: Observer) -> Observer:
        """An observer that passes everything on to `inner`, and makes the spans of batches."""
        return _TracedObserver(inner, self)

    def batch(self, timing: BatchTiming, traced: Sequence[ScheduledRows]) -> None:
        """Make the spans of a batch, of which these rows' steps are recorded, and of their stages.

        The stages of a batch are laid end to end from when the device came to it: that they took so long is measured,
        when each began is not.
        """
        offset_ns = time.time_ns() - round(self._clock() * 1e9)
        times_ns = [offset_ns + round(timing.began_s * 1e9)]
        for seconds in (timing.copy_in_s, timing.compute_s, timing.copy_out_s):
            times_ns.append(times_ns[-1] + round(seconds * 1e9))
        steps: dict[int, ScheduledRows] = {id(rows.pending): rows for rows in traced}
        batch = self._batches.start_span(
            "batch",
            context=Context(),
            start_time=times_ns[0],
            links=[Link(_span_of(rows).get_span_context()) for rows in steps.values()],
            attributes={
                "deltaline.span": traced[0].pending.span,
                "deltaline.rows": sum(timing.num_of_kind.values()),
                "deltaline.tokens": timing.num_tokens,
                **{f"deltaline.rows.{kind.name.lower()}": n for kind, n in timing.num_of_kind.items() if n},
            },
        )
        batch.end(times_ns[-1])
        link = [Link(batch.get_span_context())]
        for key, rows in steps.items():
            parent = trace.set_span_in_context(_span_of(rows), Context())
            if timing.began_s - rows.pending.arrival_s == rows.pending.timing.queue_s:  # its first batch (batch.py)
                arrival_ns = offset_ns + round(rows.pending.arrival_s * 1e9)
                self._calls.start_span("queue", parent, start_time=arrival_ns).end(times_ns[0])
            tokens = sum(int(other.lengths.sum()) for other in traced if id(other.pending) == key)
            self._calls.start_span("copy_in", parent, start_time=times_ns[0]).end(times_ns[1])
            attributes = {"deltaline.tokens": tokens}
            self._calls.start_span("compute", parent, start_time=times_ns[1], links=link, attributes=attributes).end(
                times_ns[2]
            )
            self._calls.start_span("copy_out", parent, start_time=times_ns[2]).end(times_ns[3])

    def _begin(self, method: str, parent: Context) -> Span:
        service, _, name = method.removeprefix("/").partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        return self._calls.start_span(f"{service}/{name}", parent, SpanKind.SERVER, attributes)


class CallSpan:
    """The span of a call or of a step on a stream, until it ends."""

    def __init__(self, span: Span, *, is_current: bool) -> None:
        """is_current: it is the current one of its task from now until it ends; else within `with` blocks of it."""
        self.span = span
        self._token: Token[Context] | None = None
        if is_current:
            self.__enter__()

    def __enter__(self) -> None:
        self._token = contexts.attach(trace.set_span_in_context(self.span))

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            contexts.detach(self._token)
            self._token = None

    def ending(self, step: StepRequest | Refusal, answer: Answer) -> Answer:
        """What takes the place of `answer`: it ends the span as well. Mutates the step, whose trace is the span."""
        if isinstance(step, StepRequest) and self.span.is_recording():
            step.trace = self.span
            describe_request(self.span, step)

        def done(result: StepResult | Refusal) -> None:
            answer(result)
            with _harmless():
                if isinstance(result, Refusal):
                    self.refused(result)
                    self.end(_CODES[result.reason.code])
                else:
                    describe_result(self.span, result)
                    self.end(grpc.StatusCode.OK)

        return done

    def refused(self, refusal: Refusal) -> None:
        """Say why the whole call, or the whole step, was refused."""
        self.span.set_attribute("deltaline.reasons", [refusal.reason.name])

    def end_call(self, code: grpc.StatusCode) -> None:
        """End the span of a call that was current, with the status of its RPC."""
        with _harmless():
            self.end(code)
        self.__exit__()

    def end(self, code: grpc.StatusCode) -> None:
        """End the span with the status of its RPC, or the one that its step would have alone."""
        self.span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code in _SERVERS_FAULTS:
            self.span.set_status(StatusCode.ERROR, code.name)
        self.span.end()


class _TracedObserver:
    """See Tracing.observer."""

    def __init__(self, inner: Observer, tracing: Tracing) -> None:
        self._inner, self._tracing = inner, tracing
        self.steps, self.refused, self.drafts, self.accepted = inner.steps, inner.refused, inner.drafts, inner.accepted

    def batch_done(self, timing: BatchTiming) -> None:
        """Count a batch, and trace it if a step of it is."""
        self._inner.batch_done(timing)
        with _harmless():
            traced = [rows for rows in timing.scheduled if rows.pending.request.trace is not None]
            if traced:
                self._tracing.batch(timing, traced)


@contextmanager
def _harmless() -> Iterator[None]:
    """Log what goes wrong with a trace: a step's answer, and the scheduler, have to go on."""
    try:
        yield
    except Exception:
        _log.exception("a trace could not be made")


def parent_of(metadata: Metadata) -> Context:
    """The context that a call's metadata name, an empty one where they name none or are malformed. A tracestate that is
    malformed counts as absent."""
    headers = {
        key: value
        for key, value in metadata or ()
        if isinstance(value, str) and len(value) <= _MOST_CHARACTERS.get(key, -1)
    }
    if not _is_state(headers.get("tracestate", "")):
        del headers["tracestate"]
    return _W3C.extract(headers, Context())


def _is_state(text: str) -> bool:
    """Whether a tracestate is as W3C has it, so that the SDK takes it without a word."""
    members = [_MEMBER.fullmatch(member) for part in text.split(",") if (member := part.strip(" \t"))]
    keys = {member["key"] for member in members if member is not None}
    return len(keys) == len(members) <= _MOST_MEMBERS


def describe_request(span: Span, step: StepRequest) -> None:
    """Say what a step asks. Nothing names a sequence."""
    form = step.form
    span.set_attributes({"deltaline.span": form.span, "deltaline.rows": form.num_rows})
    span.set_attribute("deltaline.tokens", int(form.query_start_loc[-1]))


def describe_result(span: Span, result: StepResult) -> None:
    """Say what became of a step's rows: how many by outcome, and why some were refused."""
    outcomes = result.outcome.tobytes()
    counts = {f"deltaline.rows.{outcome.name.lower()}": outcomes.count(outcome) for outcome in RowOutcome}
    span.set_attributes({name: count for name, count in counts.items() if count})
    if result.refusals:
        reasons = sorted({refusal.reason.name for refusal in result.refusals.values()})
        span.set_attribute("deltaline.reasons", reasons)


def _span_of(rows: ScheduledRows) -> Span:
    span = rows.pending.request.trace
    assert isinstance(span, Span)
    return span
