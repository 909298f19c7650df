"""LayerService over a real channel: answers, errors as clients see them, and what a cancelled call leaves behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2, error_details_pb2
from rigs.layer_calls import HIDDEN, HeldEngine, detail, make_step, reason_of, refused, status_of
from rigs.limits import make_limits
from rigs.principals import as_anonymous
from rigs.scheduler_rig import Rig

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server import finite, step
from deltaline_server.app import Server
from deltaline_server.finite import checksum, finite_rows
from deltaline_server.front.identity import Identity
from deltaline_server.front.layer_service import LayerService
from deltaline_server.front.requests import Served
from deltaline_server.front.steps import stepping
from deltaline_server.front.trust.principals import Principals
from deltaline_server.front.trust.refusals import Refusals
from deltaline_server.front.trust.turns import Turns
from deltaline_server.memory.regions import Regions
from deltaline_server.step import RowKind, SpanShapes
from deltaline_server.tables import kept_replies


async def test_a_line_is_free_once_the_last_step_of_its_closed_sequence_is_answered() -> None:
    rig = Rig(slots=1, eager=False)
    shapes, regions = [SpanShapes(2, 4)], Regions(limit_bytes=0, default_lease_s=1, max_lease_s=1, clock=lambda: 0.0)
    served = Served(make_limits(), shapes, np.dtype(np.float32), regions)
    parts: dict[str, Any] = {"table": rig.table, "scheduler": rig.scheduler, "observer": rig.counts}
    parts |= {"principals": Principals(), "refusals": Refusals(lambda: rig.now), "turns": Turns(lambda: rig.now)}
    parts |= {"states": None, "passage": None, "identity": Identity()}
    service = LayerService(**parts, served=served, clock=lambda: rig.now)
    (handle,) = rig.open()
    step = rig.submit(rig.request((handle, RowKind.DECODE, 1, 0, -1, [1.0])))
    rig.close(handle)
    rig.engine.run()
    await step
    assert rig.table.num_open == 1  # answered, and not in the books yet
    context: Any = None
    as_anonymous()
    assert await service.open_sequences(pb.OpenSequencesRequest(count=1), context)
    service.stepping.close()


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_life_of_a_sequence(stub: Any) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=2, lease_ms=60_000))
    names = {"server_epoch": opened.server_epoch, "sequence": opened.sequence}
    assert (len(set(opened.sequence)), opened.lease_ms) == (2, 60_000)
    answer = await stub.Step(make_step(opened))
    again = await stub.Step(make_step(opened))
    assert list(answer.outcome) == [pb.ROW_OUTCOME_EXECUTED] * 2
    assert list(again.outcome) == [pb.ROW_OUTCOME_REPLAYED] * 2
    assert again.hidden == answer.hidden and not again.HasField("timing")
    assert (list(answer.position), list(answer.output_start_loc)) == ([1, 1], [0, 1, 2])
    assert wire.decode(answer.hidden, limit_bytes=10**6).shape == (2, HIDDEN)
    assert answer.timing.compute_ns > 0 and answer.timing.batch_rows == 2
    described = await stub.DescribeSequences(pb.DescribeSequencesRequest(**names))
    assert [item.sequence for item in described.sequences] == list(opened.sequence)
    assert [item.spans[0].step for item in described.sequences] == [1, 1]
    assert 0 < described.sequences[0].lease_remaining_ms <= 60_000
    renewed = await stub.RenewLeases(pb.RenewLeasesRequest(**names, lease_ms=60_000))
    assert list(renewed.state) == [pb.SEQUENCE_STATE_OPEN] * 2
    hidden = wire.encode(np.ones((6, HIDDEN), np.float32))
    verify = make_step(opened, 2, kind=[pb.ROW_KIND_VERIFY] * 2, query_start_loc=[0, 3, 6], hidden=hidden)
    assert list((await stub.Step(verify)).position) == [1, 1]
    committed = await stub.CommitSequences(pb.CommitSequencesRequest(**names, step=[2, 2], accepted=[2, 4]))
    assert list(committed.position) == [3, 1]
    assert [(row.row, reason_of(row.status)) for row in committed.row_status] == [(1, "ACCEPTED_OUT_OF_RANGE")]
    for _ in range(2):
        closed = await stub.CloseSequences(pb.CloseSequencesRequest(**names))
        assert list(closed.state) == [pb.SEQUENCE_STATE_CLOSED] * 2


async def test_rows_of_a_large_tensor_are_told_apart_by_a_thread(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a value that is not finite would stop the event loop, for seconds if the tensor is large enough."""
    monkeypatch.setattr(stepping, "LARGE_BYTES", 1)
    threads: list[str] = []

    def noted(values: Any, starts: Any) -> Any:
        threads.append(threading.current_thread().name)
        return finite_rows(values, starts)

    monkeypatch.setattr(finite, "finite_rows", noted)
    monkeypatch.delattr(step, "finite_rows")  # the loop's
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=2))
    request = make_step(opened)
    tokens = np.ones((2, HIDDEN), np.float32)
    tokens[1, 3] = np.inf
    request.hidden.CopyFrom(wire.encode(tokens))
    answer = await stub.Step(request)
    assert list(answer.outcome) == [pb.ROW_OUTCOME_EXECUTED, pb.ROW_OUTCOME_REFUSED]
    assert reason_of(answer.row_status[0].status) == "NON_FINITE_INPUT"
    assert len(threads) == 1 and threads[0].startswith("finite")


async def test_large_prefill_of_which_little_comes_back_is_kept_as_a_checksum_by_threads(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepping, "LARGE_BYTES", 1)
    for module in (step, kept_replies):
        monkeypatch.setattr(module, "WHOLE_REQUEST_BYTES", 16)
    threads: list[str] = []

    def noted(values: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return checksum(values)

    monkeypatch.setattr(finite, "checksum", noted)
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    tokens = np.random.default_rng(0).standard_normal((9, HIDDEN)).astype(np.float32)

    hidden = wire.encode(tokens)
    for number, output in enumerate((pb.OUTPUT_ROWS_LAST, pb.OUTPUT_ROWS_ALL)):
        prefill = make_step(
            opened,
            number + 1,
            kind=[pb.ROW_KIND_PREFILL],
            position=[9 * number],
            query_start_loc=[0, 9],
            hidden=hidden,
            output=output,
        )
        await stub.Step(prefill)
        # Where all outputs come back the request is kept whole, and needs none.
        assert len(threads) == 1 and threads[0].startswith("finite")


# -- errors ----------------------------------------------------------------------------------------------------------


async def test_faults_of_rows_are_row_statuses(stub: Any) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=3))
    step = make_step(opened, position=[0, 9, 2**64 - 1])
    step.step[2] = 2**64 - 1
    answer = await stub.Step(step)
    assert list(answer.outcome) == [pb.ROW_OUTCOME_EXECUTED, pb.ROW_OUTCOME_REFUSED, pb.ROW_OUTCOME_REFUSED]
    assert [(row.row, row.status.code, reason_of(row.status)) for row in answer.row_status] == [
        (1, code_pb2.FAILED_PRECONDITION, "POSITION_MISMATCH"),
        (2, code_pb2.OUT_OF_RANGE, "STEP_GAP"),
    ]
    assert detail(answer.row_status[0].status, error_details_pb2.ErrorInfo).metadata["position"] == "0"


async def test_refused_request_carries_its_details(stub: Any) -> None:
    error = await refused(stub.Step(pb.StepRequest(server_epoch=1, span=7)))
    status = status_of(error)
    assert (error.code(), status.code) == (grpc.StatusCode.INVALID_ARGUMENT, code_pb2.INVALID_ARGUMENT)
    assert (error.details(), reason_of(status)) == (status.message, "UNKNOWN_SPAN")
    violation = detail(status, error_details_pb2.BadRequest).field_violations[0]
    assert (violation.field, violation.description) == ("span", status.message)
    assert detail(status, error_details_pb2.RetryInfo) is None


async def test_lack_of_lines_says_when_to_retry(stub: Any) -> None:
    await stub.OpenSequences(pb.OpenSequencesRequest(count=8))
    error = await refused(stub.OpenSequences(pb.OpenSequencesRequest(count=1)))
    status = status_of(error)
    delay = detail(status, error_details_pb2.RetryInfo).retry_delay
    assert (error.code(), reason_of(status)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_FREE_LINES")
    pushback_ms = int(str(dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"]))
    assert pushback_ms == delay.ToMilliseconds() > 0


async def test_malformed_message_is_an_invalid_request(channel: Any) -> None:
    error = await refused(channel.unary_unary("/deltaline.v1.LayerService/Step")(b"\x0a\xff\xff"))
    assert (error.code(), reason_of(status_of(error))) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


async def test_bug_reaches_the_client_as_an_id_only(
    server: Server, stub: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("secret in /srv/secret")

    monkeypatch.setattr(server.runtime.table, "describe", fail)
    error = await refused(stub.DescribeSequences(pb.DescribeSequencesRequest(server_epoch=1, sequence=[1])))
    status = status_of(error)
    error_id = detail(status, error_details_pb2.ErrorInfo).metadata["id"]
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, f"internal error {error_id}")
    assert "secret" not in str(error.trailing_metadata())
    record = next(record for record in caplog.records if error_id in record.getMessage())
    assert record.exc_info is not None and "secret" in str(record.exc_info[1])


# -- cancellation and deadlines --------------------------------------------------------------------------------------


async def test_cancelled_step_is_applied_and_its_reply_kept(server: Server, stub: Any, engine: HeldEngine) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    call = stub.Step(make_step(opened))
    await engine.holds_one()
    call.cancel()
    await asyncio.sleep(0.05)
    assert server.runtime.scheduler.load().queued_rows == 1
    engine.release()
    answer = await stub.Step(make_step(opened))
    assert list(answer.outcome) in ([pb.ROW_OUTCOME_REPLAYED], [pb.ROW_OUTCOME_JOINED])
    assert (list(answer.position), list(answer.hidden.shape)) == ([1], [1, HIDDEN])


async def test_step_whose_rpc_deadline_passed_in_the_queue_is_not_run(stub: Any, engine: HeldEngine) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=3))
    first = stub.Step(make_step(opened, rows=slice(0, 1)))
    await engine.holds_one()
    beside = stub.Step(make_step(opened, rows=slice(1, 2)))
    await engine.holds_two()
    second = make_step(opened, rows=slice(2, 3))
    error = await refused(stub.Step(second, timeout=0.05))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.sleep(0.2)  # by the server's clock it passes later
    engine.release()
    await asyncio.gather(first, beside)
    assert list((await stub.Step(second)).outcome) == [pb.ROW_OUTCOME_EXECUTED]


async def test_compressed_messages_are_refused(stub: Any) -> None:
    """A small one could unfold to any size."""
    request = pb.OpenSequencesRequest(count=1, open_token=bytes(2**16))
    error = await refused(stub.OpenSequences(request, compression=grpc.Compression.Gzip))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
