"""Tensors survive the wire, and every lie about one is refused before anything is allocated."""

from __future__ import annotations

from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from deltaline import wire
from deltaline.v1 import layer_service_pb2, tensor_pb2

LIMIT = 4 * 2**20


def make_tensor(shape: list[int], num_bytes: int, dtype: int = tensor_pb2.DATA_TYPE_FLOAT32) -> tensor_pb2.Tensor:
    """A Tensor that claims a shape over so many zero bytes."""
    return tensor_pb2.Tensor(dtype=cast("tensor_pb2.DataType.ValueType", dtype), shape=shape, inline=bytes(num_bytes))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 7), (2, 1, 3, 4)])
def test_decode_returns_what_encode_was_given(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    decoded = wire.decode(wire.encode(array), limit_bytes=LIMIT)
    assert decoded.dtype == array.dtype
    np.testing.assert_array_equal(decoded.view(np.uint8), array.view(np.uint8))


def test_decoded_array_is_read_only() -> None:
    decoded = wire.decode(wire.encode(np.ones((2, 2), np.float32)), limit_bytes=LIMIT)
    with pytest.raises(ValueError, match="read-only"):
        decoded[0, 0] = 1


def test_element_order_is_little_endian() -> None:
    assert wire.encode(np.array([1.0], np.float32)).inline == b"\x00\x00\x80\x3f"
    assert wire.encode(np.array([1.0], ml_dtypes.bfloat16)).inline == b"\x80\x3f"


def test_strided_array_is_sent_in_its_logical_order() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(wire.decode(wire.encode(array), limit_bytes=LIMIT), array)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.dtype(">f4"), np.complex64])
def test_encode_refuses_other_dtypes(dtype: Any) -> None:
    with pytest.raises(wire.WireError, match="dtype"):
        wire.encode(np.zeros(2, dtype))


@pytest.mark.parametrize("dtype", [0, 4, 99, -1, 2**31 - 1])
def test_decode_refuses_unknown_dtypes(dtype: int) -> None:
    with pytest.raises(wire.WireError) as caught:
        wire.decode(make_tensor([1], 4, dtype), limit_bytes=LIMIT, field="hidden")
    assert caught.value.field == "hidden.dtype" and str(caught.value).endswith(f", got {dtype}")


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param([], id="rank 0"),
        pytest.param([1] * 5, id="rank 5"),
        pytest.param([1] * 10_000, id="rank 10000"),
        pytest.param([0, 4], id="zero"),
        pytest.param([-1, 4], id="negative"),
        pytest.param([-2, -2], id="negative twice"),
        pytest.param([2**31, 1], id="2^31"),
        pytest.param([2**63 - 1], id="2^63-1"),
        pytest.param([-(2**63)], id="-2^63"),
        pytest.param([2, 2], id="too few bytes"),
        pytest.param([1, 3], id="too many bytes"),
    ],
)
def test_decode_refuses_shapes_that_lie(shape: list[int]) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(make_tensor(shape, 4 * 4 - 1), limit_bytes=LIMIT)


@pytest.mark.parametrize(
    "shape",
    [[2**16, 2**16], [4_194_305, 4_194_305, 211_106], [2**31 - 1] * 4, [1024, 1025]],
    ids=["2^32 elements", "wraps to a small number", "largest", "just above the limit"],
)
def test_decode_refuses_products_above_the_limit(shape: list[int]) -> None:
    with pytest.raises(wire.TensorTooLargeError):
        wire.decode(make_tensor(shape, 16), limit_bytes=LIMIT)


def test_decode_refuses_an_absent_payload() -> None:
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1])
    with pytest.raises(wire.WireError, match="no payload"):
        wire.decode(tensor, limit_bytes=LIMIT)


def test_decode_refuses_an_empty_tensor() -> None:
    tensor = wire.encode(np.zeros((0, 8), np.float32))
    with pytest.raises(wire.WireError, match="shape"):
        wire.decode(tensor, limit_bytes=LIMIT)


@pytest.mark.parametrize("rows", [0, 1, 3, 127, 128, 5000], ids=str)
def test_pieces_concatenate_to_the_message_that_protobuf_makes(rows: int) -> None:
    array = np.random.default_rng(2).standard_normal((rows, 7)).astype(np.float32)
    head = layer_service_pb2.StepResponse(position=[3, 4], output_start_loc=[0, 1])
    pieces = wire.field_pieces(layer_service_pb2.StepResponse.HIDDEN_FIELD_NUMBER, wire.tensor_pieces(array))
    whole = layer_service_pb2.StepResponse.FromString(b"".join([head.SerializeToString(), *pieces]))
    head.hidden.CopyFrom(wire.encode(array))
    assert whole == head


def test_decode_takes_a_tensor_of_exactly_the_limit() -> None:
    assert wire.decode(make_tensor([2, 3], 24), limit_bytes=24).shape == (2, 3)


def test_elements_are_aligned_wherever_they_lie_in_a_message() -> None:
    message = b"\x00" + np.arange(3, dtype=np.float32).tobytes()
    array = wire.view(tensor_pb2.DATA_TYPE_FLOAT32, [3], memoryview(message)[1:], limit_bytes=LIMIT)
    assert array.flags.aligned and array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [0, 127, 128, 300, 2**21, 2**63])
def test_a_varint_is_that_of_protobuf(value: int) -> None:
    message = layer_service_pb2.StepTiming(queue_ns=value)
    assert (message.SerializeToString() or b"\x08\x00") == b"\x08" + wire.varint(value)
