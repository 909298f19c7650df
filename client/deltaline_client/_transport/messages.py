"""Messages of steps as bytes: a request is written with one copy of its tensor, a reply is read as a view of it.

Knows the fields that carry tensors, and leaves the others to protobuf. Knows neither sequences nor channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import tensor_pb2
from deltaline_client._arrays import Array
from deltaline_client._exceptions import DeltalineError, ProtocolError
from deltaline_client._transport.statuses import from_status

_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}


@dataclass(frozen=True)
class StepAnswer:
    """A StepResponse: its small fields as protobuf, its outputs as a read-only view [rows, *shape], None for none.

    shared: in place of `hidden`, a Tensor without elements that says where in shared memory the outputs are.
    """

    fields: layers.StepResponse
    hidden: Array | None
    shared: tensor_pb2.Tensor | None = None


def step_request(fields: layers.StepRequest, hidden: Array) -> list[wire.Buffer]:
    """Return a serialised StepRequest as pieces: `fields`, and packed rows [T, *token shape].

    The last piece is a view of contiguous rows: nothing is copied before they are joined.
    """
    tensor = wire.field_pieces(layers.StepRequest.HIDDEN_FIELD_NUMBER, wire.tensor_pieces(hidden))
    return [fields.SerializeToString(), *tensor]


def shared_step_request(fields: layers.StepRequest, tensor: bytes) -> list[wire.Buffer]:
    """Return a serialised StepRequest as pieces: `fields`, and a serialised Tensor that lies in shared memory."""
    return [fields.SerializeToString(), *wire.field_pieces(layers.StepRequest.HIDDEN_FIELD_NUMBER, [tensor])]


def stream_request(correlation_id: int, step: Sequence[wire.Buffer], traceparent: bytes = b"") -> bytes:
    """Return a serialised StepStreamRequest around the pieces of a StepRequest: the one copy of the tensor."""
    head = layers.StepStreamRequest(correlation_id=correlation_id, traceparent=traceparent).SerializeToString()
    return b"".join([head, *wire.field_pieces(layers.StepStreamRequest.STEP_FIELD_NUMBER, step)])


def read_stream_response(body: bytes) -> tuple[int, StepAnswer | DeltalineError]:
    """Return the correlation id of a serialised StepStreamResponse, and what it answers: a response, or an error.

    Raises: ProtocolError for bytes that are no such message; a malformed response inside one is an error of its step.
    """
    try:
        rest, step = _take(memoryview(body), layers.StepStreamResponse.STEP_FIELD_NUMBER)
        head = layers.StepStreamResponse.FromString(rest)
    except DecodeError as error:
        raise ProtocolError("the reply can't be parsed") from error
    if step is not None:
        try:
            return head.correlation_id, _read_step(step)
        except (DecodeError, wire.WireError) as error:
            return head.correlation_id, ProtocolError(f"the reply is malformed: {error}")
    if head.HasField("status"):
        return head.correlation_id, from_status(head.status)
    return head.correlation_id, ProtocolError("the reply is empty")


def _read_step(body: memoryview) -> StepAnswer:
    """Read a StepResponse. Raises: DecodeError; WireError for a wrong tensor."""
    rest, tensor = _take(body, layers.StepResponse.HIDDEN_FIELD_NUMBER)
    fields = layers.StepResponse.FromString(rest)
    if tensor is None:
        return StepAnswer(fields, None)
    rest, elements = _take(tensor, tensor_pb2.Tensor.INLINE_FIELD_NUMBER)
    header = tensor_pb2.Tensor.FromString(rest)
    if elements is None and header.HasField("shared"):
        return StepAnswer(fields, None, header)
    dtype, shape = wire.numpy_dtype(header.dtype), tuple(header.shape)
    view = np.frombuffer(b"" if elements is None else elements, np.uint8)
    # Of no rows too, a row's size must be one that numpy takes.
    is_shaped = len(shape) in (2, 3) and min(shape[1:]) > 0 and math.prod(shape[1:]) <= wire.MAX_DIM
    if not is_shaped or shape[0] < 0 or math.prod(shape) * dtype.itemsize != len(view):
        expected = "elements [rows, hidden_size] or [rows, streams, hidden_size]"
        raise wire.WireError("hidden", expected, f"{len(view)} bytes for the shape {shape}")
    return StepAnswer(fields, view.view(dtype).reshape(shape))


def _take(body: memoryview, number: int) -> tuple[bytes, memoryview | None]:
    """Split a serialised message: everything but its field `number`, and that field's bytes; None where it is absent.

    A message may hold a field several times, and protobuf then merges them. No deltaline server sends that, and it is
    refused. Raises: DecodeError.
    """
    rest: list[memoryview] = []
    taken: memoryview | None = None
    at, kept_from = 0, 0
    while at < len(body):
        begin = at
        tag, at = _varint(body, at) if body[at] > 0x7F else (body[at], at + 1)
        kind = tag & 7
        if kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
            continue
        if kind not in (_VARINT, _LENGTH_DELIMITED):
            raise DecodeError("an unknown kind of field")
        value, at = (body[at], at + 1) if at < len(body) and body[at] < 0x80 else _varint(body, at)
        if kind == _LENGTH_DELIMITED:
            first, at = at, at + value
            if tag >> 3 == number and at <= len(body):
                if taken is not None:
                    raise DecodeError("a field comes twice")
                taken = body[first:at]
                rest.append(body[kept_from:begin])
                kept_from = at
    if at > len(body):
        raise DecodeError("the message is cut off")
    rest.append(body[kept_from:])
    return b"".join(rest), taken


def _varint(body: memoryview, at: int) -> tuple[int, int]:
    """Read a varint: its value, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(body):
            break
        byte: Any = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DecodeError("the message is cut off")
