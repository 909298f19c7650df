"""The Triton kernels of the bench itself: one does nothing, one only reads, one only copies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# 16-byte loads, eight in flight per thread: enough to reach the read bandwidth of an H200 without a loop.
BLOCK_READ = 8192
BLOCK_COPY = 2048


@triton.jit
def _nothing(target):
    pass


@triton.jit
def _read(source, totals, BLOCK: tl.constexpr):
    i_block = tl.program_id(0).to(tl.int64)
    b_source = tl.load(source + i_block * BLOCK + tl.arange(0, BLOCK))
    tl.store(totals + i_block, tl.sum(b_source, 0))


@triton.jit
def _copy(source, target, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + o, tl.load(source + o))


def do_nothing(target: Tensor) -> Tensor:
    """Launch an empty kernel; return `target` as it was."""
    _nothing[(1,)](target, num_warps=1)
    return target


def read_all(source: Tensor) -> Tensor:
    """Read `source`, fp32 of a multiple of 8192 values; return the sum of each 8192 of them.

    Raises:
        ValueError: another number of values.
    """
    if source.numel() == 0 or source.numel() % BLOCK_READ:
        raise ValueError(f"source: expected a multiple of {BLOCK_READ} values, got {source.numel()}")
    num_blocks = source.numel() // BLOCK_READ
    totals = torch.empty(num_blocks, dtype=torch.float32, device=source.device)
    _read[(num_blocks,)](source, totals, BLOCK=BLOCK_READ, num_warps=8)
    return totals


def copy_all(source: Tensor, target: Tensor) -> Tensor:
    """Copy `source`, fp32 of a multiple of 2048 values, to `target`; return it.

    Raises:
        ValueError: another number of values.
    """
    if source.numel() == 0 or source.numel() % BLOCK_COPY:
        raise ValueError(f"source: expected a multiple of {BLOCK_COPY} values, got {source.numel()}")
    _copy[(source.numel() // BLOCK_COPY,)](source, target, BLOCK=BLOCK_COPY, num_warps=4)
    return target
