"""Messages of steps as bytes: a request is written with one copy of its tensor, a reply is read as a view of it.

Knows the fields that carry tensors, and leaves the others to protobuf. Knows neither sequences nor channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import tensor_pb2
from deltaline_client._arrays import Array
from deltaline_client._exceptions import DeltalineError, ProtocolError
from deltaline_client._transport.statuses import from_status

_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_INT64 = np.dtype("<i8")
# The fields that are read without protobuf.
_STEP = (layers.StepStreamResponse.STEP_FIELD_NUMBER,)
_ANSWER = (
    layers.StepResponse.OUTCOME_FIELD_NUMBER,
    layers.StepResponse.POSITION_FIELD_NUMBER,
    layers.StepResponse.OUTPUT_START_LOC_FIELD_NUMBER,
    layers.StepResponse.HIDDEN_FIELD_NUMBER,
)
_ELEMENTS = (tensor_pb2.Tensor.INLINE_FIELD_NUMBER,)
_ABSENT = 0, 0


class StepColumns(NamedTuple):
    """The columns of a StepRequest as they lie on the wire, little-endian: fixed numbers, and a byte for each kind."""

    sequence: bytes
    kind: bytes
    step: bytes
    position: bytes
    accepted: bytes
    query_start_loc: bytes


_COLUMNS = tuple(layers.StepRequest.DESCRIPTOR.fields_by_name[name].number for name in StepColumns._fields)


class StepAnswer(NamedTuple):
    """A StepResponse of N rows: its columns, its outputs as a read-only view [rows, *shape], and the rest as protobuf.

    outcome: N bytes, each a RowOutcome. position: int64 [N]. output_start_loc: N + 1 numbers as they lie on the wire, 4
    bytes each. fields: statuses and timing. hidden: None for no outputs here. shared: in place of `hidden`, a Tensor
    without elements that says where in shared memory the outputs are.
    """

    outcome: bytes
    position: NDArray[np.int64]
    output_start_loc: bytes
    fields: layers.StepResponse
    hidden: Array | None
    shared: tensor_pb2.Tensor | None = None


def step_request(
    server_epoch: int,
    span: int,
    columns: StepColumns,
    output: layers.OutputRows.ValueType,
    priority: int,
    queue_timeout_us: int,
    tensor: Sequence[wire.Buffer],
    output_slice: layers.OutputSlice | None = None,
) -> list[wire.Buffer]:
    """Return a serialised StepRequest as pieces. tensor: the hidden states, a serialised Tensor in pieces.

    Pieces of the tensor are passed on: nothing is copied before they are joined. Raises ValueError for a number that
    its field can't hold.
    """
    sequence, kind, step, position, accepted, query_start_loc = columns
    heads = _column_heads(*map(len, columns))
    fields = b"".join(
        (
            _whose(server_epoch, span),
            *(heads[0], sequence, heads[1], kind, heads[2], step),
            *(heads[3], position, heads[4], accepted, heads[5], query_start_loc),
            _asked(output, priority, queue_timeout_us),
        )
    )
    if output_slice is not None:
        fields += layers.StepRequest(output_slice=output_slice).SerializeToString()
    return [fields, *wire.field_pieces(layers.StepRequest.HIDDEN_FIELD_NUMBER, tensor)]


# What is the same from step to step is serialised once.
@lru_cache(1024)
def _column_heads(*lengths: int) -> list[bytes]:
    return [wire.field_head(number, length) for number, length in zip(_COLUMNS, lengths, strict=True)]


@lru_cache(256)
def _whose(server_epoch: int, span: int) -> bytes:
    return layers.StepRequest(server_epoch=server_epoch, span=span).SerializeToString()


@lru_cache(256)
def _asked(output: layers.OutputRows.ValueType, priority: int, queue_timeout_us: int) -> bytes:
    asked = layers.StepRequest(output=output, priority=priority, queue_timeout_us=queue_timeout_us)
    return asked.SerializeToString()


def stream_request(correlation_id: int, step: Sequence[wire.Buffer], traceparent: bytes = b"") -> bytes:
    """Return a serialised StepStreamRequest around the pieces of a StepRequest: the one copy of the tensor."""
    head = layers.StepStreamRequest(correlation_id=correlation_id, traceparent=traceparent).SerializeToString()
    return b"".join([head, *wire.field_pieces(layers.StepStreamRequest.STEP_FIELD_NUMBER, step)])


def read_stream_response(body: bytes) -> tuple[int, StepAnswer | DeltalineError]:
    """Return the correlation id of a serialised StepStreamResponse, and what it answers: a response, or an error.

    Raises: ProtocolError for bytes that are no such message; a malformed response inside one is an error of its step.
    """
    try:
        found, rest = _scan(body, 0, len(body), _STEP)
        head = layers.StepStreamResponse.FromString(rest)
    except DecodeError as error:
        raise ProtocolError("the reply can't be parsed") from error
    if found:
        try:
            return head.correlation_id, _read_step(body, *found[layers.StepStreamResponse.STEP_FIELD_NUMBER])
        except (DecodeError, wire.WireError) as error:
            return head.correlation_id, ProtocolError(f"the reply is malformed: {error}")
    if head.HasField("status"):
        return head.correlation_id, from_status(head.status)
    return head.correlation_id, ProtocolError("the reply is empty")


def _read_step(body: bytes, begin: int, end: int) -> StepAnswer:
    """Read the StepResponse in body[begin:end]. Raises: DecodeError; WireError for a wrong tensor."""
    found, rest = _scan(body, begin, end, _ANSWER)
    get, (outcomes, positions, starts, hidden) = found.get, _ANSWER
    (begin, end), position, start = get(outcomes, _ABSENT), get(positions, _ABSENT), get(starts, _ABSENT)
    outcome = body[begin:end]
    if not outcome.isascii() or (position[1] - position[0]) % 8 or (start[1] - start[0]) % 4:
        raise DecodeError("a column of no such numbers")
    # Columns are copied: numpy is slow where they are unaligned.
    columns = outcome, np.frombuffer(body[slice(*position)], _INT64), body[slice(*start)]
    fields = layers.StepResponse.FromString(rest)
    if hidden not in found:
        return StepAnswer(*columns, fields, None)
    found, rest = _scan(body, *found[hidden], _ELEMENTS)
    header = tensor_pb2.Tensor.FromString(rest)
    if not found and header.HasField("shared"):
        return StepAnswer(*columns, fields, None, header)
    begin, end = found.get(tensor_pb2.Tensor.INLINE_FIELD_NUMBER, _ABSENT)
    dtype, shape = wire.numpy_dtype(header.dtype), tuple(header.shape)
    # Of no rows too, a row's size must be one that numpy takes.
    is_shaped = len(shape) in (2, 3) and min(shape[1:]) > 0 and math.prod(shape[1:]) <= wire.MAX_DIM
    if not is_shaped or shape[0] < 0 or math.prod(shape) * dtype.itemsize != end - begin:
        expected = "elements [rows, hidden_size] or [rows, streams, hidden_size]"
        raise wire.WireError("hidden", expected, f"{end - begin} bytes for the shape {shape}")
    return StepAnswer(*columns, fields, np.ndarray(shape, dtype, body, begin))


def _scan(body: bytes, begin: int, end: int, numbers: tuple[int, ...]) -> tuple[dict[int, tuple[int, int]], bytes]:
    """Split the message in body[begin:end]: where some length-delimited fields lie, and everything but them.

    A message may hold a field several times, and protobuf then merges them, or a column's numbers one by one. No
    deltaline server sends that, and it is refused. Raises: DecodeError.
    """
    found: dict[int, tuple[int, int]] = {}
    rest: list[bytes] = []
    at, kept_from = begin, begin
    try:
        while at < end:
            field = at
            tag = body[at]
            at += 1
            if tag > 0x7F:
                tag, at = _varint(body, field)
            kind = tag & 7
            if tag >> 3 in numbers and (kind != _LENGTH_DELIMITED or tag >> 3 in found):
                raise DecodeError("a field comes twice, or is of another kind")
            if kind in _FIXED_BYTES:
                at += _FIXED_BYTES[kind]
                continue
            if kind not in (_VARINT, _LENGTH_DELIMITED):
                raise DecodeError("an unknown kind of field")
            value = body[at]
            at += 1
            if value > 0x7F:
                value, at = (value & 0x7F | body[at] << 7, at + 1) if body[at] < 0x80 else _varint(body, at - 1)
            if kind == _LENGTH_DELIMITED:
                at += value
                if tag >> 3 in numbers:
                    found[tag >> 3] = at - value, at
                    if field > kept_from:
                        rest.append(body[kept_from:field])
                    kept_from = at
    except IndexError as error:
        raise DecodeError("the message is cut off") from error
    if at > end:
        raise DecodeError("the message is cut off")
    return found, b"".join([*rest, body[kept_from:end]])


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Read a varint: its value, and where it ends. Raises IndexError, DecodeError."""
    value = 0
    for shift in range(0, 70, 7):
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DecodeError("a number without an end")
