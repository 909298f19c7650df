"""cuBLASLt by ctypes: torch takes the first algorithm that it offers for a product, and lets nobody choose.

Matrices of cuBLAS lie by columns: `[T, N]` by rows is `[N, T]` to it, and y = x @ weight.T is y' = weight x'.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.linear.plan import Offer, choose

# Of cublasLt.h, library_types.h and cublas_api.h.
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F, _OP_T = 68, 1
_DESC_TRANSA = 3
_MOST_WORKSPACE, _REDUCTIONS = 1, 3
_TILE, _SPLITS = 1, 2
# Sums of splits in fp32 in the workspace: in place they would be added in any order.
_REDUCE_IN_WORKSPACE = 2
# As much as torch gives cuBLAS on a Hopper GPU, and offers that are looked at.
WORKSPACE_BYTES, NUM_OFFERS = 32 << 20, 32


class _Heuristic(Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class CublasError(RuntimeError):
    """A call of cuBLASLt failed, by its status."""


class Product:
    """y = x @ weight.T of one shape on one device, by one algorithm. Made once; multiplies on the current stream."""

    def __init__(
        self, library: _Library, num_rows: int, outputs: int, inputs: int, row_stride: int, dtype: torch.dtype
    ) -> None:
        self._library, self._outputs = library, outputs
        self._operation = library.create("MatmulDesc", _COMPUTE_32F, _TYPES[torch.float32])
        library.set("MatmulDesc", self._operation, _DESC_TRANSA, c_int(_OP_T))
        kind = _TYPES[dtype]
        self._weight = library.create("MatrixLayout", kind, c_uint64(inputs), c_uint64(outputs), c_int64(inputs))
        self._x = library.create("MatrixLayout", kind, c_uint64(inputs), c_uint64(num_rows), c_int64(row_stride))
        self._y = library.create("MatrixLayout", kind, c_uint64(outputs), c_uint64(num_rows), c_int64(outputs))
        offers = self._find_offers()
        self._chosen = offers[choose([self._describe(one) for one in offers])] if offers else None

    @property
    def is_offered(self) -> bool:
        """Whether cuBLASLt has an algorithm for the shape."""
        return self._chosen is not None

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product, `[T, N]`, of a shape for which there is an algorithm."""
        assert self._chosen is not None
        y = x.new_empty(x.shape[0], self._outputs)
        # Of the allocator, which keeps it from other streams' work, and in a graph from other graphs'.
        workspace = torch.empty(self._chosen.workspace, dtype=torch.uint8, device=x.device)
        self._library.call(
            "cublasLtMatmul",
            self._library.handle,
            self._operation,
            byref(c_float(1.0)),
            c_void_p(weight.data_ptr()),
            self._weight,
            c_void_p(x.data_ptr()),
            self._x,
            byref(c_float(0.0)),
            c_void_p(y.data_ptr()),
            self._y,
            c_void_p(y.data_ptr()),
            self._y,
            byref(self._chosen, _Heuristic.algo.offset),
            c_void_p(workspace.data_ptr()),
            c_size_t(self._chosen.workspace),
            c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        return y

    def _find_offers(self) -> list[_Heuristic]:
        """Return what cuBLASLt offers, the best by its own judgement first."""
        preference = self._library.create("MatmulPreference")
        self._library.set("MatmulPreference", preference, _MOST_WORKSPACE, c_uint64(WORKSPACE_BYTES))
        self._library.set("MatmulPreference", preference, _REDUCTIONS, c_int(_REDUCE_IN_WORKSPACE))
        found, count = (_Heuristic * NUM_OFFERS)(), c_int()
        layouts = self._weight, self._x, self._y, self._y
        wanted = preference, NUM_OFFERS, found, byref(count)
        # Says that it is not supported where it has nothing to offer.
        self._library.try_to("cublasLtMatmulAlgoGetHeuristic", self._library.handle, self._operation, *layouts, *wanted)
        self._library.call("cublasLtMatmulPreferenceDestroy", preference)
        return [one for one in found[: count.value] if one.status == 0]

    def _describe(self, offer: _Heuristic) -> Offer:
        return Offer(self._read(offer, _TILE), self._read(offer, _SPLITS), offer.waves)

    def _read(self, offer: _Heuristic, attribute: int) -> int:
        value, size = c_int(), c_size_t()
        algo = byref(offer, _Heuristic.algo.offset)
        told = attribute, byref(value), c_size_t(ctypes.sizeof(value)), byref(size)
        self._library.call("cublasLtMatmulAlgoConfigGetAttribute", algo, *told)
        return value.value


class _Library:
    """The library that torch has loaded, and a handle of it for one device."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError where torch has brought none."""
        self._library: Any = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
        self.handle = c_void_p()
        with torch.cuda.device(device):
            self.call("cublasLtCreate", byref(self.handle))

    def create(self, kind: str, *args: Any) -> c_void_p:
        """Return a new object of cuBLASLt's."""
        made = c_void_p()
        self.call(f"cublasLt{kind}Create", byref(made), *args)
        return made

    def set(self, kind: str, made: c_void_p, attribute: int, value: c_int | c_uint64) -> None:
        """Set an attribute of an object of cuBLASLt's."""
        size = c_size_t(ctypes.sizeof(value))
        self.call(f"cublasLt{kind}SetAttribute", made, attribute, byref(value), size)

    def call(self, name: str, *args: Any) -> None:
        """Call a function. Raises CublasError unless it says that all is well."""
        status = self.try_to(name, *args)
        if status != 0:
            raise CublasError(f"{name} said {status}")

    def try_to(self, name: str, *args: Any) -> int:
        """Call a function and return its status, 0 where all is well."""
        return int(getattr(self._library, name)(*args))


@cache
def _library_of(device: torch.device) -> _Library | None:
    try:
        return _Library(device)
    except OSError:
        return None


@cache
def find_product(
    num_rows: int, outputs: int, inputs: int, row_stride: int, dtype: torch.dtype, device: torch.device
) -> Product | None:
    """Return the product of a shape on a device; None where torch has brought no cuBLASLt, or that no algorithm."""
    library = _library_of(device)
    if library is None:
        return None
    product = Product(library, num_rows, outputs, inputs, row_stride, dtype)
    return product if product.is_offered else None
