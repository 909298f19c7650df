"""How large the messages of steps may be that protobuf is given."""

from __future__ import annotations

from typing import Any

import pytest

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import prefix_pb2, tensor_pb2
from deltaline_server.errors import Reason, RequestError
from deltaline_server.front.grpc_port import MESSAGE_SLACK_BYTES
from deltaline_server.front.steps.step_parser import StepParser
from deltaline_server.front.steps.wire_scan import bytes_beside

NUM_ROWS = 16
EMPTY_WAYPOINTS = b"\x72\x00"
EMPTY_HIDDEN = b"\x4a\x00"
TENSOR = tensor_pb2.Tensor(shape=[1], inline=bytes(4 << 20))


def parse(body: bytes, in_stream: bool) -> Any:
    """As a server for so many rows does."""
    parser = StepParser(NUM_ROWS)
    if not in_stream:
        return parser.parse_step(body)
    pieces = wire.field_pieces(pb.StepStreamRequest.STEP_FIELD_NUMBER, [body])
    return parser.parse_stream_step(b"".join((b"\x08\x01", *pieces))).step


def columns(one_by_one: bool) -> bytes:
    """As many rows as there may be, a waypoint for each, and a large tensor; packed, or each entry by itself."""
    made = pb.StepRequest(
        server_epoch=1,
        span=1,
        sequence=range(1, NUM_ROWS + 1),
        kind=[pb.ROW_KIND_PREFILL] * NUM_ROWS,
        step=[1] * NUM_ROWS,
        position=[1] * NUM_ROWS,
        accepted=[-1] * NUM_ROWS,
        query_start_loc=range(NUM_ROWS + 1),
        output=pb.OUTPUT_ROWS_LAST,
        priority=1,
        queue_timeout_us=1,
        output_slice=pb.OutputSlice(region=1),
        waypoints=[prefix_pb2.Waypoints(row=row, every=64) for row in range(NUM_ROWS)],
        max_reply_bytes=1,
    )
    if not one_by_one:
        return made.SerializeToString()
    parts = []
    for field, value in made.ListFields():
        for entry in value if field.is_repeated else ():
            one = pb.StepRequest()
            if field.message_type:
                getattr(one, field.name).add().CopyFrom(entry)
            else:
                getattr(one, field.name).append(entry)
            packed = one.SerializeToString()
            size = {"kind": 1, "accepted": 4, "query_start_loc": 4}.get(field.name, 8)
            tag = field.number << 3 | {1: 0, 4: 5, 8: 1}[size]
            parts.append(packed if field.message_type else bytes([tag]) + packed[-size:])
        if field.is_repeated:
            made.ClearField(field.name)  # type: ignore[arg-type]
    return made.SerializeToString() + b"".join(parts)


@pytest.mark.parametrize("in_stream", [False, True])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_whatever_a_step_may_have_is_parsed(one_by_one: bool, in_stream: bool) -> None:
    body = columns(one_by_one) + pb.StepRequest(hidden=TENSOR).SerializeToString()
    step = parse(body, in_stream)
    assert list(step.sequence) == list(range(1, NUM_ROWS + 1)) and len(step.waypoints) == NUM_ROWS
    assert list(step.query_start_loc) == list(range(NUM_ROWS + 1)) and len(step.inline) == 4 << 20


LARGE = {
    "waypoints": EMPTY_WAYPOINTS * 200_000,
    "behind a tensor": pb.StepRequest(hidden=TENSOR).SerializeToString() + EMPTY_WAYPOINTS * 200_000,
    "hidden": EMPTY_HIDDEN * 200_000,
    "in hidden": b"".join(wire.field_pieces(pb.StepRequest.HIDDEN_FIELD_NUMBER, [b"\x10\x01" * 200_000])),
    "behind a group": b"\x7b\x4a\x02\x17\x17\x7c" + EMPTY_WAYPOINTS * 200_000,
    "groups": b"\x7b\x7c" * 200_000,
    "bytes": pb.StepRequest(
        waypoints=[prefix_pb2.Waypoints(tokens=range(MESSAGE_SLACK_BYTES // 8))]
    ).SerializeToString(),
    "a shape": pb.StepRequest(
        hidden=tensor_pb2.Tensor(shape=[1] * MESSAGE_SLACK_BYTES), waypoints=[prefix_pb2.Waypoints()]
    ).SerializeToString(),
}


@pytest.mark.parametrize("in_stream", [False, True])
@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE)
def test_what_no_step_needs_is_refused(body: bytes, in_stream: bool) -> None:
    with pytest.raises(RequestError) as caught:
        parse(body, in_stream)
    assert caught.value.refusal.reason is Reason.MESSAGE_TOO_LARGE


def test_fields_are_counted_up_to_the_first_that_is_too_many() -> None:
    class Counted(bytes):
        num_read = 0

        def __getitem__(self, at: Any) -> Any:
            self.num_read += 1
            return super().__getitem__(at)

    body = Counted(EMPTY_WAYPOINTS * 200_000)
    assert bytes_beside(body, {}, 100) is None and body.num_read <= 3 * 101
    assert bytes_beside(EMPTY_WAYPOINTS * 100, {}, 100) == 200
    assert bytes_beside(EMPTY_WAYPOINTS * 101, {}, 100) is None
