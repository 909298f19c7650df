"""Runs a Gluon kernel on CPU tensors, program by program, to test what it computes without a GPU.

Every operation happens at once where it is begun: a copy that overwrites a tile too early shows, a wait or a barrier
that is missing does not, nor does what a layout or the assembler gets wrong. Shared memory is NaN until written. Groups
of warps with parts of their own are threads, which wait for each other's barriers.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Pointer:
    """A tensor's memory and offsets into it."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.memory = torch.as_strided(tensor, (tensor.untyped_storage().size() // tensor.element_size(),), (1,), 0)
        self.offset = torch.as_tensor(offset) + (tensor.storage_offset() if isinstance(offset, int) else 0)
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> Pointer:
        moved = Pointer.__new__(Pointer)
        moved.memory, moved.dtype, moved.offset = self.memory, self.dtype, self.offset + offset
        return moved

    def __sub__(self, offset: Any) -> Pointer:
        return self.__add__(-offset)

    def __getitem__(self, at: Any) -> Pointer:
        moved = self + 0
        moved.offset = torch.as_tensor(self.offset)[at]
        return moved

    def to(self, dtype: torch.dtype, bitcast: bool = True) -> Pointer:
        """Return a pointer to values of another dtype of the same size."""
        assert bitcast
        assert dtype.itemsize == self.memory.dtype.itemsize
        moved = self + 0
        moved.memory, moved.dtype = self.memory.view(dtype), types.SimpleNamespace(element_ty=dtype)
        return moved

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Return the mask and the offsets, 0 where it is not set."""
        mask = torch.as_tensor(True if mask is None else mask)
        mask, offset = torch.broadcast_tensors(mask, self.offset)
        found = torch.where(mask, offset, 0)
        assert found.numel() == 0 or 0 <= int(found.min()) <= int(found.max()) < max(1, self.memory.numel())
        return mask, found


class Shared:
    """A buffer in shared memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def index(self, i: Any) -> Shared:
        return Shared(self.tensor[int(i)])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.tensor.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.tensor.permute(order))

    def load(self, _layout: object) -> Tensor:
        return self.tensor.clone()

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.tensor.dtype and value.shape == self.tensor.shape
        self.tensor.copy_(value)


class Tiles:
    """A tensor descriptor of a matrix."""

    layout = None

    def __init__(self, tensor: Tensor, columns: int, stride: int) -> None:
        self.matrix = tensor.as_strided((tensor.shape[0], columns), (stride, 1))
        self.dtype = tensor.dtype

    def place(self, at: list[Any], shape: torch.Size) -> tuple[Tensor, tuple[int, int]]:
        """Return the part of a tile that lies in the matrix, and its size."""
        row, column = (int(i) for i in at)
        assert row >= 0 and column >= 0
        part = self.matrix[row : row + shape[0], column : column + shape[1]]
        return part, (part.shape[0], part.shape[1])


class Barriers:
    """Counts what arrives at a program's barriers. A phase ends when all have arrived and all bytes have come."""

    # As long as a thread waits for others, in seconds: then a test fails that would not end.
    PATIENCE = 60.0

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Of each barrier: what arrives in a phase, what is missing in this one, bytes too, and ended phases.
        self._counts: dict[int, list[int]] = {}

    def init(self, bar: Shared, count: int) -> None:
        self._counts[bar.tensor.data_ptr()] = [count, count, 0, 0]

    def expect(self, bar: Shared, num_bytes: int, pred: Any = True) -> None:
        if pred:
            self._come(bar, 1, -num_bytes)

    def arrive(self, bar: Shared, count: int = 1, pred: Any = True) -> None:
        if pred:
            self._come(bar, count, 0)

    def copied(self, bar: Shared, num_bytes: int) -> None:
        self._come(bar, 0, num_bytes)

    def wait(self, bar: Shared, phase: Any, pred: Any = True) -> None:
        counts = self._counts[bar.tensor.data_ptr()]
        with self._changed:
            assert not pred or self._changed.wait_for(lambda: counts[3] % 2 != int(phase), self.PATIENCE)

    def _come(self, bar: Shared, arrived: int, num_bytes: int) -> None:
        counts = self._counts[bar.tensor.data_ptr()]
        with self._changed:
            counts[1] -= arrived
            counts[2] += num_bytes
            assert counts[1] >= 0
            if counts[1] == 0 and counts[2] == 0:
                counts[1] = counts[0]
                counts[3] += 1
                self._changed.notify_all()

    def MBarrierLayout(self) -> None:
        return None


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    mask, found = pointer.places(mask)
    values = pointer.memory[found] if pointer.memory.numel() else torch.zeros(found.shape, dtype=pointer.memory.dtype)
    return torch.where(mask, values, torch.tensor(other, dtype=values.dtype))


def _store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    mask, found = pointer.places(mask)
    assert value.dtype == pointer.memory.dtype
    pointer.memory[found[mask]] = torch.broadcast_to(value, mask.shape)[mask]


def _copy_to_shared(
    barriers: Barriers, tiles: Tiles, at: list[Any], bar: Shared, shared: Shared, pred: Any = True
) -> None:
    if pred:
        part, (rows, columns) = tiles.place(at, shared.shape)
        shared.tensor.zero_()
        shared.tensor[:rows, :columns] = part
        barriers.copied(bar, shared.tensor.numel() * shared.dtype.itemsize)


def _copy_to_global(tiles: Tiles, at: list[Any], shared: Shared) -> None:
    part, (rows, columns) = tiles.place(at, shared.shape)
    part.copy_(shared.tensor[:rows, :columns])


def _copy_values(shared: Shared, pointer: Pointer, mask: Any = None) -> None:
    mask, found = pointer.places(mask)
    shared.tensor[mask] = pointer.memory[found[mask]]


def _multiply(a: Any, b: Any, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Tensor:
    del is_async
    left, right = (x.tensor if isinstance(x, Shared) else x for x in (a, b))
    assert left.dtype == right.dtype and acc.dtype == torch.float32
    product = left.float() @ right.float()
    assert product.shape == acc.shape
    return product + acc if use_acc else product


def _wait(_pending: int, deps: list[Any]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def _specialize(parts: list[Any], _warps: object, _registers: object) -> None:
    with ThreadPoolExecutor(len(parts)) as groups:
        for ended in [groups.submit(run, *told) for run, told in parts]:
            ended.result()


def _nothing(*_: object, **__: object) -> None:
    return None


def _layout(*_: object, **__: object) -> None:
    return None


def _language(program: Callable[[], int], num_programs: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        constexpr=object,
        int32=torch.int32,
        int64=torch.int64,
        float32=torch.float32,
        program_id=lambda _axis: torch.tensor(program()),
        num_programs=lambda _axis: torch.tensor(num_programs),
        NVMMADistributedLayout=_layout,
        DotOperandLayout=_layout,
        SliceLayout=_layout,
        BlockedLayout=_layout,
        SwizzledSharedLayout=_layout,
        NVMMASharedLayout=_layout,
        arange=lambda start, end, layout: torch.arange(start, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(
            torch.zeros(shape, dtype=dtype) if dtype == torch.int64 else torch.full(shape, torch.nan, dtype=dtype)
        ),
        load=_load,
        store=_store,
        where=lambda mask, x, y: torch.where(torch.as_tensor(mask), x, y),
        minimum=lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)),
        maximum=lambda x, y: torch.maximum(torch.as_tensor(x), torch.as_tensor(y)),
        sum=lambda x, axis: x.sum(axis),
        max=lambda x, axis: x.amax(axis),
        min=lambda x, axis: x.amin(axis),
        cumsum=lambda x, axis: x.cumsum(axis),
        associative_scan=lambda x, axis, _add: x.cumsum(axis),
        reshape=torch.reshape,
        expand_dims=torch.unsqueeze,
        abs=torch.abs,
        rsqrt=torch.rsqrt,
        pointer_type=lambda dtype: dtype,
        float16=torch.float16,
        exp=torch.exp,
        exp2=torch.exp2,
        fma=lambda x, y, z: x * y + z,
        log2=torch.log2,
        convert_layout=lambda x, layout: x,
        static_range=range,
        warp_specialize=_specialize,
        static_assert=_nothing,
        inline_asm_elementwise=_nothing,
    )


def run_on_cpu(kernel: Any, grid: int, arguments: dict[str, Any]) -> None:
    """Run `grid` programs of a `gluon.jit` kernel; the arguments' tensors are passed as pointers."""
    from triton.language import constexpr

    programs = [0]
    barriers = Barriers()
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=partial(_copy_to_shared, barriers),
        async_copy_shared_to_global=_copy_to_global,
        store_wait=_nothing,
    )
    values = types.SimpleNamespace(async_copy_global_to_shared=_copy_values, commit_group=_nothing, wait_group=_nothing)
    language = _language(lambda: programs[0], grid)
    names = {
        "gl": language,
        # Of what a kernel has in common with one in Triton.
        "tl": language,
        "gdc_launch_dependents": _nothing,
        "mbarrier": barriers,
        "tma": copies,
        "async_copy": values,
        "fence_async_shared": _nothing,
        "barrier": _nothing,
        "warpgroup_mma": _multiply,
        "warpgroup_mma_wait": _wait,
        "warpgroup_mma_init": lambda x: x,
        # Modifiers of attention, which are inlined.
        "leaf_function": lambda leaf: rebuild(leaf.function),
        "leaf_range": lambda leaf: rebuild(leaf.range_function),
    }

    def rebuild(function: Any) -> Callable[..., Any]:
        raw = function.fn
        helpers = {name: rebuild(raw.__globals__[name]) for name in raw.__code__.co_names if _is_kernel(raw, name)}
        constants = {name: value.value for name, value in raw.__globals__.items() if isinstance(value, constexpr)}
        known = {**raw.__globals__, **constants, **helpers, **names}
        return types.FunctionType(raw.__code__, known, raw.__name__, raw.__defaults__)

    run = rebuild(kernel)
    told = {name: _to_cpu(x) for name, x in arguments.items()}
    # From the last one on: what a program writes behind its row then replaces what the next row's has written.
    for program in reversed(range(grid)):
        programs[0] = program
        run(**told)


class OnCpu:
    """A `gluon.jit` kernel as a launcher launches it, but on CPU tensors."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self._run, grid[0])

    def _run(self, num_programs: int, *arguments: Any, num_warps: int, maxnreg: int = 0, **constants: Any) -> None:
        told = dict(zip(self.kernel.arg_names, arguments, strict=False))
        run_on_cpu(self.kernel, num_programs, told | constants)


def _to_cpu(argument: Any) -> Any:
    """Return tensors as pointers and descriptors as tiles, also those of a tuple."""
    if isinstance(argument, tuple):
        return tuple(map(_to_cpu, argument))
    if isinstance(argument, Tensor):
        return Pointer(argument)
    if hasattr(argument, "block_shape"):
        return Tiles(argument.base, argument.shape[1], argument.strides[0])
    return argument


def _is_kernel(function: Any, name: str) -> bool:
    return hasattr(function.__globals__.get(name), "arg_names")
