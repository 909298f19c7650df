"""Tensors between numpy and the wire: `deltaline.v1.Tensor` messages and their serialised bytes.

Knows element types, sizes and limits. Does not know what a tensor means, nor gRPC, nor how an error is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import DTypeLike, NDArray

from deltaline.v1 import tensor_pb2

MAX_RANK = 4
MAX_DIM = 2**31 - 1

# Elements on the wire are little-endian.
_DTYPES: dict[int, np.dtype[Any]] = {
    tensor_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DATA_TYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    tensor_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
}
_DATA_TYPES: dict[np.dtype[Any], tensor_pb2.DataType.ValueType] = {
    np.dtype("<f4"): tensor_pb2.DATA_TYPE_FLOAT32,
    np.dtype(ml_dtypes.bfloat16): tensor_pb2.DATA_TYPE_BFLOAT16,
    np.dtype("<f2"): tensor_pb2.DATA_TYPE_FLOAT16,
}

Buffer = bytes | memoryview


class WireError(ValueError):
    """A tensor does not fit the contract. The message has no element of it. Attribute field: where it is wrong."""

    def __init__(self, field: str, expected: str, got: str) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")
        self.field = field


class TensorTooLargeError(WireError):
    """A tensor has, or claims, more bytes than the limit."""


def data_type(dtype: DTypeLike) -> tensor_pb2.DataType.ValueType:
    """Return the wire's name of a numpy dtype: float32, bfloat16 (ml_dtypes) or float16, little-endian.

    Raises: WireError for any other dtype.
    """
    value = _DATA_TYPES.get(np.dtype(dtype))
    if value is None:
        raise WireError("dtype", "float32, bfloat16 or float16 (little-endian)", np.dtype(dtype).name)
    return value


def numpy_dtype(value: int) -> np.dtype[Any]:
    """Return the numpy dtype of a DataType value.

    Raises: WireError for 0 and for values that this version does not know.
    """
    dtype = _DTYPES.get(value)
    if dtype is None:
        raise WireError("dtype", "DATA_TYPE_FLOAT32, DATA_TYPE_BFLOAT16 or DATA_TYPE_FLOAT16", str(value))
    return dtype


def encode(array: NDArray[Any]) -> tensor_pb2.Tensor:
    """Copy an array of rank 1 to 4 into a Tensor message. Large tensors travel faster by `tensor_pieces`.

    Raises: WireError for a dtype or rank that the wire does not have.
    """
    payload = bytes(_payload(array))
    return tensor_pb2.Tensor(dtype=data_type(array.dtype), shape=array.shape, inline=payload)


def decode(tensor: tensor_pb2.Tensor, *, limit_bytes: int, field: str = "tensor") -> NDArray[Any]:
    """Return the tensor as a read-only array over the message's bytes; nothing is allocated but those bytes.

    Args: limit_bytes, most bytes of the elements; field, its name in errors.
    Raises: TensorTooLargeError above the limit; WireError for an unknown dtype, a wrong rank, a dimension out of range,
        an absent payload or a payload whose length differs from the shape's.
    """
    # Each access of a bytes field makes a new copy.
    payload = tensor.inline if tensor.WhichOneof("payload") == "inline" else None
    return view(tensor.dtype, tensor.shape, payload, limit_bytes=limit_bytes, field=field)


def view(
    data_type: int, shape: Sequence[int], payload: bytes | memoryview | None, *, limit_bytes: int, field: str = "tensor"
) -> NDArray[Any]:
    """Return the elements in `payload` (None: absent) as a read-only array, copied only if they are not aligned.

    Args: data_type, a DataType value; the others and what is raised: as `decode`.
    """
    dtype, shape = check_header(data_type, shape, field=field)
    num_bytes = math.prod(shape) * dtype.itemsize  # of at most MAX_RANK Python integers: the product can't wrap
    if payload is None:
        raise WireError(f"{field}.inline", "the elements", "no payload")
    if num_bytes > limit_bytes:
        raise TensorTooLargeError(f"{field}.inline", f"at most {limit_bytes} bytes", str(num_bytes))
    if len(payload) != num_bytes:
        raise WireError(f"{field}.inline", f"{num_bytes} bytes for the shape", str(len(payload)))
    array: NDArray[Any] = np.frombuffer(payload, dtype)
    if not array.flags.aligned:  # numpy copies such elements one by one, torch takes none of them
        array = np.frombuffer(bytes(payload), dtype)
    return array.reshape(shape)


def check_header(
    data_type: int, shape: Sequence[int], *, field: str = "tensor"
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return element type and shape of a tensor, wherever its elements are.

    Args: as `view`. Raises: WireError for an unknown dtype, a wrong rank or a dimension out of range.
    """
    dtype = _DTYPES.get(data_type)
    if dtype is None:
        raise WireError(f"{field}.dtype", "FLOAT32, BFLOAT16 or FLOAT16", str(data_type))
    if not 1 <= len(shape) <= MAX_RANK:
        raise WireError(f"{field}.shape", f"1 to {MAX_RANK} dimensions", str(len(shape)))
    for dim in shape:
        if not 1 <= dim <= MAX_DIM:
            raise WireError(f"{field}.shape", f"dimensions in 1 .. {MAX_DIM}", str(dim))
    return dtype, tuple(shape)


def tensor_pieces(array: NDArray[Any]) -> list[Buffer]:
    """Return the serialised Tensor of an array as buffers that concatenate to it; the elements are not copied.

    The last piece is a view of `array` (of a copy, if it is not contiguous). Raises: as `encode`.
    """
    payload = _payload(array)
    return [_header(array.dtype, array.shape), field_head(tensor_pb2.Tensor.INLINE_FIELD_NUMBER, len(payload)), payload]


def field_pieces(number: int, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return a length-delimited field (a message or bytes) that holds concatenated buffers, as buffers.

    Appended to a serialised message without that field, it sets it. protobuf's own serialiser copies a large bytes
    field several times (64 x 1024 float32: 495 us against 6 us for this, 2026-11-21, 2 cores).
    """
    return [field_head(number, sum(map(len, buffers))), *buffers]


def write_pieces(pieces: Sequence[Buffer], memory: NDArray[np.uint8]) -> None:
    """Write buffers, one behind the other, to memory, uint8 [their bytes]. Other threads run while large ones are
    copied."""
    begin = 0
    for piece in pieces:
        memory[begin : begin + len(piece)] = np.frombuffer(piece, np.uint8)
        begin += len(piece)


@lru_cache(4096)
def field_head(number: int, num_bytes: int) -> bytes:
    """Return what stands before a length-delimited field of so many bytes: its tag and its length."""
    return varint(number << 3 | 2) + varint(num_bytes)


def _payload(array: NDArray[Any]) -> memoryview:
    """The elements as bytes. Raises: WireError for a rank that the wire does not have."""
    if not 1 <= array.ndim <= MAX_RANK:
        raise WireError("shape", f"1 to {MAX_RANK} dimensions", str(array.ndim))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@lru_cache(1024)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """A serialised Tensor without its payload."""
    return tensor_pb2.Tensor(dtype=data_type(dtype), shape=shape).SerializeToString()


def varint(value: int) -> bytes:
    """Return the protobuf varint of a value >= 0."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(body: bytes, at: int) -> tuple[int, int]:
    """Read a varint of any length that protobuf takes: its value, and where it ends. Raises IndexError, DecodeError."""
    value = 0
    for shift in range(0, 70, 7):
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DecodeError("a number of more than 10 bytes")
