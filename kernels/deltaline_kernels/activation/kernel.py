"""silu(gate) * up in Triton: a program has some channels of a token. Reads and writes everything once.

A launch may begin while the one before it runs.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.device.activation import limited, silu
from deltaline_kernels.device.overlap import can_overlap, launch_options
from deltaline_kernels.device.sizes import cdiv, pow2

# Channels of a program, and of a thread: a load of 16 bytes of a 16-bit tensor.
BLOCK_CHANNELS, THREAD_CHANNELS = 1024, 8


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit
def silu_and_mul_kernel(
    gate_up, y, stride, N: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Write silu(gate) * up, limited, of BLOCK channels of a token."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    EXACT: tl.constexpr = y.dtype.element_ty == tl.float32
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o_n = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    p_gate = gate_up + token * stride + o_n
    gate = tl.load(p_gate, mask=o_n < N, other=0.0).to(tl.float32)
    up = tl.load(p_gate + N, mask=o_n < N, other=0.0).to(tl.float32)
    gate, up = limited(gate, up, LIMIT)
    b_y = silu(gate, EXACT).to(y.dtype.element_ty).to(tl.float32) * up
    tl.store(y + token * N + o_n, b_y.to(y.dtype.element_ty), mask=o_n < N)


def silu_and_mul_triton(gate_up: Tensor, y: Tensor, limit: float) -> None:
    """Write y `[T, N]`. Arguments are validated by `silu_and_mul`."""
    num_tokens, num_channels = y.shape
    if y.numel() == 0:
        return
    block, overlap = min(BLOCK_CHANNELS, pow2(num_channels)), can_overlap(y)
    silu_and_mul_kernel[(num_tokens * cdiv(num_channels, block),)](
        gate_up,
        y,
        gate_up.stride(0),
        N=num_channels,
        LIMIT=limit,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=max(1, block // (32 * THREAD_CHANNELS)),
        num_stages=1,
        **launch_options(overlap=overlap),
    )
