"""A small server with the rules of steps (replay, commits, refusals), and both clients on it.

Its layer is a running sum: the output at a token is the sum of all committed tokens up to and with it, so a token lost,
repeated or reordered shows. Faults are queued per method: each is used up by one call.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from numpy.typing import NDArray
from rigs.running_states import FakeStates, opened_from

from deltaline import wire
from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import admin_service_pb2_grpc, layer_service_pb2_grpc, state_service_pb2_grpc, tensor_pb2
from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client import AsyncClient, Client, Retry
from deltaline_server.errors import Reason

HIDDEN = 8


def tokens(count: int, seed: int = 0) -> NDArray[Any]:
    """Small integers, so that sums are exact in every type."""
    return np.random.default_rng(seed).integers(-2, 3, (count, HIDDEN)).astype(np.float32)


def status_of(
    reason: Reason, retry_after_s: float | None = None, step: int = 7, position: int | None = None
) -> status_pb2.Status:
    """The status that the service sends for a reason."""
    status = status_pb2.Status(code=reason.code, message=f"refused: {reason.name}")
    metadata = {"step": str(step)} | ({} if position is None else {"position": str(position)})
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason.name, domain="deltaline", metadata=metadata))
    if retry_after_s is not None:
        retry_info = error_details_pb2.RetryInfo()
        retry_info.retry_delay.FromNanoseconds(round(retry_after_s * 1e9))
        status.details.add().Pack(retry_info)
    return status


def _abort(status: status_pb2.Status, context: Any) -> None:
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    codes = {code.value[0]: code for code in grpc.StatusCode}
    context.abort(codes[status.code], status.message)


@dataclass
class Fault:
    """What goes wrong with one call.

    status: the RPC ends with it, and nothing runs. lost: it runs, then the RPC ends with this code and no details.
    rows: these rows are refused. hang: it runs, and it sets `arrived`, and the reply waits for `released`. before: what
    happens first.
    """

    status: status_pb2.Status | None = None
    lost: grpc.StatusCode | None = None
    rows: dict[int, status_pb2.Status] = field(default_factory=dict)
    hang: bool = False
    before: Callable[[], object] = lambda: None


@dataclass
class Stream:
    """One (sequence, span)."""

    step: int = 0
    position: int = 0
    total: NDArray[np.float64] = field(default_factory=lambda: np.zeros(HIDDEN))
    drafts: NDArray[Any] | None = None
    fixed: int | None = None
    content: tuple[Any, ...] = ()
    reply: NDArray[Any] | None = None

    def commit(self, accepted: int) -> None:
        assert self.drafts is not None
        self.total = self.total + self.drafts[:accepted].astype(np.float64).sum(axis=0)
        self.position += accepted
        self.drafts, self.fixed = None, accepted


class FakeServer(layer_service_pb2_grpc.LayerServiceServicer, admin_service_pb2_grpc.AdminServiceServicer):
    """The fake's state; everything in it may be looked at and set by a test."""

    def __init__(self, server_epoch: int = 77) -> None:
        self.info = admin.GetServerInfoResponse(
            server_epoch=server_epoch,
            version="0.1.0",
            model_type="fake",
            spans=[admin.LayerSpan(first=0, count=2), admin.LayerSpan(first=2, count=2)],
            scope=admin.SCOPE_BLOCK,
            hidden_size=HIDDEN,
            dtype=tensor_pb2.DATA_TYPE_FLOAT32,
            state_dtype=tensor_pb2.DATA_TYPE_FLOAT32,
            max_sequences=16,
            max_draft_tokens=4,
            max_steps_in_flight=8,
            inline_limit_bytes=4096,
            default_lease_ms=60_000,
            max_lease_ms=600_000,
            device="cpu",
            versions={"numpy": "2"},
            serves_state=True,
            snapshot_lines=4,
        )
        self.load = admin.GetLoadResponse(lines_total=16)
        # What happens before each GetLoad, as long as there is something.
        self.before_loads: deque[Callable[[], object]] = deque()
        self.streams: dict[int, dict[int, Stream]] = {}
        self.opened: dict[bytes, list[int]] = {}
        # Contents by name, and the names of sequences.
        self.adapters: dict[str, bytes] = {}
        self.bound: dict[int, str] = {}
        # Where those live that were moved from here, and the servers that they may be moved to.
        self.moved: dict[int, layers.MovedSequence] = {}
        self.targets: dict[str, FakeServer] = {}
        self.handles = count(1000 * server_epoch)
        self.faults: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self.requests: defaultdict[str, list[Any]] = defaultdict(list)
        self.streams_opened = 0
        # Why no state is left at a position.
        self.skips: dict[int, str] = {}
        self.script: Callable[[Any, Any], Iterator[Any]] | None = None
        self.make_region: Callable[[Any, Any], admin.CreateSharedMemoryResponse] | None = None
        self.arrived, self.released = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        self.server = grpc.server(futures.ThreadPoolExecutor(32))
        layer_service_pb2_grpc.add_LayerServiceServicer_to_server(self, self.server)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(self, self.server)
        self.states = FakeStates(self)
        state_service_pb2_grpc.add_StateServiceServicer_to_server(self.states, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def refuse(self, method: str, reason: Reason, retry_after_s: float | None = None) -> None:
        """The next call of a method is refused as a whole."""
        self.faults[method].append(Fault(status=status_of(reason, retry_after_s)))

    def refuse_rows(self, rows: dict[int, Reason], retry_after_s: float | None = None, method: str = "Step") -> None:
        """These rows of the next call are refused."""
        self.faults[method].append(Fault(rows={row: status_of(rows[row], retry_after_s) for row in rows}))

    def lose(self, method: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """The next call takes effect, and its answer is lost."""
        self.faults[method].append(Fault(lost=code))

    def pass_by(self, method: str) -> None:
        """Nothing goes wrong with the next call: what is queued after this is for a later one."""
        self.faults[method].append(Fault())

    def hang(self, method: str) -> None:
        """The next call takes effect, and its answer waits for `released`."""
        self.faults[method].append(Fault(hang=True))

    def StepStream(self, request_iterator: Any, context: Any) -> Any:
        """Steps in the order of the stream; a lost reply is a broken stream."""
        self.streams_opened += 1
        if self.script is not None:
            yield from self.script(request_iterator, context)
        for message in request_iterator:
            answer = layers.StepStreamResponse(correlation_id=message.correlation_id)
            if self.faults["Step"] and self.faults["Step"][0].status is not None:
                self.requests["Step"].append(message.step)
                answer.status.CopyFrom(self.faults["Step"].popleft().status)
            else:
                answer.step.CopyFrom(self.Step(message.step, context))
            yield answer

    def enter(self, method: str, request: Any, context: Any) -> Fault:
        self.requests[method].append(request)
        fault = self.faults[method].popleft() if self.faults[method] else Fault()
        fault.before()
        if fault.status is not None:
            _abort(fault.status, context)
        return fault

    @staticmethod
    def abort(why: Reason | status_pb2.Status, context: Any) -> None:
        """End a call with a reason, or a status."""
        _abort(status_of(why) if isinstance(why, Reason) else why, context)

    def leave(self, fault: Fault, context: Any) -> None:
        if fault.hang:
            self.arrived.set()
            self.released.wait(60)
        if fault.lost is not None:
            context.abort(fault.lost, "the connection broke")

    def GetServerInfo(self, request: Any, context: Any) -> admin.GetServerInfoResponse:
        self.enter("GetServerInfo", request, context)
        return self.info

    def GetLoad(self, request: Any, context: Any) -> admin.GetLoadResponse:
        if self.before_loads:
            self.before_loads.popleft()()
        self.enter("GetLoad", request, context)
        self.load.sequences_open = len(self.streams)
        return self.load

    def CreateSharedMemory(self, request: Any, context: Any) -> admin.CreateSharedMemoryResponse:
        if self.make_region is None:
            raise NotImplementedError
        return self.make_region(request, context)

    def ReleaseSharedMemory(self, request: Any, context: Any) -> admin.ReleaseSharedMemoryResponse:
        return admin.ReleaseSharedMemoryResponse()

    def Drain(self, request: Any, context: Any) -> admin.DrainResponse:
        self.enter("Drain", request, context)
        self.load.draining = True
        return admin.DrainResponse(sequences_open=len(self.streams))

    def OpenSequences(self, request: Any, context: Any) -> layers.OpenSequencesResponse:
        if request.adapter and request.adapter not in self.adapters:
            self.refuse("OpenSequences", Reason.ADAPTER_UNKNOWN)
        fault = self.enter("OpenSequences", request, context)
        match = self.states.match(request.prefix) if request.HasField("prefix") else None
        if request.snapshot_id or (match is not None and match.snapshot_id):
            response = opened_from(self.states, request, context, self, match)
            self.leave(fault, context)
            return response
        if request.open_token not in self.opened:
            first = 100 + sum(map(len, self.opened.values()))
            handles = list(range(first, first + request.count))
            self.streams |= {handle: defaultdict(Stream) for handle in handles}
            self.opened[request.open_token] = handles
            self.bound |= dict.fromkeys(handles, request.adapter)
        self.leave(fault, context)
        return layers.OpenSequencesResponse(
            server_epoch=self.info.server_epoch,
            server=self.info.server,
            sequence=self.opened[request.open_token],
            lease_ms=request.lease_ms,
            adapter_hash=self.adapters.get(request.adapter, b""),
            match=match,
        )

    @staticmethod
    def stream(position: int, total: NDArray[np.float64]) -> Stream:
        """One that is so far."""
        return Stream(position=position, total=total)

    def move(self, handle: int, to: FakeServer) -> int:
        """Move a sequence to another server with its progress and kept replies; returns its handle there."""
        with self.lock:
            own = next(to.handles)
            to.streams[own], to.bound[own] = self.streams.pop(handle), self.bound.pop(handle)
            epoch = to.info.server_epoch
            self.moved[handle] = layers.MovedSequence(server=to.address, server_epoch=epoch, sequence=own)
        return own

    def owners(self, handles: Iterable[int]) -> list[layers.MovedSequence]:
        """Where those live that were moved from here, by row."""
        rows = [(row, self.moved[handle]) for row, handle in enumerate(handles) if handle in self.moved]
        found = [layers.MovedSequence(row=row) for row, _ in rows]
        for one, (_, owner) in zip(found, rows, strict=True):
            one.MergeFrom(owner)
        return found

    def gone(self, handle: int, row: int = 0) -> status_pb2.Status:
        """Why a sequence is not here."""
        if handle not in self.moved:
            return status_of(Reason.SEQUENCE_EXPIRED)
        owner = self.moved[handle]
        numbers = {"row": row, "server_epoch": owner.server_epoch, "sequence": owner.sequence}
        status = status_pb2.Status(code=Reason.STATE_ELSEWHERE.code, message="it was moved")
        info = error_details_pb2.ErrorInfo(reason="STATE_ELSEWHERE", domain="deltaline")
        info.metadata.update({"server": owner.server} | {name: str(number) for name, number in numbers.items()})
        status.details.add().Pack(info)
        return status

    def _state(self, handle: int) -> layers.SequenceState.ValueType:
        if handle in self.moved:
            return layers.SEQUENCE_STATE_ELSEWHERE
        return layers.SEQUENCE_STATE_OPEN if handle in self.streams else layers.SEQUENCE_STATE_UNKNOWN

    def CloseSequences(self, request: Any, context: Any) -> layers.CloseSequencesResponse:
        fault = self.enter("CloseSequences", request, context)
        states = {False: layers.SEQUENCE_STATE_CLOSED, True: layers.SEQUENCE_STATE_ELSEWHERE}
        response = layers.CloseSequencesResponse(moved=self.owners(request.sequence))
        for handle in request.sequence:
            self.streams.pop(handle, None)
            response.state.append(states[handle in self.moved])
        self.leave(fault, context)
        return response

    def RenewLeases(self, request: Any, context: Any) -> layers.RenewLeasesResponse:
        self.enter("RenewLeases", request, context)
        owners = self.owners(request.sequence)
        return layers.RenewLeasesResponse(state=map(self._state, request.sequence), moved=owners)

    def DescribeSequences(self, request: Any, context: Any) -> layers.DescribeSequencesResponse:
        self.enter("DescribeSequences", request, context)
        response = layers.DescribeSequencesResponse(moved=self.owners(request.sequence))
        for handle in request.sequence:
            spans = [self.streams[handle][span] for span in range(2)] if handle in self.streams else []
            response.sequences.add(
                sequence=handle,
                state=self._state(handle),
                lease_remaining_ms=1500,
                adapter=self.bound.get(handle, ""),
                adapter_hash=self.adapters.get(self.bound.get(handle, ""), b""),
                spans=[
                    layers.SpanProgress(
                        step=stream.step,
                        position=stream.position,
                        pending_tokens=0 if stream.drafts is None else len(stream.drafts),
                    )
                    for stream in spans
                ],
            )
        return response

    def CommitSequences(self, request: Any, context: Any) -> layers.CommitSequencesResponse:
        fault = self.enter("CommitSequences", request, context)
        response = layers.CommitSequencesResponse()
        with self.lock:
            rows = zip(request.sequence, request.step, request.accepted, strict=True)
            for row, (handle, step, accepted) in enumerate(rows):
                if handle not in self.streams:
                    response.row_status.add(row=row, status=self.gone(handle, row))
                    response.position.append(0)
                    continue
                stream = self.streams[handle][request.span]
                reason = self._check_commit(stream, step, accepted)
                if row in fault.rows:
                    response.row_status.add(row=row, status=fault.rows[row])
                elif reason is not None:
                    response.row_status.add(row=row, status=status_of(reason))
                elif stream.drafts is not None:
                    stream.commit(accepted)
                response.position.append(stream.position)
        self.leave(fault, context)
        return response

    @staticmethod
    def _check_commit(stream: Stream, step: int, accepted: int) -> Reason | None:
        if step != stream.step or (stream.drafts is None and stream.fixed is None):
            return Reason.NOTHING_TO_COMMIT
        return Reason.COMMIT_CONFLICT if stream.drafts is None and accepted != stream.fixed else None

    def Step(self, request: Any, context: Any) -> layers.StepResponse:
        fault = self.enter("Step", request, context)
        start = list(request.query_start_loc)
        hidden = wire.decode(request.hidden, limit_bytes=self.info.inline_limit_bytes)
        response = layers.StepResponse(output_start_loc=[0], timing=layers.StepTiming(queue_ns=10**6, batch_rows=3))
        outputs: list[NDArray[Any]] = []
        for row, handle in enumerate(request.sequence):
            status, outcome, output = fault.rows.get(row), layers.ROW_OUTCOME_REFUSED, hidden[:0]
            with self.lock:
                stream = self.streams.get(handle, {}).get(request.span) or Stream()
                if handle not in self.streams:
                    status = self.gone(handle, row)
                else:
                    stream = self.streams[handle][request.span]
                if status is None:
                    result = self._row(stream, request, row, hidden[start[row] : start[row + 1]])
                    if isinstance(result, Reason):
                        status = status_of(result, None, stream.step, stream.position)
                    else:
                        outcome, output = result
                        asked = [one for one in request.waypoints if one.row == row]
                        response.waypoints.extend(self.states.left(handle, request, asked, self.skips))
            if status is not None:
                response.row_status.add(row=row, status=status)
            if request.output == layers.OUTPUT_ROWS_LAST:
                output = output[-1:]
            elif request.output == layers.OUTPUT_ROWS_NONE:
                output = output[:0]
            outputs.append(output)
            response.outcome.append(outcome)
            response.position.append(stream.position)
            response.output_start_loc.append(response.output_start_loc[-1] + len(output))
        response.hidden.CopyFrom(wire.encode(np.concatenate(outputs)))
        self.leave(fault, context)
        return response

    @staticmethod
    def _row(
        stream: Stream, request: Any, row: int, hidden: NDArray[Any]
    ) -> Reason | tuple[layers.RowOutcome.ValueType, NDArray[Any]]:
        step, accepted, kind = request.step[row], request.accepted[row], request.kind[row]
        content = (kind, request.position[row], accepted, request.output, hidden.tobytes())
        if step == stream.step and stream.reply is not None:
            same = content == stream.content
            return (layers.ROW_OUTCOME_REPLAYED, stream.reply) if same else Reason.STEP_CONFLICT
        if step != stream.step + 1:
            return Reason.STEP_STALE if step <= stream.step else Reason.STEP_GAP
        if stream.drafts is not None and accepted < 0:
            return Reason.VERIFY_PENDING
        if stream.drafts is None and accepted >= 0 and accepted != stream.fixed:
            return Reason.NOTHING_TO_COMMIT
        moves = accepted if stream.drafts is not None else 0
        if request.position[row] != stream.position + moves:
            return Reason.POSITION_MISMATCH
        if not np.isfinite(hidden.astype(np.float32)).all():
            return Reason.NON_FINITE_INPUT
        if stream.drafts is not None:
            stream.commit(accepted)
        stream.fixed = None
        sums = stream.total + np.cumsum(hidden.astype(np.float64), axis=0)
        if kind == layers.ROW_KIND_VERIFY:
            stream.drafts = hidden
        else:
            stream.total, stream.position = sums[-1], stream.position + len(hidden)
        stream.step, stream.content, stream.reply = step, content, sums.astype(hidden.dtype)
        return layers.ROW_OUTCOME_EXECUTED, stream.reply


@contextmanager
def running(server_epoch: int = 77) -> Iterator[FakeServer]:
    """A server that is stopped at the end."""
    fake = FakeServer(server_epoch)
    try:
        yield fake
    finally:
        fake.released.set()
        fake.server.stop(None).wait()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as fake:
        yield fake


FAST = Retry(initial_backoff_s=0.001, max_backoff_s=0.01, generator=random.Random(0))


@dataclass
class Driven:
    """A client of either kind; `do` finishes what its methods return, so that one test serves both."""

    client: Any
    do: Callable[[Any], Any]
    make: Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def driven(request: pytest.FixtureRequest, server: FakeServer) -> Iterator[Driven]:
    if request.param == "sync":
        with Client(server.address, timeout=60.0, retry=FAST) as blocking:
            yield Driven(blocking, lambda result: result, Client)
        return
    loop = asyncio.new_event_loop()
    client = AsyncClient(server.address, timeout=60.0, retry=FAST)
    yield Driven(client, lambda result: loop.run_until_complete(result), AsyncClient)
    loop.run_until_complete(client.disconnect())
    loop.close()


@pytest.fixture
def once(driven: Driven, server: FakeServer) -> Iterator[Any]:
    """A client of the same kind that tries once; the time of its calls passes only while it waits for an answer."""
    client = driven.make(server.address, retry=Retry(max_attempts=1, clock=lambda: 0.0))
    yield client
    driven.do(client.disconnect())
