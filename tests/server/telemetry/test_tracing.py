"""Traces: whose child each span is, what links to what, whose the times are; and that no step depends on them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed: it makes the traces")
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from rigs.layer_calls import HeldEngine

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import layer_service_pb2_grpc
from deltaline_client import AsyncClient, Client
from deltaline_server import app
from deltaline_server.app import Server
from deltaline_server.config import Config, ConfigError
from deltaline_server.front.steps import stepping
from deltaline_server.log import JsonFormatter
from deltaline_server.telemetry.collector import begin_tracing
from deltaline_server.telemetry.tracing import Tracing, parent_of

HIDDEN = 32
STEP, STREAM = "deltaline.v1.LayerService/Step", "deltaline.v1.LayerService/StepStream"
STAGES = ["queue", "copy_in", "compute", "copy_out"]
TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
HEADER = f"00-{TRACE:032x}-{PARENT:016x}-01"


class Spans:
    """What a server has exported, by name."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()  # type: ignore[no-untyped-call,unused-ignore]

    async def all(self, batches: int) -> list[ReadableSpan]:
        """All spans, once there are so many batches: the last ones are made after the reply."""
        for _ in range(500):
            spans = list(self.exporter.get_finished_spans())
            if sum(span.name == "batch" for span in spans) >= batches:
                return spans
            await asyncio.sleep(0.01)
        raise AssertionError(f"expected {batches} batches among {[span.name for span in spans]}")


def named(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.trace_id)


def children(spans: list[ReadableSpan], parent: ReadableSpan) -> list[ReadableSpan]:
    """In the order of their beginnings."""
    found = [span for span in spans if span.parent is not None and span.parent.span_id == id_of(parent)]
    return sorted(found, key=lambda span: (span.start_time or 0, STAGES.index(span.name)))


def links(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


def prefill(opened: pb.OpenSequencesResponse, tokens: int = 5, step: int = 1) -> pb.StepRequest:
    count = len(opened.sequence)
    return pb.StepRequest(
        server_epoch=opened.server_epoch,
        sequence=opened.sequence,
        kind=[pb.ROW_KIND_PREFILL] * count,
        step=[step] * count,
        position=[0] * count,
        query_start_loc=list(range(0, tokens * count + 1, tokens)),
        hidden=wire.encode(np.ones((tokens * count, HIDDEN), np.float32)),
    )


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def processor(spans: Spans) -> SpanProcessor:
    return SimpleSpanProcessor(spans.exporter)


@pytest.fixture
async def server(
    make_server: Callable[..., Server], processor: SpanProcessor, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Server]:
    """A server whose spans stay in memory."""
    monkeypatch.setattr(app, "begin_tracing", lambda config, clock: Tracing(processor, clock))
    async with make_server(chunk_tokens=64, inline_limit_bytes=1 << 20) as server:
        yield server


async def test_a_call_s_step_is_its_callers_and_has_every_stage(server: Server, stub: Any, spans: Spans) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    begin_ns = time.time_ns()
    response = await stub.Step(prefill(opened), metadata=(("traceparent", HEADER),))
    found = await spans.all(batches=1)
    [opening] = named(found, "deltaline.v1.LayerService/OpenSequences")
    assert opening.parent is None and trace_of(opening) != TRACE
    [step] = named(found, STEP)
    assert step.kind is SpanKind.SERVER and step.parent is not None
    assert (trace_of(step), step.parent.span_id) == (TRACE, PARENT)
    assert step.attributes == {
        "rpc.system": "grpc",
        "rpc.service": "deltaline.v1.LayerService",
        "rpc.method": "Step",
        "rpc.grpc.status_code": 0,
        "deltaline.span": 0,
        "deltaline.rows": 1,
        "deltaline.tokens": 5,
        "deltaline.rows.executed": 1,
    }
    stages = children(found, step)
    assert [stage.name for stage in stages] == STAGES
    assert {trace_of(stage) for stage in stages} == {TRACE}
    assert [stage.end_time for stage in stages[:-1]] == [stage.start_time for stage in stages[1:]]
    times = [stage.start_time or 0 for stage in stages] + [stages[-1].end_time or 0]
    assert begin_ns <= times[0] <= times[-1] <= time.time_ns()
    told = [getattr(response.timing, f"{stage}_ns") * 1e-9 for stage in STAGES]
    assert [(b - a) / 1e9 for a, b in itertools.pairwise(times)] == pytest.approx(told, abs=2e-6)
    [batch] = named(found, "batch")
    assert batch.parent is None and trace_of(batch) != TRACE
    assert links(batch) == {id_of(step)} and links(stages[2]) == {id_of(batch)}
    assert (batch.start_time, batch.end_time) == (times[1], times[-1])
    assert batch.attributes == {
        "deltaline.span": 0,
        "deltaline.rows": 1,
        "deltaline.tokens": 5,
        "deltaline.rows.prefill": 1,
    }


async def test_a_step_of_several_batches_links_to_each(server: Server, stub: Any, spans: Spans) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    await stub.Step(prefill(opened, tokens=150))
    found = await spans.all(batches=3)
    [step] = named(found, STEP)
    stages = children(found, step)
    assert [stage.name for stage in stages] == [*STAGES, *STAGES[1:], *STAGES[1:]]
    computes = named(stages, "compute")
    assert [(stage.attributes or {})["deltaline.tokens"] for stage in computes] == [64, 64, 22]
    assert [links(stage) for stage in computes] == [{id_of(batch)} for batch in named(found, "batch")]


async def test_a_step_waits_once_though_its_rows_begin_in_several_batches(
    server: Server, stub: Any, spans: Spans
) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=3))
    response = await stub.Step(prefill(opened, tokens=48))
    found = await spans.all(batches=3)
    [step] = named(found, STEP)
    stages = children(found, step)
    assert [stage.name for stage in stages] == [*STAGES, *STAGES[1:], *STAGES[1:]]
    computed = sum((stage.end_time or 0) - (stage.start_time or 0) for stage in named(stages, "compute")) * 1e-9
    assert response.timing.compute_ns * 1e-9 == pytest.approx(computed, abs=1e-5), "once a batch, not once a row"


def root(name: str) -> Any:
    """A span of the caller's own, as the current one within a block."""
    return TracerProvider(shutdown_on_exit=False).get_tracer("test").start_as_current_span(name)


async def test_steps_on_one_stream_are_each_their_callers(
    server: Server, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(server.address) as client:
        first, second, third = await client.open_many(3)
        token = np.ones((1, HIDDEN), np.float32)
        await third.prefill(token)

        async def traced(sequence: Any) -> tuple[int, int]:
            with root("caller") as span:
                await sequence.prefill(token)
                context = span.get_span_context()
            return context.trace_id, context.span_id

        # Chunks of a long prefill are held when they come, so that one batch has both.
        engine = HeldEngine(server, monkeypatch)
        prefill = asyncio.create_task(third.prefill(np.ones((400, HIDDEN), np.float32)))
        await engine.holds_two()
        calls = asyncio.gather(traced(first), traced(second))
        for _ in range(5000):
            if server.runtime.scheduler.load().queued_rows == 3:
                break
            await asyncio.sleep(0.001)
        engine.release()
        callers, _ = await calls, await prefill
        with root("opener") as opener:
            await client.open()
    found = await spans.all(batches=1 + 7)
    steps = named(found, STREAM)
    of_callers = [step for step in steps if step.parent is not None]
    assert {(trace_of(step), step.parent.span_id) for step in of_callers if step.parent} == set(callers)
    assert len({trace_of(step) for step in steps}) == len(steps) == 4, "what nobody traces has a trace of its own"
    for batch in named(found, "batch"):
        computed = [span for span in named(found, "compute") if links(span) == {id_of(batch)}]
        assert links(batch) == {span.parent.span_id for span in computed if span.parent}
    together = [batch for batch in named(found, "batch") if links(batch) >= {id_of(step) for step in of_callers}]
    assert len(together) == 1
    assert opener.get_span_context().trace_id in {
        trace_of(span) for span in named(found, "deltaline.v1.LayerService/OpenSequences")
    }


async def test_the_client_for_threads_says_whose_its_calls_are(server: Server, spans: Spans) -> None:
    def use() -> int:
        with Client(server.address) as client:
            sequence = client.open()
            with root("caller") as span:
                sequence.prefill(np.ones((2, HIDDEN), np.float32))
                sequence.close()
            return int(span.get_span_context().trace_id)

    caller = await asyncio.to_thread(use)
    found = await spans.all(batches=1)
    of_caller = {span.name for span in found if trace_of(span) == caller}
    close, info = "deltaline.v1.LayerService/CloseSequences", "deltaline.v1.AdminService/GetServerInfo"
    assert of_caller == {STREAM, *STAGES, close, info}


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\x7f" * 55, "é" * 55])
async def test_a_malformed_trace_is_no_trace(server: Server, stub: Any, spans: Spans, header: str) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    request = pb.StepStreamRequest(correlation_id=1, step=prefill(opened), traceparent=header.encode())
    responses = [response async for response in stub.StepStream(iter([request]))]
    assert [response.step.outcome for response in responses] == [[pb.ROW_OUTCOME_EXECUTED]]
    [step] = named(await spans.all(batches=1), STREAM)
    assert step.parent is None


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("a=1,b@c= 2 ", "a=1,b@c= 2"),
        ("\t, a=1 ,,", "a=1"),
        ("secret words", ""),
        ("a=1,a=2", ""),
        (",".join(f"k{i}=v" for i in range(33)), ""),
        ("k@" * 4000, ""),
        ("a=" + "x" * 9000, ""),
        ("é=1", ""),
    ],
)
def test_what_a_client_says_of_its_trace_is_not_logged(state: str, kept: str, caplog: pytest.LogCaptureFixture) -> None:
    parent = trace.get_current_span(parent_of([("traceparent", HEADER), ("tracestate", state)])).get_span_context()
    assert (parent.trace_id, parent.trace_state.to_header()) == (TRACE, kept)
    assert not trace.get_current_span(parent_of([("traceparent", HEADER + " " * 1000)])).get_span_context().is_valid
    assert not trace.get_current_span(parent_of([("tracestate", state)])).get_span_context().is_valid
    assert caplog.text == ""


async def test_of_a_stream_the_metadata_count_where_a_step_has_nothing(server: Server, stub: Any, spans: Spans) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    request = pb.StepStreamRequest(correlation_id=1, step=prefill(opened))
    assert [True async for _ in stub.StepStream(iter([request]), metadata=(("traceparent", HEADER),))] == [True]
    [step] = named(await spans.all(batches=1), STREAM)
    assert (trace_of(step), step.parent and step.parent.span_id) == (TRACE, PARENT)


async def test_what_the_caller_does_not_sample_is_not_recorded(server: Server, stub: Any, spans: Spans) -> None:
    metadata = (("traceparent", HEADER.removesuffix("01") + "00"),)
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1), metadata=metadata)
    await stub.Step(prefill(opened), metadata=metadata)
    await stub.CloseSequences(pb.CloseSequencesRequest(server_epoch=opened.server_epoch, sequence=opened.sequence))
    assert [span.name for span in await spans.all(batches=0)] == ["deltaline.v1.LayerService/CloseSequences"]


async def test_a_batch_is_recorded_for_its_steps_whatever_the_sampler_makes_of_roots(
    make_server: Callable[..., Server], processor: SpanProcessor, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "begin_tracing", lambda config, clock: Tracing(processor, clock))
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    async with make_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        first, second = [await stub.OpenSequences(pb.OpenSequencesRequest(count=1)) for _ in range(2)]
        await stub.Step(prefill(first))
        await stub.Step(prefill(second), metadata=(("traceparent", HEADER),))
        found = await spans.all(batches=1)
    assert sorted(span.name for span in found) == sorted(["batch", STEP, *STAGES])


async def test_refusals_and_bugs_are_told(
    server: Server,
    stub: Any,
    spans: Spans,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    await stub.Step(prefill(opened, step=3))
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Step(pb.StepRequest())
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(caplog.handler, "emit", lambda record: lines.append(json.loads(JsonFormatter().format(record))))

    def planted(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(server.runtime.scheduler, "submit", planted)
    monkeypatch.setattr(stepping, "LARGE_BYTES", 1 << 30)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Step(prefill(opened))
    request = pb.StepStreamRequest(correlation_id=1, step=prefill(opened), traceparent=HEADER.encode())
    responses = [response async for response in stub.StepStream(iter([request]))]
    assert responses[0].status.code == grpc.StatusCode.INTERNAL.value[0]
    gap, invalid, bug = named(found := await spans.all(batches=0), STEP)
    [of_stream] = named(found, STREAM)
    attributes = [dict(span.attributes or {}) for span in (gap, invalid, bug, of_stream)]
    assert [one.get("deltaline.reasons") for one in attributes] == [("STEP_GAP",), ("INVALID_REQUEST",), None, ("BUG",)]
    assert [one["rpc.grpc.status_code"] for one in attributes] == [0, 3, 13, 13]
    assert attributes[0]["deltaline.rows.refused"] == 1
    is_error = [span.status.status_code is StatusCode.ERROR for span in (gap, invalid, bug, of_stream)]
    assert is_error == [False, False, True, True], "mistakes of the caller are no errors of the server"
    told = [(line["trace_id"], line["span_id"]) for line in lines if line["message"].startswith("internal error")]
    assert told == [(f"{trace_of(span):032x}", f"{id_of(span):016x}") for span in (bug, of_stream)]


async def test_a_trace_that_fails_is_no_harm_to_its_step(
    server: Server, processor: SpanProcessor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(server.address) as client:
        sequence = await client.open()

        def planted(span: ReadableSpan) -> None:
            raise ZeroDivisionError("planted")

        monkeypatch.setattr(processor, "on_end", planted)
        for _ in range(3):
            await sequence.decode(np.ones(HIDDEN, np.float32))
        assert "a trace could not be made" in caplog.text and not server.runtime.scheduler.has_failed
        monkeypatch.undo()


class Collector:
    """A collector that keeps what it gets, OTLP over gRPC."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.server = grpc.server(futures.ThreadPoolExecutor(1))
        method = grpc.unary_unary_rpc_method_handler(
            self.export,
            trace_service_pb2.ExportTraceServiceRequest.FromString,
            trace_service_pb2.ExportTraceServiceResponse.SerializeToString,
        )
        name = "opentelemetry.proto.collector.trace.v1.TraceService"
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": method}),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_a_collector_has_all_spans_when_the_server_has_stopped(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    collector = Collector()
    async with (
        make_server(otlp_endpoint=f"http://127.0.0.1:{collector.port}") as server,
        AsyncClient(server.address) as client,
    ):
        sequence = await client.open()
        for _ in range(30):
            await sequence.decode(np.ones(HIDDEN, np.float32))
    collector.server.stop(None)
    names: dict[str, int] = {}
    resources = [resource for request in collector.requests for resource in request.resource_spans]
    for span in (span for resource in resources for scope in resource.scope_spans for span in scope.spans):
        names[span.name] = names.get(span.name, 0) + 1
    assert {name: names[name] for name in (STREAM, "batch", *STAGES)} == dict.fromkeys((STREAM, "batch", *STAGES), 30)
    told = {attribute.key: attribute.value.string_value for attribute in resources[0].resource.attributes}
    assert (told["service.name"], told["deployment.environment.name"]) == ("deltaline", "test")


async def test_a_collector_that_is_not_there_holds_nothing_up(make_server: Callable[..., Server]) -> None:
    async with make_server(otlp_endpoint="http://127.0.0.1:1") as server, AsyncClient(server.address) as client:
        sequence = await client.open()
        for _ in range(20):
            await sequence.decode(np.ones(HIDDEN, np.float32))
        assert sequence.position == 20
        await asyncio.wait_for(server.stop(), 60)


async def test_the_sdk_may_be_disabled(make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    async with make_server(otlp_endpoint="http://127.0.0.1:1") as server, AsyncClient(server.address) as client:
        sequence = await client.open()
        output = await sequence.decode(np.ones(HIDDEN, np.float32))
        assert np.isfinite(output).all() and sequence.position == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "10"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "none such"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/"),
    ],
)
def test_settings_that_the_sdk_refuses_are_one_line(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^--otlp-endpoint: OpenTelemetry refuses its settings \(OTEL_\*\): "):
        begin_tracing(Config(random_init="x", otlp_endpoint="https://127.0.0.1:1"), time.monotonic)


def test_settings_that_the_sdk_refuses_when_it_is_imported_are_one_line() -> None:
    program = """\
import time
from deltaline_server.telemetry.collector import begin_tracing
from deltaline_server.config import Config
begin_tracing(Config(random_init="x", otlp_endpoint="http://127.0.0.1:1"), time.monotonic)
"""
    environment = {**os.environ, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "-1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert "ConfigError: --otlp-endpoint: OpenTelemetry refuses its settings" in done.stderr.splitlines()[-1]


def test_without_traces_nothing_of_them_is_imported() -> None:
    program = "\n".join(
        [
            "import sys",
            "sys.modules['opentelemetry'] = None",
            "from deltaline_server.app import Server",
            "from deltaline_server.telemetry.collector import begin_tracing",
            "from deltaline_server.config import Config, ConfigError",
            "assert begin_tracing(Config(random_init='x'), lambda: 0.0) is None",
            "try: begin_tracing(Config(random_init='x', otlp_endpoint='http://x:1'), lambda: 0.0)",
            "except ConfigError as error: print(error)",
            "from deltaline_client import Client",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "--otlp-endpoint: opentelemetry is missing: pip install 'deltaline[otel]'\n"
