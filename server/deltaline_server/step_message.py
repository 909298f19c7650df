"""Step messages as they lie on the wire: every field found, none checked.

Two parsers with one meaning. The fast one walks over the top-level fields and makes arrays over the message's own
bytes, so that no tensor is copied; it knows the usual form only, in which each field comes once and packed. Any other
form is protobuf's to parse or to refuse: that is the slow one. Field numbers and wire types are the descriptors'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from numpy.typing import NDArray

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import tensor_pb2

Column = Sequence[int] | NDArray[Any]
# Where a field's content begins and ends in the message.
Run = tuple[int, int]

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
# The most bytes of a varint that the walk reads: 63 bits, so that nothing is cut and no sign has to be told.
VARINT_BYTES = 9
# Beyond it a varint of a narrower type would be cut or have a sign.
MAX_NARROW = 2**31 - 1
# The most bytes of a packed shape that the walk reads: a longer one has too many dimensions or too large ones.
SHAPE_BYTES = 5 * wire.MAX_RANK

_F = FieldDescriptor
_WIRE_TYPES = {
    _F.TYPE_FIXED64: FIXED64,
    _F.TYPE_FIXED32: FIXED32,
    _F.TYPE_SFIXED32: FIXED32,
    _F.TYPE_MESSAGE: LENGTH_DELIMITED,
    _F.TYPE_BYTES: LENGTH_DELIMITED,
}
_WIDE = {_F.TYPE_UINT64, _F.TYPE_INT64}


class Slice(NamedTuple):
    """A deltaline.v1.SharedSlice, without a size, or an OutputSlice."""

    region: int
    offset: int
    size_bytes: int


class StepMessage(NamedTuple):
    """The fields of a deltaline.v1.StepRequest. Columns are arrays, or protobuf's own lists.

    dtype, shape, inline and shared are those of `hidden`: inline or shared is its payload, both are None when it has
    none. output_slice is None where it is absent.
    """

    server_epoch: int
    span: int
    sequence: Column
    kind: Column
    step: Column
    position: Column
    accepted: Column
    query_start_loc: Column
    dtype: int
    shape: Sequence[int]
    inline: bytes | memoryview | None
    shared: Slice | None
    output: int
    priority: int
    queue_timeout_us: int
    output_slice: Slice | None


class StreamStep(NamedTuple):
    """The fields of a deltaline.v1.StepStreamRequest."""

    correlation_id: int
    step: StepMessage


def parse_step(body: bytes) -> StepMessage:
    """Parse a StepRequest. Raises: DecodeError for bytes that are not one."""
    return walk_step(body, 0, len(body)) or from_protobuf(pb.StepRequest.FromString(body))


def parse_stream_step(body: bytes) -> StreamStep:
    """Parse a StepStreamRequest. Raises: DecodeError for bytes that are not one."""
    found = _STREAM_STEP.walk(body, 0, len(body))
    if found is not None:
        run = found.get("step")
        step = None if run is None else walk_step(body, *run)
        if step is not None:
            return StreamStep(found.get("correlation_id", 0), step)
    message = pb.StepStreamRequest.FromString(body)
    return StreamStep(message.correlation_id, from_protobuf(message.step))


def from_protobuf(message: pb.StepRequest) -> StepMessage:
    """The same fields, parsed by protobuf."""
    hidden, place = message.hidden, message.output_slice
    return StepMessage(
        server_epoch=message.server_epoch,
        span=message.span,
        sequence=message.sequence,
        kind=message.kind,
        step=message.step,
        position=message.position,
        accepted=message.accepted,
        query_start_loc=message.query_start_loc,
        dtype=hidden.dtype,
        shape=hidden.shape,
        inline=hidden.inline if hidden.HasField("inline") else None,
        shared=Slice(hidden.shared.region, hidden.shared.offset, 0) if hidden.HasField("shared") else None,
        output=message.output,
        priority=message.priority,
        queue_timeout_us=message.queue_timeout_us,
        output_slice=(
            Slice(place.region, place.offset, place.size_bytes) if message.HasField("output_slice") else None
        ),
    )


def walk_step(body: bytes, begin: int, end: int) -> StepMessage | None:
    """The StepRequest in body[begin:end] if it has the usual form, else None. Copies no tensor."""
    found = _STEP.walk(body, begin, end)
    if found is None:
        return None
    get = found.get
    kind = _column(body, get("kind"), np.uint8)
    hidden = _TENSOR.walk(body, *get("hidden", _EMPTY))
    if hidden is None or not kind.tobytes().isascii():  # a kind of more than one byte
        return None
    shape = _read_varints(body, hidden.get("shape", _EMPTY))
    inline, shared, place = hidden.get("inline"), hidden.get("shared"), get("output_slice")
    if shape is None or (inline is not None and shared is not None):  # of two payloads the last one counts
        return None
    shared_slice = None if shared is None else _read_slice(_SHARED_SLICE, body, shared)
    output_slice = None if place is None else _read_slice(_OUTPUT_SLICE, body, place)
    if (shared is None) != (shared_slice is None) or (place is None) != (output_slice is None):
        return None
    zigzag = get("priority", 0)
    return StepMessage(
        server_epoch=get("server_epoch", 0),
        span=get("span", 0),
        sequence=_column(body, get("sequence"), np.uint64),
        kind=kind,
        step=_column(body, get("step"), np.uint64),
        position=_column(body, get("position"), np.uint64),
        accepted=_column(body, get("accepted"), np.int32),
        query_start_loc=_column(body, get("query_start_loc"), np.uint32),
        dtype=hidden.get("dtype", 0),
        shape=shape,
        inline=None if inline is None else memoryview(body)[inline[0] : inline[1]],
        shared=shared_slice,
        output=get("output", 0),
        priority=zigzag >> 1 ^ -(zigzag & 1),
        queue_timeout_us=get("queue_timeout_us", 0),
        output_slice=output_slice,
    )


class Walk:
    """Steps over the top-level fields of one type of message, those named; a message with others is unusual."""

    def __init__(self, descriptor: Descriptor, *names: str) -> None:
        """names: the fields to find. Raises: ValueError for one whose tag takes more than a byte."""
        # By tag: name, wire type, bytes of an element, and the largest number that is read, -1 for no limit.
        self._fields: dict[int, tuple[str, int, int, int]] = {}
        for name in names:
            field = descriptor.fields_by_name[name]
            element = _WIRE_TYPES.get(field.type, VARINT)
            wire_type = LENGTH_DELIMITED if field.is_packed else element
            tag = field.number << 3 | wire_type
            if tag > 0x7F:
                raise ValueError(f"{name}: expected a field number of at most 15, got {field.number}")
            # What has a length has a whole number of these bytes.
            size = {FIXED64: 8, FIXED32: 4}.get(element, 1)
            self._fields[tag] = (name, wire_type, size, -1 if field.type in _WIDE else MAX_NARROW)

    def walk(self, body: bytes, at: int, end: int) -> dict[str, Any] | None:
        """Each field that is there: int of a number, Run of what has a length. None for any unusual form.

        A field that comes twice is unusual too: so a message holds no bytes but those of its fields.
        """
        fields = self._fields
        found: dict[str, Any] = {}
        while at < end:
            field = fields.get(body[at])
            if field is None:
                return None
            name, wire_type, size, most = field
            at += 1
            if name in found:
                return None
            if wire_type == FIXED64:
                found[name] = int.from_bytes(body[at : at + 8], "little")
                at += 8
                continue
            value = shift = 0
            for byte in body[at : at + VARINT_BYTES]:
                at += 1
                value |= (byte & 0x7F) << shift
                if byte < 0x80:
                    break
                shift += 7
            else:
                return None
            if wire_type == VARINT:
                if value > most >= 0:
                    return None
                found[name] = value
            else:
                if value % size:
                    return None
                found[name] = at, at + value
                at += value
        return found if at == end else None


_EMPTY: Run = (0, 0)
_TENSOR_FIELDS = ("dtype", "shape", "inline", "shared")
_STEP = Walk(pb.StepRequest.DESCRIPTOR, *(name for name in StepMessage._fields if name not in _TENSOR_FIELDS), "hidden")
_TENSOR = Walk(tensor_pb2.Tensor.DESCRIPTOR, *_TENSOR_FIELDS)
_SHARED_SLICE = Walk(tensor_pb2.SharedSlice.DESCRIPTOR, "region", "offset")
_OUTPUT_SLICE = Walk(pb.OutputSlice.DESCRIPTOR, "region", "offset", "size_bytes")
_STREAM_STEP = Walk(pb.StepStreamRequest.DESCRIPTOR, "correlation_id", "step")


def _read_slice(walk: Walk, body: bytes, run: Run) -> Slice | None:
    """A slice of shared memory; None for any unusual form."""
    found = walk.walk(body, *run)
    return None if found is None else Slice(found.get("region", 0), found.get("offset", 0), found.get("size_bytes", 0))


def _column(body: bytes, run: Run | None, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """A packed run of fixed numbers as an array; empty where there is none. Copied: numpy is slow where unaligned."""
    begin, end = run or _EMPTY
    return np.frombuffer(body[begin:end], _LITTLE[dtype])


_LITTLE: dict[type[np.integer[Any]], np.dtype[Any]] = {
    dtype: np.dtype(dtype).newbyteorder("<") for dtype in (np.uint8, np.int32, np.uint32, np.uint64)
}


def _read_varints(body: bytes, run: Run) -> list[int] | None:
    """Packed varints of up to 63 bits; None for wider or too many ones."""
    begin, end = run
    values: list[int] = []
    if end - begin > SHAPE_BYTES:
        return None
    value = shift = 0
    for byte in body[begin:end]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            values.append(value)
            value = shift = 0
        elif shift == 7 * VARINT_BYTES:
            return None
    return None if shift else values
