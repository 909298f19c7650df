"""Step messages as they lie on the wire: every field found, none checked.

Two parsers with one meaning. The fast one scans the top-level fields and makes arrays over the message's own
bytes, so that no tensor is copied; it knows the usual form only, in which each field comes once and packed. Any other
form is protobuf's to parse or to refuse: that is the slow one. Field numbers and wire types are the descriptors'.
A message that differs from an earlier one in its numbers and its tensor alone is not scanned again (step_parser.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import prefix_pb2, tensor_pb2
from deltaline_server.front.steps.wire_scan import Extent, WireScan, read_varints

Column = Sequence[int] | NDArray[Any]

# The most bytes of a packed shape that the scan reads: a longer one has too many dimensions or too large ones.
SHAPE_BYTES = 5 * wire.MAX_RANK
# The most bytes of a slice of memory in the usual form: three numbers of ten bytes at most, with their tags.
SLICE_BYTES = 33


class Slice(NamedTuple):
    """A deltaline.v1.SharedSlice, without a size, or an OutputSlice."""

    region: int
    offset: int
    size_bytes: int


class StepMessage(NamedTuple):
    """The fields of a deltaline.v1.StepRequest. Columns are arrays, or protobuf's own lists.

    dtype, shape, inline and shared are those of `hidden`: inline or shared is its payload, both are None when it has
    none. output_slice is None where it is absent. pattern: what its parser remembers of it, if it does. waypoints:
    deltaline.v1.Waypoints; a message that has any is not of the usual form.
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
    max_reply_bytes: int = 0
    pattern: Pattern | None = None
    waypoints: Sequence[prefix_pb2.Waypoints] = ()


class Extents(NamedTuple):
    """Where in a message lie the parts that differ from step to step of the same rows; None for those it has not."""

    step: Extent | None
    position: Extent | None
    inline: Extent | None
    shared: Extent | None
    output_slice: Extent | None


class StreamStep(NamedTuple):
    """The fields of a deltaline.v1.StepStreamRequest."""

    correlation_id: int
    step: StepMessage
    traceparent: bytes = b""


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
        max_reply_bytes=message.max_reply_bytes,
        waypoints=message.waypoints,
    )


class Pattern:
    """The bytes of a step message that come again with every step of the same rows, and where the others lie.

    form: for whoever reads such messages to keep what follows from those bytes; nothing at first.
    """

    __slots__ = ("_extents", "_message", "_parts", "_size", "form")

    def __init__(self, body: bytes, begin: int, end: int, message: StepMessage, extents: Extents) -> None:
        """Remember body[begin:end], a message as `scan_step` found it; no tensor of it, and none of its numbers."""
        self.form: Any = None
        nothing = _column(b"", None, np.uint64)
        self._message = message._replace(step=nothing, position=nothing, inline=None)
        self._size = end - begin
        self._extents = Extents(
            *(None if extent is None else (extent[0] - begin, extent[1] - begin) for extent in extents)
        )
        # Bytes that stay, each with the number of those behind that do not.
        self._parts: list[tuple[bytes, int]] = []
        for first, last in [*sorted(extent for extent in extents if extent is not None), (end, end)]:
            self._parts.append((body[begin:first], last - first))
            begin = last

    @property
    def num_bytes(self) -> int:
        """Bytes of the message that it keeps; the columns among them twice."""
        return sum(len(stays) for stays, _ in self._parts)

    def match(self, body: bytes, begin: int, end: int) -> StepMessage | None:
        """As `scan_step` for a message that differs in these extents alone; None for any other."""
        if end - begin != self._size:
            return None
        at = begin
        for stays, length in self._parts:
            if not body.startswith(stays, at):
                return None
            at += len(stays) + length
        step, position, inline, shared, place = self._extents
        counters = []  # copied out: numpy is slow where unaligned
        for first, last in (step or _EMPTY, position or _EMPTY):
            counters.append(np.frombuffer(body[begin + first : begin + last], _UINT64))
        shared_slice = None if shared is None else _read_slice(_SHARED_SLICE, body, begin, shared)
        output_slice = None if place is None else _read_slice(_OUTPUT_SLICE, body, begin, place)
        if (shared is None) != (shared_slice is None) or (place is None) != (output_slice is None):
            return None
        return self._message._replace(
            step=counters[0],
            position=counters[1],
            inline=None if inline is None else memoryview(body)[begin + inline[0] : begin + inline[1]],
            shared=shared_slice,
            output_slice=output_slice,
            pattern=self,
        )


def scan_step(body: bytes, begin: int, end: int) -> tuple[StepMessage, Extents] | None:
    """The StepRequest in body[begin:end] if it has the usual form, else None. Copies no tensor."""
    found = _STEP.scan(body, begin, end)
    if found is None:
        return None
    get = found.get
    kind = _column(body, get("kind"), np.uint8)
    hidden = _TENSOR.scan(body, *get("hidden", _EMPTY))
    if hidden is None or not kind.tobytes().isascii():  # a kind of more than one byte
        return None
    shape = read_varints(body, hidden.get("shape", _EMPTY), SHAPE_BYTES)
    inline, shared, place = hidden.get("inline"), hidden.get("shared"), get("output_slice")
    if shape is None or (inline is not None and shared is not None):  # of two payloads the last one counts
        return None
    shared_slice = None if shared is None else _read_slice(_SHARED_SLICE, body, 0, shared)
    output_slice = None if place is None else _read_slice(_OUTPUT_SLICE, body, 0, place)
    if (shared is None) != (shared_slice is None) or (place is None) != (output_slice is None):
        return None
    zigzag = get("priority", 0)
    message = StepMessage(
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
        max_reply_bytes=get("max_reply_bytes", 0),
    )
    return message, Extents(get("step"), get("position"), inline, shared, place)


def scan_stream_step(body: bytes) -> tuple[int, Extent, bytes] | None:
    """The correlation id, the extent of the StepRequest and the traceparent of a StepStreamRequest of the usual form,
    else None."""
    found = _STREAM_STEP.scan(body, 0, len(body))
    if found is None or "step" not in found:
        return None
    begin, end = found.get("traceparent", _EMPTY)
    return found.get("correlation_id", 0), found["step"], body[begin:end]


_EMPTY: Extent = (0, 0)
_TENSOR_FIELDS = ("dtype", "shape", "inline", "shared")
_STEP = WireScan(
    pb.StepRequest.DESCRIPTOR,
    *(name for name in StepMessage._fields if name not in (*_TENSOR_FIELDS, "pattern", "waypoints")),
    "hidden",
)
_TENSOR = WireScan(tensor_pb2.Tensor.DESCRIPTOR, *_TENSOR_FIELDS)
_SHARED_SLICE = WireScan(tensor_pb2.SharedSlice.DESCRIPTOR, "region", "offset")
_OUTPUT_SLICE = WireScan(pb.OutputSlice.DESCRIPTOR, "region", "offset", "size_bytes")
_STREAM_STEP = WireScan(pb.StepStreamRequest.DESCRIPTOR, "correlation_id", "step", "traceparent")


def _read_slice(scan: WireScan, body: bytes, begin: int, extent: Extent) -> Slice | None:
    """A slice of shared memory, its extent counted from `begin`; None for any unusual form."""
    first, last = extent
    return _slice_of(scan, body[begin + first : begin + last]) if last - first <= SLICE_BYTES else None


# A client that steps the same rows again uses the same memory again.
@lru_cache(256)
def _slice_of(scan: WireScan, fields: bytes) -> Slice | None:
    found = scan.scan(fields, 0, len(fields))
    return None if found is None else Slice(found.get("region", 0), found.get("offset", 0), found.get("size_bytes", 0))


def _column(body: bytes, extent: Extent | None, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """An extent of packed fixed numbers as an array, a copy of its own; empty where there is none."""
    begin, end = extent or _EMPTY
    return np.frombuffer(body[begin:end], _LITTLE[dtype])


_LITTLE: dict[type[np.integer[Any]], np.dtype[Any]] = {
    dtype: np.dtype(dtype).newbyteorder("<") for dtype in (np.uint8, np.int32, np.uint32, np.uint64)
}
_UINT64 = _LITTLE[np.uint64]
