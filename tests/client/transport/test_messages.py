"""Messages of steps as bytes, against protobuf's own parser and serialiser."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from numpy.typing import NDArray

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import tensor_pb2
from deltaline_client import ProtocolError, QueueFull
from deltaline_client._transport.messages import (
    StepAnswer,
    StepColumns,
    read_stream_response,
    step_request,
    stream_request,
)


def response(rows: int = 3, **fields: Any) -> layers.StepStreamResponse:
    hidden = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    values: dict[str, Any] = {
        "outcome": [1] * rows,
        "position": [2**63] * rows,
        "output_start_loc": range(rows + 1),
        "hidden": wire.encode(hidden) if rows else None,
        "timing": layers.StepTiming(queue_ns=5),
    }
    return layers.StepStreamResponse(correlation_id=2**40, step=layers.StepResponse(**(values | fields)))


def request(hidden: NDArray[Any], **changes: Any) -> bytes:
    """The request of two rows that `fields` is, with its tensor, on a stream."""
    words = {"sequence": "<u8", "kind": "u1", "step": "<u8", "position": "<u8", "accepted": "<i4"}
    columns = {name: np.array(COLUMNS[name], dtype).tobytes() for name, dtype in words.items()}
    columns["query_start_loc"] = np.array(COLUMNS["query_start_loc"], "<u4").tobytes()
    values: dict[str, Any] = {"span": 3, "output": layers.OUTPUT_ROWS_LAST, "priority": -3, "queue_timeout_us": 10**6}
    tensor = wire.tensor_pieces(hidden)
    return stream_request(300, step_request(7, columns=StepColumns(**columns), tensor=tensor, **(values | changes)))


COLUMNS: dict[str, Any] = {
    "sequence": [2**64 - 1, 1],
    "kind": [layers.ROW_KIND_VERIFY, layers.ROW_KIND_DECODE],
    "step": [2**40, 1],
    "position": [0, 2**63],
    "accepted": [-1, 2],
    "query_start_loc": [0, 3, 4],
}


def columns_of(answer: StepAnswer) -> tuple[list[int], list[int], list[int]]:
    start = np.frombuffer(answer.output_start_loc, "<u4")
    return list(answer.outcome), answer.position.view("<u8").tolist(), start.tolist()


def without_columns(message: layers.StepResponse) -> layers.StepResponse:
    for name in ("outcome", "position", "output_start_loc", "hidden"):
        message.ClearField(name)
    return message


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=str)
def test_a_request_is_what_protobuf_reads(dtype: Any) -> None:
    hidden = np.arange(24).reshape(6, 4).astype(dtype)
    place = layers.OutputSlice(region=9, offset=64, size_bytes=128)
    output_slice = layers.StepRequest(output_slice=place).SerializeToString()
    message = layers.StepStreamRequest.FromString(request(hidden[[0, 1, 4, 5]], output_slice=output_slice))
    assert message.correlation_id == 300
    np.testing.assert_array_equal(wire.decode(message.step.hidden, limit_bytes=1000), hidden[[0, 1, 4, 5]])
    message.step.ClearField("hidden")
    assert message.step == layers.StepRequest(
        server_epoch=7,
        span=3,
        output=layers.OUTPUT_ROWS_LAST,
        priority=-3,
        queue_timeout_us=10**6,
        output_slice=place,
        **COLUMNS,
    )


def test_streams_have_a_dimension_of_their_own() -> None:
    hidden = np.arange(48, dtype=np.float32).reshape(4, 3, 4)
    message = layers.StepStreamRequest.FromString(request(hidden))
    np.testing.assert_array_equal(wire.decode(message.step.hidden, limit_bytes=1000), hidden)
    _, answer = read_stream_response(response(4, hidden=wire.encode(hidden)).SerializeToString())
    assert isinstance(answer, StepAnswer) and answer.hidden is not None
    np.testing.assert_array_equal(answer.hidden, hidden)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_response_is_read_as_a_view(rows: int) -> None:
    message = response(rows)
    body = message.SerializeToString()
    correlation_id, answer = read_stream_response(body)
    assert correlation_id == 2**40
    assert isinstance(answer, StepAnswer)
    if rows:
        assert answer.hidden is not None and not answer.hidden.flags.owndata
        np.testing.assert_array_equal(answer.hidden, wire.decode(message.step.hidden, limit_bytes=1000))
    else:
        assert answer.hidden is None
    expected = [1] * rows, [2**63] * rows, list(range(rows + 1))
    assert columns_of(answer) == expected
    assert answer.fields == without_columns(message.step)


def test_a_refusal_is_an_error() -> None:
    status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="deltaline"))
    message = layers.StepStreamResponse(correlation_id=5, status=status)
    correlation_id, error = read_stream_response(message.SerializeToString())
    assert (correlation_id, type(error)) == (5, QueueFull)


@pytest.mark.parametrize(
    "hidden",
    [
        tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[3, 5], inline=bytes(48)),
        tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[-3, -4], inline=bytes(48)),
        tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[12], inline=bytes(48)),
        tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1, 1, 3, 4], inline=bytes(48)),
        tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[0, 1 << 62, 1 << 62]),
        tensor_pb2.Tensor(shape=[3, 4], inline=bytes(48)),
        tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[3, 4]),
    ],
    ids=["bytes", "negative", "low rank", "high rank", "large", "dtype", "no payload"],
)
def test_a_malformed_tensor_is_an_error_of_its_step(hidden: tensor_pb2.Tensor) -> None:
    correlation_id, error = read_stream_response(response(hidden=hidden).SerializeToString())
    assert (correlation_id, type(error)) == (2**40, ProtocolError)


@pytest.mark.parametrize(
    "more",
    [
        layers.StepResponse(outcome=[layers.ROW_OUTCOME_EXECUTED]).SerializeToString(),
        layers.StepResponse(hidden=tensor_pb2.Tensor(shape=[3, 4])).SerializeToString(),
        wire.varint(layers.StepResponse.POSITION_FIELD_NUMBER << 3 | 1) + bytes(8),
        wire.varint(layers.StepResponse.OUTCOME_FIELD_NUMBER << 3) + b"\1",
    ],
    ids=["column twice", "tensor twice", "number of its own", "outcome of its own"],
)
@pytest.mark.parametrize("is_behind", [False, True])
def test_a_field_in_pieces_is_refused(more: bytes, is_behind: bool) -> None:
    step = response().step.SerializeToString()
    step = step + more if is_behind else more + step
    body = b"".join([b"\x08\x05", *wire.field_pieces(layers.StepStreamResponse.STEP_FIELD_NUMBER, [step])])
    assert layers.StepStreamResponse.FromString(body).correlation_id == 5  # protobuf takes it
    correlation_id, error = read_stream_response(body)
    assert (correlation_id, type(error)) == (5, ProtocolError)


def test_mutated_replies_are_read_as_protobuf_does_or_refused() -> None:
    rng = np.random.default_rng(0)
    sound = response().SerializeToString()
    num_read = 0
    for _ in range(1500):
        body = bytearray(sound)
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(0, len(body)))
            match int(rng.integers(0, 3)):
                case 0:
                    body[at] = int(rng.integers(0, 256))
                case 1:
                    del body[at:]
                case _:
                    body[at:at] = rng.bytes(int(rng.integers(1, 5)))
            body = body or bytearray(b"\x00")
        try:
            correlation_id, answer = read_stream_response(bytes(body))
        except ProtocolError:
            continue
        if isinstance(answer, StepAnswer):
            num_read += 1
            try:
                expected = layers.StepStreamResponse.FromString(bytes(body))
            except DecodeError:  # invalid UTF-8 or the like in what was skipped
                continue
            assert correlation_id == expected.correlation_id
            if answer.hidden is not None:
                assert answer.hidden.tobytes() == expected.step.hidden.inline
            step = expected.step
            assert columns_of(answer) == (list(step.outcome), list(step.position), list(step.output_start_loc))
            rest = without_columns(step).SerializeToString(deterministic=True)
            assert answer.fields.SerializeToString(deterministic=True) == rest
    assert num_read > 100
