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


class Problem:
    """y = x @ weight.T of one shape on one device, and what cuBLASLt offers for it.

    offers: the best by its own judgement first; none where it has no algorithm.
    """

    def __init__(
        self, library: Library, num_rows: int, outputs: int, inputs: int, row_stride: int, dtype: torch.dtype
    ) -> None:
        self.library, self.outputs = library, outputs
        self.operation = library.create("MatmulDesc", _COMPUTE_32F, _TYPES[torch.float32])
        library.set("MatmulDesc", self.operation, _DESC_TRANSA, c_int(_OP_T))
        kind = _TYPES[dtype]
        self.weight = library.create("MatrixLayout", kind, c_uint64(inputs), c_uint64(outputs), c_int64(inputs))
        self.x = library.create("MatrixLayout", kind, c_uint64(inputs), c_uint64(num_rows), c_int64(row_stride))
        self.y = library.create("MatrixLayout", kind, c_uint64(outputs), c_uint64(num_rows), c_int64(outputs))
        self._found = self._find()
        self.offers = [Offer(self._read(one, _TILE), self._read(one, _SPLITS)) for one in self._found]

    def product(self, number: int) -> Product:
        """Return the product by one of the offers."""
        return Product(self, self._found[number])

    def _find(self) -> list[_Heuristic]:
        preference = self.library.create("MatmulPreference")
        self.library.set("MatmulPreference", preference, _MOST_WORKSPACE, c_uint64(WORKSPACE_BYTES))
        self.library.set("MatmulPreference", preference, _REDUCTIONS, c_int(_REDUCE_IN_WORKSPACE))
        found, count = (_Heuristic * NUM_OFFERS)(), c_int()
        layouts = self.weight, self.x, self.y, self.y
        wanted = preference, NUM_OFFERS, found, byref(count)
        # Says that it is not supported where it has nothing to offer.
        self.library.try_to("cublasLtMatmulAlgoGetHeuristic", self.library.handle, self.operation, *layouts, *wanted)
        self.library.call("cublasLtMatmulPreferenceDestroy", preference)
        return [one for one in found[: count.value] if one.status == 0]

    def _read(self, found: _Heuristic, attribute: int) -> int:
        value, size = c_int(), c_size_t()
        told = attribute, byref(value), c_size_t(ctypes.sizeof(value)), byref(size)
        self.library.call("cublasLtMatmulAlgoConfigGetAttribute", byref(found, _Heuristic.algo.offset), *told)
        return value.value


class Product:
    """y = x @ weight.T of one shape on one device, by one algorithm."""

    def __init__(self, problem: Problem, found: _Heuristic) -> None:
        self._problem, self._found = problem, found

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product `[T, N]`, computed on the current stream."""
        problem, found = self._problem, self._found
        y = x.new_empty(x.shape[0], problem.outputs)
        # Of the allocator, which keeps it from other streams' work, and in a graph from other graphs'.
        workspace = torch.empty(found.workspace, dtype=torch.uint8, device=x.device)
        written = c_void_p(y.data_ptr()), problem.y
        problem.library.call(
            "cublasLtMatmul",
            problem.library.handle,
            problem.operation,
            byref(c_float(1.0)),
            c_void_p(weight.data_ptr()),
            problem.weight,
            c_void_p(x.data_ptr()),
            problem.x,
            byref(c_float(0.0)),
            *written,
            *written,
            byref(found, _Heuristic.algo.offset),
            c_void_p(workspace.data_ptr()),
            c_size_t(found.workspace),
            c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        return y


class Library:
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
def library_of(device: torch.device) -> Library | None:
    """Return the library for a device; None where torch has brought none."""
    try:
        return Library(device)
    except OSError:
        return None


@cache
def find_product(
    num_rows: int, outputs: int, inputs: int, row_stride: int, dtype: torch.dtype, device: torch.device
) -> Product | None:
    """Return the product of a shape on a device; None where there is no library, or it has no algorithm."""
    library = library_of(device)
    if library is None:
        return None
    problem = Problem(library, num_rows, outputs, inputs, row_stride, dtype)
    return problem.product(choose(num_rows, outputs, inputs, problem.offers)) if problem.offers else None
