"""A reply fits what a gRPC client takes by default: its size is bounded beforehand, what might not fit is refused."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from rigs.layer_calls import detail, reason_of
from rigs.limits import make_limits
from rigs.states import make_header

from deltaline import wire
from deltaline.v1 import adapter_service_pb2 as adapter_pb
from deltaline.v1 import admin_service_pb2 as admin_pb
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import prefix_pb2 as prefix_pb
from deltaline.v1 import state_service_pb2 as state_pb
from deltaline_server.config import Config
from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.front import replies, reply_bytes, requests
from deltaline_server.front.requests import Served
from deltaline_server.front.steps.step_message import from_protobuf
from deltaline_server.front.steps.waypoints import MAX_PLACES
from deltaline_server.memory.regions import Regions
from deltaline_server.step import LeftWaypoint, SpanShapes, StepForm, StepResult, StepTiming
from deltaline_server.tables.adapter_registry import MAX_ADAPTERS
from deltaline_server.tables.ledger import StepLedger
from deltaline_server.tables.moved import Owner
from deltaline_server.tables.open_tokens import Opened
from deltaline_server.tables.sequence import GONE, SequenceDescription, SequenceState, SpanProgress
from deltaline_server.tables.sequence_adapters import BoundAdapter

MOST = 4 << 20
HIDDEN = 256
MANY = 1 << 20
COUNTER = 2**62
LONG = 10 * 365 * 24 * 3600.0
ADAPTER = BoundAdapter(1, "n" * 64, bytes(range(32)))
SPAN = SpanProgress(COUNTER, COUNTER, 2**31, 2**31)
SERVED = Served(
    make_limits(max_sequences=MANY, queue_rows=MANY, queue_bytes=1 << 40, inline_limit_bytes=MOST),
    [SpanShapes(HIDDEN, 4)],
    np.dtype(np.float32),
    Regions(limit_bytes=0, default_lease_s=1.0, max_lease_s=1.0, clock=time.monotonic),
)


def step(num_rows: int, tokens: int = 1, output: int = 0, **fields: Any) -> pb.StepRequest:
    """A prefill of `tokens` of each row."""
    return pb.StepRequest(
        server_epoch=5,
        sequence=range(1, num_rows + 1),
        kind=[pb.ROW_KIND_PREFILL] * num_rows,
        step=[1] * num_rows,
        position=[0] * num_rows,
        query_start_loc=range(0, num_rows * tokens + 1, tokens),
        hidden=wire.encode(np.zeros((num_rows * tokens, HIDDEN), np.float32)),
        output=output,  # type: ignore[arg-type]
        **fields,
    )


def form_of(message: pb.StepRequest) -> StepForm:
    message.max_reply_bytes = 1 << 40
    return requests.read_step(from_protobuf(message), SERVED, now_s=0.0, until_s=None).form


def refusal_of(call: Callable[[], object]) -> Refusal:
    with pytest.raises(RequestError) as caught:
        call()
    return caught.value.refusal


# The longest that --advertise takes.
SERVER = Config(random_init="c", advertise="s" * 253 + ":65535").name(1)
OWNER = Owner(SERVER, 2**64 - 1, 2**64 - 1)


def row_refusals() -> dict[Reason, Refusal]:
    """What rows are refused with, with the largest numbers."""
    ledger = StepLedger(1, 4, 8)
    for cells in (ledger.done, ledger.tail):
        cells.values[:] = COUNTER
    made = {reason: Refusal(reason, text) for reason, text in GONE.values()}
    made[Reason.STATE_ELSEWHERE] = OWNER.refusal()
    for reason in Reason:
        try:
            made[reason] = ledger.refusal(reason, 0, 0, accepted=2**31 - 1)
        except KeyError:
            continue
    return made


def worst_refusal() -> Refusal:
    return max(row_refusals().values(), key=lambda refusal: replies.row_statuses({1: refusal})[0].ByteSize())


@pytest.mark.parametrize("reason", row_refusals(), ids=lambda reason: str(reason.name))
def test_no_status_of_a_row_is_larger_than_is_counted(reason: Reason) -> None:
    refusal = row_refusals()[reason]
    [made] = replies.row_statuses({2**20 - 1: refusal})
    assert made.status.message == refusal.message, "the text is cut"
    assert pb.StepResponse(row_status=[made]).ByteSize() <= reply_bytes.ROW_STATUS_BYTES


TIMING = StepTiming(LONG, LONG, LONG, LONG, 2**31 - 1, 2**31 - 1)


def worst_step(form: StepForm, refuses: bool) -> StepResult:
    """The largest result of a step: all its rows are refused, or none is."""
    rows = form.num_rows
    worst = worst_refusal()
    start = np.zeros(rows + 1, np.int64) if refuses else form.output_start
    asked = [] if refuses else [(row, one.num_places) for row, one in form.waypoints.items()]
    place = LeftWaypoint(COUNTER, bytes(16))
    return StepResult(
        np.full(rows, 4 if refuses else 1, np.uint8),
        np.full(rows, COUNTER),
        start,
        np.zeros((int(start[-1]), HIDDEN), np.float32),
        dict.fromkeys(range(rows), worst) if refuses else {},
        TIMING,
        waypoints=[(row, place) for row, count in asked for _ in range(count)],
    )


STEPS = {
    "one row": step(1),
    "400 decodes": step(400),
    "no outputs": step(400, output=pb.OUTPUT_ROWS_NONE),
    "last outputs": step(40, 20, pb.OUTPUT_ROWS_LAST),
    "a long prefill": step(1, 4000),
    "places": step(1, 4096, pb.OUTPUT_ROWS_LAST, waypoints=[prefix_pb.Waypoints(every=64, at_end=True)]),
}


@pytest.mark.parametrize("refuses", [False, True], ids=["executed", "refused"])
@pytest.mark.parametrize("name", STEPS)
def test_no_reply_to_a_step_is_larger_than_is_counted(name: str, refuses: bool) -> None:
    form = form_of(STEPS[name])
    message = replies.JOIN(replies.stream_response(2**64 - 1, worst_step(form, refuses)))
    counted = reply_bytes.step_bytes(form, is_inline=True)
    assert len(message) <= counted
    if not refuses and name != "no outputs":  # and no more is counted than may be
        assert counted < len(message) + form.num_rows * reply_bytes.ROW_STATUS_BYTES + 1024


def test_a_step_whose_reply_might_not_fit_is_refused_with_the_numbers() -> None:
    """4,096 rows x 256 float32 were applied, and their reply of 4,194,370 bytes and more was lost."""
    message = step(1, 4096)

    def read(**fields: int) -> Any:
        message.MergeFrom(pb.StepRequest(**fields))  # type: ignore[arg-type]
        return requests.read_step(from_protobuf(message), SERVED, now_s=0.0, until_s=None)

    refusal = refusal_of(read)
    needed = int(refusal.metadata["reply_bytes"])
    assert (refusal.reason, refusal.field) == (Reason.REPLY_TOO_LARGE, "max_reply_bytes")
    assert refusal.metadata["max_reply_bytes"] == str(MOST) and MOST < needed < MOST + 1024
    assert str(needed) in refusal.message and str(MOST) in refusal.message
    assert read(max_reply_bytes=needed).hidden.shape == (4096, HIDDEN)
    message.CopyFrom(step(4040))  # as docs/protocol.md says
    assert read().hidden.shape == (4040, HIDDEN)
    message.CopyFrom(step(4096))
    assert refusal_of(lambda: read(max_reply_bytes=needed - 1)).metadata["max_reply_bytes"] == str(needed - 1)


def test_the_server_s_own_limit_holds_whatever_is_taken() -> None:
    """5 MiB, of which 12,000 refused rows are more; the message says that no other word would help."""
    limit = reply_bytes.most_step_bytes(MOST)
    assert limit == 5 << 20
    message = step(12_000, output=pb.OUTPUT_ROWS_NONE, max_reply_bytes=1 << 40)
    served = replace(SERVED, limits=replace(SERVED.limits, inline_limit_bytes=1 << 30))
    form = requests.read_step(from_protobuf(message), served, now_s=0.0, until_s=None).form
    refusal = refusal_of(lambda: reply_bytes.check_step(form, 1 << 40, limit, is_inline=True))
    assert refusal.metadata["max_reply_bytes"] == str(limit)
    assert refusal.message.endswith("ask for fewer rows") and "more is taken" not in refusal.message


def handles(count: int) -> Any:
    return np.full(count, 2**64 - 1, np.uint64)


def described(num_spans: int) -> SequenceDescription:
    return SequenceDescription(SequenceState.POISONED, LONG, (SPAN,) * num_spans, ADAPTER)


def commits(count: int) -> bytes:
    worst = worst_refusal()
    return replies.commit_response(np.full(count, COUNTER), dict.fromkeys(range(count), worst))


SNAPSHOT = state_pb.Snapshot(
    snapshot_id=bytes(16),
    position=COUNTER,
    adapter="n" * 64,
    adapter_hash=bytes(32),
    pinned=True,
    lease_remaining_ms=2**40,
    size_bytes=2**48,
    tier=prefix_pb.TIER_FILE,
    created_ms=2**42,
)
# How a request for `count` is read, and the largest reply to it.
REPLIES: dict[str, tuple[Callable[[int], object], Callable[[int], bytes]]] = {
    "OpenSequences": (
        lambda count: requests.read_count(pb.OpenSequencesRequest(count=count), SERVED),
        lambda count: replies.open_response(2**64 - 1, SERVER, Opened(handles(count), LONG, ADAPTER)),
    ),
    "DescribeSequences": (
        lambda count: requests.read_handles(np.arange(count), SERVED, reply_bytes.describe_bytes(64)),
        lambda count: replies.describe_response(handles(count), [described(64)] * count, {}),
    ),
    "DescribeSequences of moved ones": (
        lambda count: requests.read_handles(np.arange(count), SERVED, reply_bytes.describe_bytes(1)),
        lambda count: replies.describe_response(
            handles(count), [SequenceDescription(SequenceState.ELSEWHERE)] * count, dict.fromkeys(range(count), OWNER)
        ),
    ),
    "CloseSequences": (
        lambda count: requests.read_handles(np.arange(count), SERVED, reply_bytes.STATE_BYTES),
        lambda count: replies.close_response([SequenceState.ELSEWHERE] * count, dict.fromkeys(range(count), OWNER)),
    ),
    "RenewLeases": (
        lambda count: requests.read_handles(np.arange(count), SERVED, reply_bytes.STATE_BYTES),
        lambda count: replies.renew_response([SequenceState.ELSEWHERE] * count, dict.fromkeys(range(count), OWNER)),
    ),
    "CommitSequences": (
        lambda count: requests.read_commit(
            pb.CommitSequencesRequest(
                server_epoch=5, sequence=range(1, count + 1), step=[1] * count, accepted=[1] * count
            ),
            SERVED,
        ),
        commits,
    ),
    "MoveSequences": (
        lambda count: requests.read_handles(np.arange(count), SERVED, reply_bytes.MOVED_BYTES),
        lambda count: max(
            replies.move_response(dict.fromkeys(range(count), OWNER), {}),
            replies.move_response({}, dict.fromkeys(range(count), worst_refusal())),
            key=len,
        ),
    ),
    "ForkSequences": (
        lambda count: requests.read_children(1, count, SERVED),
        lambda count: replies.fork_response(
            2**64 - 1, SERVER, Opened(handles(count), LONG, ADAPTER), [described(1)] * count
        ),
    ),
    "CreateSnapshots": (
        lambda count: requests.read_handles(np.arange(count), SERVED, reply_bytes.SNAPSHOT_BYTES),
        lambda count: state_pb.CreateSnapshotsResponse(snapshots=[SNAPSHOT] * count).SerializeToString(),
    ),
    "RestoreSequences": (
        lambda count: reply_bytes.check("snapshot_id", count, reply_bytes.RESTORED_BYTES),
        lambda count: replies.restore_response(
            2**64 - 1, SERVER, Opened(handles(count), LONG, ADAPTER), [described(1)] * count
        ),
    ),
}


# What docs/protocol.md says is always taken.
ANNOUNCED = {
    "DescribeSequences": 1600,
    "DescribeSequences of moved ones": 13_000,
    "CloseSequences": 14_000,
    "RenewLeases": 14_000,
    "CommitSequences": 8000,
    "MoveSequences": 8000,
    "ForkSequences": 260_000,
    "CreateSnapshots": 24_000,
    "RestoreSequences": 24_000,
    "OpenSequences": 260_000,
}


@pytest.mark.parametrize("method", REPLIES)
def test_as_many_as_are_taken_fit_a_reply_and_one_more_is_refused(method: str) -> None:
    read, reply = REPLIES[method]
    refusal = refusal_of(lambda: read(MANY))
    assert refusal.reason is Reason.REPLY_TOO_LARGE
    low, high = 1, MANY
    while low + 1 < high:  # how many are taken, by trying
        count = (low + high) // 2
        try:
            read(count)
        except RequestError:
            high = count
        else:
            low = count
    assert len(reply(low)) <= MOST and low >= ANNOUNCED[method]
    assert refusal.message.endswith(f"{low} would fit, got {MANY}")
    assert len(reply(low)) > MOST * 2 // 3  # and not many fewer than would fit


ADAPTER_MESSAGE = adapter_pb.Adapter(
    name="n" * 64,
    content_hash=bytes(32),
    rank=2**32 - 1,
    size_bytes=2**64 - 1,
    state=adapter_pb.ADAPTER_STATE_DRAINING,
    pinned=True,
    sequences=2**32 - 1,
    modules_elsewhere=2**32 - 1,
    shared=True,
)
MATCH = prefix_pb.PrefixMatch(snapshot_id=bytes(16), position=COUNTER, restore_us=COUNTER, compute_us=COUNTER)
# The largest replies of calls that are bounded otherwise: by a page, by what is held.
LARGEST: list[Message] = [
    state_pb.FindSnapshotsResponse(match=MATCH),
    state_pb.ListSnapshotsResponse(
        snapshots=[SNAPSHOT] * requests.MAX_SNAPSHOTS, has_more=True, server_epoch=COUNTER, server=SERVER
    ),
    state_pb.RenewSnapshotsResponse(state=[state_pb.SNAPSHOT_STATE_LOST] * requests.MAX_SNAPSHOTS),
    state_pb.ReleaseSnapshotsResponse(state=[state_pb.SNAPSHOT_STATE_LOST] * requests.MAX_SNAPSHOTS),
    adapter_pb.ListAdaptersResponse(adapters=[ADAPTER_MESSAGE] * MAX_ADAPTERS),
    adapter_pb.LoadAdapterResponse(adapter=ADAPTER_MESSAGE),
    admin_pb.GetServerInfoResponse(
        spans=[admin_pb.LayerSpan(first=4095, count=1, input_streams=64, output_streams=64)] * 4096,
        versions={f"library{i}": "1.2.3" * 10 for i in range(100)},
        device="d" * 1000,
        link_path="/" * 107,
    ),
]


@pytest.mark.parametrize("message", LARGEST, ids=lambda message: type(message).__name__)
def test_the_largest_reply_of_other_calls_fits(message: Message) -> None:
    assert message.ByteSize() <= MOST


def test_a_stored_state_has_no_longer_name_of_an_adapter_than_is_counted() -> None:
    assert make_header(adapter=SNAPSHOT.adapter).adapter == SNAPSHOT.adapter
    with pytest.raises(ValueError, match=r"adapter: expected 0 \.\. 64 bytes, got 65"):
        make_header(adapter=SNAPSHOT.adapter + "n")


def test_the_places_of_a_step_fit_beside_its_row() -> None:
    place = prefix_pb.Waypoint(row=2**20, position=COUNTER, snapshot_id=bytes(16))
    assert pb.StepResponse(waypoints=[place] * MAX_PLACES).ByteSize() < MOST // 8


@pytest.mark.parametrize(
    "text", ["x" * 10_000, "Äß" * 5_000, "é\U0001f600" * 3_000], ids=["ascii", "two bytes", "four"]
)
def test_a_long_text_is_cut_so_that_a_client_takes_the_trailers(text: str) -> None:
    """They hold the text escaped, and the status, which has it twice, in base64: 8 KiB in all, names included."""
    quota = {"quota": "requests_per_second", "limit": str(COUNTER), "used": str(COUNTER), "asked": str(COUNTER)}
    made = replies.status(Refusal(Reason.INVALID_REQUEST, text, quota, "f" * 100, retry_after_s=LONG))
    assert reason_of(made) == "INVALID_REQUEST" and text.startswith(made.message)
    assert len(made.message.encode()) > replies.TEXT_BYTES - 4
    violation = detail(made, error_details_pb2.BadRequest).field_violations[0]
    assert violation.description == made.message
    escaped, packed = quote(made.message), base64.b64encode(made.SerializeToString())
    assert len(escaped) + len(packed) + 400 < 8192
