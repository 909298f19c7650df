"""What the kernels for Hopper share, in Gluon."""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deltaline_kernels.device.overlap import can_overlap
from deltaline_kernels.device.sizes import SHARED_BYTES, find_shared_bytes

# Channels for whose tiles there is room on any GPU.
NARROW = 128
# Triton 3.7 renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def on_hopper(device: torch.device) -> bool:
    """Return whether kernels for Hopper run on a device; Triton's interpreter has no Gluon."""
    compiled = device.type != "cpu" and not triton.knobs.runtime.interpret
    return compiled and torch.cuda.get_device_capability(device)[0] == 9


def is_aligned(x: Tensor) -> bool:
    """Return whether tiles of x can be copied whole: there are rows, and they begin at multiples of 16 bytes."""
    return x.shape[0] > 0 and x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def has_room(x: Tensor, channels: int) -> bool:
    """Return whether a program has room for the tiles of a walk, as wide as `channels`, and those on their way.

    Compiled for compute capability 12, of 256 channels they take 121 to 129 KiB of its 99; for 8.9, which has no more
    and no copy engine, at most 97.
    """
    return channels <= NARROW or not can_overlap(x) or find_shared_bytes(x.device) >= SHARED_BYTES


def make_tiles(matrix: Tensor, width: int, tokens: int) -> TensorDescriptor:
    """Return tiles of 16-bit values, of so many tokens and columns of `[T, columns]`, as copies have them in shared
    memory."""
    size, strides = [*matrix.shape], [matrix.stride(0), 1]
    return TensorDescriptor(matrix, size, strides, [tokens, width], gl.NVMMASharedLayout(min(128, 2 * width), 16, 2))


@gluon.jit
def copy_rest(buffer, pointer, row_stride, num_rows, layout: gl.constexpr):
    """Copy the first num_rows rows of a tile to shared memory, and zeros behind them."""
    ROWS: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    buffer.store(gl.load(pointer + i * row_stride + j, mask=(i < num_rows) & (j >= 0), other=0.0))


@gluon.jit
def clear_rows(buffer, first, WARPS: gl.constexpr):
    """Overwrite the rows of a buffer from `first` on with zeros, a few columns at a time."""
    ROWS: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    PART: gl.constexpr = 64
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    is_kept = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None] < first
    for i in gl.static_range(COLUMNS // PART):
        part = buffer.slice(i * PART, PART, 1)
        part.store(gl.where(is_kept, part.load(layout), 0.0).to(buffer.dtype))
    fence_async_shared()
    barrier()
