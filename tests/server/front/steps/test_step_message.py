"""Both parsers of step messages have one meaning, whatever bytes come; the fast one takes what clients send."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.limits import make_limits

from deltaline import wire
from deltaline.v1 import admin_service_pb2, tensor_pb2
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.errors import RequestError
from deltaline_server.front.requests import Served, read_step
from deltaline_server.front.steps.step_message import Extents, Pattern, StepMessage, from_protobuf, scan_step
from deltaline_server.front.steps.step_parser import MOST_BYTES, MOST_PATTERNS, StepParser
from deltaline_server.front.steps.wire_scan import WireScan, read_varints
from deltaline_server.memory.regions import Regions
from deltaline_server.step import SpanShapes, StepRequest

HIDDEN = 4
LIMITS = make_limits(max_sequences=8, max_draft_tokens=3)
SERVED = Served(
    LIMITS,
    [SpanShapes(HIDDEN, 2)] * 2,
    np.dtype(ml_dtypes.bfloat16),
    Regions(limit_bytes=4096, default_lease_s=1.0, max_lease_s=1.0, clock=lambda: 0.0),
)
MADE = asyncio.run(SERVED.regions.create(4096, None))
REGION, MEMORY = MADE.id, MADE.memory
MEMORY[:] = 0x3F
NUMBERS = {
    "uint64": st.sampled_from([0, 1, 2**62, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1),
    "uint32": st.sampled_from([0, 1, 2**31, 2**32 - 1]) | st.integers(0, 5),
    "int32": st.sampled_from([-1, 0, 2**31 - 1, -(2**31)]) | st.integers(-9, 9),
}


def plain(message: StepMessage) -> dict[str, Any]:
    """The same in Python's own values, so that both parsers' can be compared."""
    values = {name: getattr(message, name) for name in message._fields if name != "pattern"}
    inline, waypoints = values.pop("inline"), values.pop("waypoints")
    lists = {name: list(map(int, value)) for name, value in values.items() if not isinstance(value, int | None)}
    rest = {"inline": None if inline is None else bytes(inline), "waypoints": list(waypoints)}
    return values | lists | rest


def by_protobuf(body: bytes) -> dict[str, Any] | None:
    """What protobuf makes of a StepRequest; None for what it can't parse."""
    try:
        return plain(from_protobuf(pb.StepRequest.FromString(body)))
    except DecodeError:
        return None


def outcome(message: StepMessage) -> Any:
    """The request's arrays or its error, in values that compare."""
    try:
        request = read_step(message, SERVED, now_s=0.0, until_s=None)
    except RequestError as error:
        return error.refusal
    form, memory = request.form, request.output_memory
    values = {field.name: getattr(request, field.name) for field in dataclasses.fields(request) if field.name != "form"}
    values |= {field.name: getattr(form, field.name) for field in dataclasses.fields(form)}
    arrays = {name: (value.dtype, value.tobytes()) for name, value in values.items() if isinstance(value, np.ndarray)}
    outputs = None if memory is None else (memory.region, memory.offset, memory.memory.ctypes.data, len(memory.memory))
    return values | arrays | {"output_memory": outputs}


def check(body: bytes) -> bool:
    """All parsers agree about a body; returns whether the fast one took it."""
    expected = by_protobuf(body)
    parser = StepParser(LIMITS.max_sequences)
    scanned = scan_step(body, 0, len(body))
    if scanned is not None:
        message, extents = scanned
        assert plain(message) == expected
        reference = outcome(from_protobuf(pb.StepRequest.FromString(body)))
        assert outcome(message) == reference
        for before in (b"", b"\x2a" * 7):  # alone, and behind other bytes of a stream's message
            made = scan_step(before + body, len(before), len(before + body))
            assert made is not None
            check_pattern(Pattern(before + body, len(before), len(before + body), *made), body, extents)
        assert [outcome(parser.parse_step(body)) for _ in range(2)] == [reference, reference]
    if expected is None:
        with pytest.raises(DecodeError):
            parser.parse_step(body)
    else:
        assert plain(parser.parse_step(body)) == expected
    check_in_stream(parser, body, expected)
    return scanned is not None


def check_pattern(pattern: Pattern, body: bytes, extents: Extents) -> None:
    """A pattern takes its own message and those with other numbers and tensors, as protobuf does; no others."""
    matched = pattern.match(body, 0, len(body))
    assert matched is not None and plain(matched) == by_protobuf(body)
    differing = {at for run in extents if run is not None for at in range(*run)}
    for at in {*range(0, len(body), 1 + len(body) // 24), *sorted(differing)[:9]}:
        changed = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        found = pattern.match(b"head" + changed + b"tail", 4, 4 + len(body))
        if at not in differing:
            assert found is None
        elif found is not None:
            assert plain(found) == by_protobuf(changed)
            assert outcome(found._replace(pattern=None)) == outcome(from_protobuf(pb.StepRequest.FromString(changed)))
        else:
            assert (extents.shared and at in range(*extents.shared)) or (
                extents.output_slice and at in range(*extents.output_slice)
            )


def check_in_stream(parser: StepParser, body: bytes, expected: dict[str, Any] | None) -> None:
    """The same step as a stream carries it."""
    pieces = [b"\x08\xff\xff\xff\xff\x0f", *wire.field_pieces(pb.StepStreamRequest.STEP_FIELD_NUMBER, [body])]
    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    traced = [*pieces[:1], *wire.field_pieces(pb.StepStreamRequest.TRACEPARENT_FIELD_NUMBER, [trace]), *pieces[1:]]
    for message, traceparent in ((b"".join(pieces), b""), (b"".join(traced), trace)):
        if expected is None:
            with pytest.raises(DecodeError):
                parser.parse_stream_step(message)
        else:
            in_stream = parser.parse_stream_step(message)
            assert (in_stream.correlation_id, plain(in_stream.step)) == (2**32 - 1, expected)
            assert in_stream.traceparent == traceparent


def slices() -> st.SearchStrategy[dict[str, int]]:
    """Where something may lie in a region, or where nothing is."""
    region = st.sampled_from([REGION, REGION, REGION, 0]) | NUMBERS["uint64"]
    offset = st.sampled_from([0, 64, 2048, 4032, 4096, 4]) | NUMBERS["uint64"]
    return st.fixed_dictionaries({"region": region, "offset": offset})


@st.composite
def messages(draw: st.DrawFn) -> pb.StepRequest:
    """Steps of 1 to 4 rows, sound or with lies in any field."""
    count = draw(st.integers(1, 4))

    def column(name: str, sound: list[int]) -> list[int]:
        return draw(st.one_of(st.just(sound), st.just(sound), st.lists(NUMBERS[name], max_size=6)))

    tokens = draw(st.sampled_from([count, count, 3]))
    hidden = wire.encode(np.arange(tokens * HIDDEN).reshape(tokens, HIDDEN).astype(SERVED.dtype))
    if draw(st.booleans()):
        hidden.dtype = draw(st.sampled_from([0, 1, 2, 3, 4, -1]))  # type: ignore[assignment]
        del hidden.shape[:]
        hidden.shape.extend(draw(st.lists(st.sampled_from([0, 1, tokens, HIDDEN, 2**31, -1, 2**63 - 1]), max_size=6)))
    if draw(st.booleans()):
        hidden.shared.CopyFrom(tensor_pb2.SharedSlice(**draw(slices())))
    output_slice = None
    if draw(st.booleans()):
        output_slice = pb.OutputSlice(**draw(slices()), size_bytes=draw(NUMBERS["uint64"] | st.just(1024)))
    return pb.StepRequest(
        server_epoch=draw(NUMBERS["uint64"]),
        span=draw(NUMBERS["uint32"]),
        sequence=column("uint64", list(range(7, 7 + count))),
        kind=column("int32", draw(st.sampled_from([[1] * count, [2] * count, [3] * count]))),  # type: ignore[arg-type]
        step=column("uint64", [1] * count),
        position=column("uint64", [0] * count),
        accepted=column("int32", draw(st.sampled_from([[], [-1] * count]))),
        query_start_loc=column("uint32", list(range(count + 1))),
        hidden=draw(st.sampled_from([hidden, None])),
        output=draw(NUMBERS["int32"]),  # type: ignore[arg-type]
        priority=draw(NUMBERS["int32"]),
        queue_timeout_us=draw(NUMBERS["uint64"]),
        output_slice=output_slice,
    )


def fields(body: bytes) -> list[bytes]:
    """The serialised fields of a message that protobuf has written, each by itself."""
    parts = []
    message = pb.StepRequest.FromString(body)
    for descriptor, _ in message.ListFields():
        part = pb.StepRequest()
        value = getattr(message, descriptor.name)
        if descriptor.is_repeated:
            getattr(part, descriptor.name).extend(value)
        elif descriptor.message_type:
            getattr(part, descriptor.name).CopyFrom(value)
        else:
            setattr(part, descriptor.name, value)
        parts.append(part.SerializeToString())
    return parts


ODD_FIELDS = [
    b"",
    b"\x18\x07",  # a sequence as a varint
    b"\x19" + bytes(8),  # an unpacked sequence
    b"\x1a\x08" + bytes(8),  # one more run of sequences
    b"\x20\x02",  # an unpacked kind
    b"\x22\x02\x82\x00",  # a kind of two bytes
    b"\x3d\xff\xff\xff\xff",  # an unpacked accepted
    b"\x4a\x00",  # an empty tensor
    b"\x4a\x02\x1a\x00",  # a tensor without bytes
    b"\x4a\x04\x1a\x00\x1a\x00",  # the same, its bytes twice
    b"\x4a\x02\x10\x02",  # an unpacked dimension
    b"\x4a\x0c\x12\x0a" + b"\xff" * 9 + b"\x01",  # a dimension of -1
    b"\x4a\x02\x22\x00",  # a tensor in shared memory, nowhere
    b"\x4a\x04\x22\x00\x22\x00",  # the same twice
    b"\x4a\x04\x1a\x00\x22\x00",  # a tensor with both payloads
    b"\x4a\x04\x22\x00\x1a\x00",
    b"\x4a\x04\x22\x02\x18\x01",  # a slice with a field that is not known
    b"\x4a\x05\x22\x05\x10\x01\x10",  # a slice that ends beyond its tensor
    b"\x6a\x00",  # an output slice, nowhere
    b"\x6a\x02\x20\x01",  # one with a field that is not known
    b"\x6a\x0b\x10" + b"\xff" * 9 + b"\x01",  # one at an offset of 64 bits
    b"\x6a\x05\x09" + bytes(4),  # one with a region cut short
    b"\x10\x80\x80\x80\x80\x10",  # a span of 2^32
    b"\x10\x81\x00",  # a span of 1 in two bytes
    b"\x90\x00\x01",  # the same with a tag of two bytes
    b"\x50" + b"\xff" * 9 + b"\x01",  # an output of -1
    b"\x60" + b"\x80" * 10,  # a varint that does not end
    b"\x6b\x6c",  # a group that is not known
    b"\x6b",  # the same without an end
    b"\x6c",
    b"\x7a\x03abc",  # a field that is not known
    b"\xf8\xff\xff\xff\x0f\x00",
    b"\x00",
    b"\x07",
    b"\x09" + bytes(7),  # cut short
    b"\x2a\x07" + bytes(7),  # no whole number of elements
    b"\x42\x05" + bytes(4),
]


@settings(max_examples=60, deadline=None)
@given(messages(), st.lists(st.sampled_from(ODD_FIELDS), max_size=2), st.randoms(use_true_random=False))
def test_fields_in_any_order_twice_or_odd_mean_the_same(message: pb.StepRequest, odd: list[bytes], random: Any) -> None:
    parts = fields(message.SerializeToString())
    check(b"".join(parts))
    parts += odd
    if parts and random.random() < 0.3:
        parts.append(random.choice(parts))
    random.shuffle(parts)
    check(b"".join(parts))


@settings(max_examples=60, deadline=None)
@given(messages(), st.randoms(use_true_random=False))
def test_mutated_bytes_mean_the_same(message: pb.StepRequest, random: Any) -> None:
    body = bytearray(message.SerializeToString() or b"\x00")
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(body))
        match random.randrange(4):
            case 0:
                body[at] = random.randrange(256)
            case 1:
                del body[at : at + random.randint(1, 9)]
            case 2:
                body[at:at] = random.randbytes(random.randint(1, 9))
            case _:
                body[at:at] = body[at : at + random.randint(1, 40)]
        body = body or bytearray(1)
    check(bytes(body))


@pytest.mark.parametrize("odd", ODD_FIELDS, ids=lambda odd: odd.hex())
def test_odd_field_alone_means_the_same(odd: bytes) -> None:
    check(odd)


def sound(count: int = 3) -> pb.StepRequest:
    """A decode step as our client writes it."""
    return pb.StepRequest(
        server_epoch=2**64 - 1,
        span=1,
        sequence=range(7, 7 + count),
        kind=[pb.ROW_KIND_DECODE] * count,
        step=[1] * count,
        position=[0] * count,
        query_start_loc=range(count + 1),
        hidden=wire.encode(np.ones((count, HIDDEN), SERVED.dtype)),
        priority=-8,
        queue_timeout_us=2**40,
    )


def test_the_usual_form_is_scanned() -> None:
    """No field of it, and every field; in shared memory nothing but what lies elsewhere."""
    assert check(sound().SerializeToString())
    assert check(pb.StepRequest().SerializeToString())
    message = sound()
    message.accepted.extend([-1, 0, 2])
    message.output = pb.OUTPUT_ROWS_LAST
    message.output_slice.CopyFrom(pb.OutputSlice(region=REGION, offset=2048, size_bytes=1024))
    message.max_reply_bytes = 64 << 20
    fields = {descriptor.name for descriptor, _ in message.ListFields()}
    assert fields == set(pb.StepRequest.DESCRIPTOR.fields_by_name) - {"waypoints"}
    assert check(message.SerializeToString())
    message.hidden.shared.CopyFrom(tensor_pb2.SharedSlice(region=REGION, offset=128))
    body = message.SerializeToString()
    assert check(body)
    request = read(body)
    assert request.is_input_shared and np.shares_memory(request.hidden.view(np.uint8), MEMORY[128 : 128 + 24])
    assert request.output_memory is not None and np.shares_memory(
        request.output_memory.memory, MEMORY[2048 : 2048 + 24]
    )


def read(body: bytes) -> StepRequest:
    return read_step(StepParser(LIMITS.max_sequences).parse_step(body), SERVED, now_s=0.0, until_s=None)


@pytest.mark.parametrize("span", [b"\x10\x01", b"\x10\x81\x00"], ids=["two bytes", "three bytes"])
def test_elements_are_a_view_where_they_are_aligned(span: bytes) -> None:
    message = sound()
    message.ClearField("span")
    body = span + message.SerializeToString()
    hidden = read(body).hidden
    is_view = np.shares_memory(hidden.view(np.uint8), np.frombuffer(body, np.uint8))
    assert is_view == (body.index(message.hidden.inline) % 2 == 0)
    assert hidden.flags.aligned and not hidden.flags.writeable
    np.testing.assert_array_equal(hidden, np.ones((3, HIDDEN), SERVED.dtype))


def test_field_with_a_longer_tag_is_no_field_of_a_walk() -> None:
    with pytest.raises(ValueError, match="at most 15"):
        WireScan(admin_service_pb2.GetServerInfoResponse.DESCRIPTOR, "sequence_state_bytes")


def test_of_many_batches_the_last_ones_are_remembered() -> None:
    parser = StepParser(LIMITS.max_sequences)

    def body(handle: int) -> bytes:
        hidden = wire.encode(np.zeros((1, HIDDEN), SERVED.dtype))
        message = pb.StepRequest(
            server_epoch=1, sequence=[handle], kind=[pb.ROW_KIND_DECODE], step=[1], position=[0], hidden=hidden
        )
        message.query_start_loc.extend([0, 1])
        return message.SerializeToString()

    first = parser.parse_step(body(1)).pattern
    assert first is not None and parser.parse_step(body(1)).pattern is first
    for handle in range(2, 2 + MOST_PATTERNS):
        parser.parse_step(body(handle))
    assert parser.parse_step(body(1)).pattern is not first


@pytest.mark.parametrize("column", ["sequence", "kind", "accepted", "query_start_loc"])
def test_columns_that_nobody_has_checked_are_not_remembered_at_any_length(column: str) -> None:
    """Or messages that are all refused would fill the memory: each may be as large as a tensor."""
    parser = StepParser(LIMITS.max_sequences)
    for first in range(3):
        columns: dict[str, Any] = {column: [first] * MOST_BYTES}
        message = parser.parse_step(pb.StepRequest(server_epoch=1, **columns).SerializeToString())
        assert len(getattr(message, column)) == MOST_BYTES and message.pattern is None
    rows = list(range(1, 1025))
    assert parser.parse_step(pb.StepRequest(server_epoch=1, sequence=rows).SerializeToString()).pattern is not None


def test_a_pattern_keeps_no_message_alive() -> None:
    parser = StepParser(LIMITS.max_sequences)
    hidden = wire.encode(np.zeros((64, HIDDEN), SERVED.dtype))
    for size in (1000, 2000):  # scanned, then matched
        values: dict[str, Any] = {"sequence": [7], "kind": [pb.ROW_KIND_PREFILL], "step": [1], "position": [size]}
        request = pb.StepRequest(server_epoch=1, hidden=hidden, query_start_loc=[0, 64], **values)
        body = request.SerializeToString()
        num_references = sys.getrefcount(body)
        pattern = parser.parse_step(body).pattern
        read_step(parser.parse_step(body), SERVED, now_s=0.0, until_s=None)
        assert pattern is not None and pattern.form is not None and pattern.num_bytes < 100
        assert sys.getrefcount(body) == num_references


@pytest.mark.parametrize(
    ("body", "most_bytes", "expected"),
    [
        (b"", 0, []),
        (b"\x01\x80\x01\x00", 4, [1, 128, 0]),
        (b"\x01\x80\x01\x00", 3, None),
        (b"\x01\x80\x01\x00", 5, [1, 128, 0]),
        (b"\x01\x80", 5, None),  # cut off
        (b"\xff" * 8 + b"\x7f", 9, [2**63 - 1]),
        (b"\xff" * 9 + b"\x01", 10, None),  # 64 bits
    ],
)
def test_packed_varints_are_read_up_to_a_number_of_bytes(
    body: bytes, most_bytes: int, expected: list[int] | None
) -> None:
    assert read_varints(b"\x7f" + body + b"\x80", (1, 1 + len(body)), most_bytes) == expected
