"""Messages of steps as bytes: a request is written with one copy of its tensor, a reply is read as a view of it.

Knows the fields that carry tensors, and leaves the others to protobuf. Knows neither sequences nor channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

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
_HIDDEN_TAG = layers.StepResponse.HIDDEN_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
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
    output_slice: bytes = b"",
    max_reply_bytes: int = 0,
) -> list[wire.Buffer]:
    """Return a serialised StepRequest as pieces. tensor: the hidden states, a serialised Tensor in pieces.
    output_slice: the serialised field, where there is one.

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
            _asked(output, priority, queue_timeout_us, max_reply_bytes),
            output_slice,
        )
    )
    return [fields, *wire.field_pieces(layers.StepRequest.HIDDEN_FIELD_NUMBER, tensor)]


# What is the same from step to step is serialised once.
@lru_cache(1024)
def _column_heads(*lengths: int) -> list[bytes]:
    return [wire.field_head(number, length) for number, length in zip(_COLUMNS, lengths, strict=True)]


@lru_cache(256)
def _whose(server_epoch: int, span: int) -> bytes:
    return layers.StepRequest(server_epoch=server_epoch, span=span).SerializeToString()


@lru_cache(256)
def _asked(output: layers.OutputRows.ValueType, priority: int, queue_timeout_us: int, max_reply_bytes: int) -> bytes:
    return layers.StepRequest(
        output=output, priority=priority, queue_timeout_us=queue_timeout_us, max_reply_bytes=max_reply_bytes
    ).SerializeToString()


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
        return head.correlation_id, _step_of(body, *found[layers.StepStreamResponse.STEP_FIELD_NUMBER])
    if head.HasField("status"):
        return head.correlation_id, from_status(head.status)
    return head.correlation_id, ProtocolError("the reply is empty")


def _usual_fields(body: bytes, begin: int, end: int) -> tuple[list[bytes], tuple[int, int] | None, bytes] | None:
    """The columns of a response, where its tensor lies, and the rest, of one that our servers write: in this order."""
    try:
        columns, at, num_rows = [], begin, body[begin + 1]
        if num_rows > 0x7F:  # of three bytes or more: the heads differ
            num_rows = num_rows & 0x7F | body[begin + 2] << 7
        for head, num_bytes in _usual_heads(num_rows):
            if not body.startswith(head, at):
                return None
            at += len(head) + num_bytes
            columns.append(body[at - num_bytes : at])
        if body[at] != _HIDDEN_TAG:
            return None
        size, at = body[at + 1], at + 2
        if size > 0x7F:
            size, at = (size & 0x7F | body[at] << 7, at + 1) if body[at] < 0x80 else wire.read_varint(body, at - 1)
    except (IndexError, DecodeError):
        return None
    return (columns, (at, at + size), body[at + size : end]) if at + size <= end else None


@lru_cache(64)
def _usual_heads(num_rows: int) -> list[tuple[bytes, int]]:
    """What stands before each column of so many rows, and the column's bytes."""
    sizes = num_rows, 8 * num_rows, 4 * (num_rows + 1)
    return [(wire.field_head(number, size), size) for number, size in zip(_ANSWER[:3], sizes, strict=True)]


def _step_of(body: bytes, begin: int, end: int) -> StepAnswer | ProtocolError:
    """Read the StepResponse in body[begin:end], or say what is wrong with it."""
    try:
        usual = _usual_fields(body, begin, end)
        if usual is None:
            found, rest = _scan(body, begin, end, _ANSWER)
            usual = [body[slice(*found.get(one, _ABSENT))] for one in _ANSWER[:3]], found.get(_ANSWER[3]), rest
        (outcome, position, start), tensor, rest = usual
        fields = layers.StepResponse.FromString(rest)
        if fields.outcome or fields.position or fields.output_start_loc or fields.HasField("hidden"):
            raise DecodeError("a field comes twice")
        if not outcome.isascii() or len(position) % 8 or len(start) % 4:
            raise DecodeError("a column of no such numbers")
        hidden, shared = (None, None) if tensor is None else _tensor(body, *tensor)
        # Columns are copied: numpy is slow where they are unaligned.
        return StepAnswer(outcome, np.frombuffer(position, _INT64), start, fields, hidden, shared)
    except (DecodeError, wire.WireError) as error:
        return ProtocolError(f"the reply is malformed: {error}")


def _tensor(body: bytes, begin: int, end: int) -> tuple[Array | None, tensor_pb2.Tensor | None]:
    """Read the Tensor in body[begin:end]: its elements, or where they are. Raises: DecodeError; WireError."""
    found, rest = _scan(body, begin, end, _ELEMENTS)
    begin, end = found.get(tensor_pb2.Tensor.INLINE_FIELD_NUMBER, _ABSENT)
    if not found and (shared := _header(rest)).HasField("shared"):
        return None, shared
    return np.ndarray(*_shape_and_dtype(rest, end - begin), body, begin), None


# Those of a decode loop are the same from step to step.
@lru_cache(16)
def _header(fields: bytes) -> tensor_pb2.Tensor:
    """A Tensor but for its elements; nobody changes it. Raises DecodeError."""
    return tensor_pb2.Tensor.FromString(fields)


@lru_cache(16)
def _shape_and_dtype(fields: bytes, num_bytes: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """What a Tensor of so many bytes says of its elements. Raises: DecodeError; WireError for what does not fit."""
    header = _header(fields)
    dtype, shape = wire.numpy_dtype(header.dtype), tuple(header.shape)
    # Of no rows too, a row's size must be one that numpy takes.
    is_shaped = len(shape) in (2, 3) and min(shape[1:]) > 0 and math.prod(shape[1:]) <= wire.MAX_DIM
    if not is_shaped or shape[0] < 0 or math.prod(shape) * dtype.itemsize != num_bytes:
        expected = "elements [rows, hidden_size] or [rows, streams, hidden_size]"
        raise wire.WireError("hidden", expected, f"{num_bytes} bytes for the shape {shape}")
    return shape, dtype


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
                tag, at = wire.read_varint(body, field)
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
                value, at = (
                    (value & 0x7F | body[at] << 7, at + 1) if body[at] < 0x80 else wire.read_varint(body, at - 1)
                )
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
