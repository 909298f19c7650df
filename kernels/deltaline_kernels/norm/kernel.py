"""Gated RMS norm in Triton: a program normalises a block of heads. It may begin while the launch before it runs."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.device.overlap import can_overlap, launch_options

BLOCK_VALUES = 2048


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["total_heads"])
def _gated_rms_norm(
    o,
    z,
    weight,
    y,
    num_heads,
    total_heads,
    o_stride,
    z_stride,
    eps,
    V: tl.constexpr,
    SHARED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    o_head = tl.program_id(0).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    o_v = tl.arange(0, BLOCK_V)
    in_tile = (o_head < total_heads)[:, None] & (o_v < V)[None, :]
    o_token = o_head // num_heads
    o_in_token = (o_head % num_heads)[:, None] * V + o_v[None, :]
    b_o = tl.load(o + o_token[:, None] * o_stride + o_in_token, mask=in_tile, other=0.0).to(tl.float32)
    b_z = tl.load(z + o_token[:, None] * z_stride + o_in_token, mask=in_tile, other=0.0).to(tl.float32)
    o_weight = o_v[None, :] if SHARED else o_in_token
    b_w = tl.load(weight + o_weight, mask=(o_v < V)[None, :], other=0.0).to(tl.float32)
    gate = (b_z if SILU else 1.0) / (1.0 + tl.exp(-b_z))
    if GATE_FIRST:
        b_o *= gate
    mean = tl.sum(b_o * b_o, axis=1) / V
    b_y = b_o / tl.sqrt(mean + eps)[:, None] * b_w
    if not GATE_FIRST:
        b_y *= gate
    tl.store(y + o_head[:, None] * V + o_v[None, :], b_y.to(y.dtype.element_ty), mask=in_tile)


def gated_rms_norm_triton(
    o: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    y: Tensor,
    *,
    gate_first: bool = False,
    activation: str = "silu",
) -> None:
    """Write the gated norm of o to y `[T, HV*V]`. Arguments are validated by `gated_rms_norm`."""
    num_tokens, num_heads, value_dim = o.shape
    total_heads = num_tokens * num_heads
    if total_heads == 0 or value_dim == 0:
        return
    block_v = triton.next_power_of_2(value_dim)
    block_heads, overlap = max(1, BLOCK_VALUES // block_v), can_overlap(o)
    _gated_rms_norm[(triton.cdiv(total_heads, block_heads),)](
        o,
        z,
        weight,
        y,
        num_heads,
        total_heads,
        o.stride(0),
        z.stride(0),
        eps,
        V=value_dim,
        SHARED=weight.ndim == 1,
        GATE_FIRST=gate_first,
        SILU=activation == "silu",
        BLOCK_HEADS=block_heads,
        BLOCK_V=block_v,
        OVERLAP=overlap,
        num_warps=4 if block_v <= 2 * BLOCK_VALUES else 8,
        num_stages=1,
        **launch_options(overlap=overlap),
    )
