"""The time steps of every chunk of 64 tokens and the sums of their log decays, all at once, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.chunks import find_chunk
from deltaline_kernels.mamba2.gates import read_rate, time_step
from deltaline_kernels.mamba2.inputs import MambaInputs
from deltaline_kernels.mamba2.plan import CHUNK
from deltaline_kernels.rows import Rows

# fp32 values of a chunk and head: two vectors, exponents of 2. G_i; and G_j - log2(dt_j), so that the weight of token j
# in the output of token i, exp(G_i - G_j) dt_j, is one exponential of a difference.
STEPS = 2 * CHUNK
# Heads of one program: the time steps of a token are whole sectors.
HEADS = 16
WARPS = 4
# What decays by more than exp(-40) in one token no longer counts beside anything; so that sums of log decays stay small
# enough for their differences.
STRONGEST = tl.constexpr(-40.0)
LOG2_E = tl.constexpr(1.4426950408889634)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["control"])
def _sum_steps(
    dt,
    rate,
    dt_bias,
    steps,
    control,
    num_rows,
    least,
    greatest,
    dt_stride,
    H: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    LOG_RATE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    i_slot = tl.program_id(0) // BLOCKS
    first, end, is_here = find_chunk(control, num_rows, i_slot, CHUNK)
    if is_here:
        o_c = tl.arange(0, CHUNK)[None, :]
        o_h = (tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS))[:, None]
        in_h = o_h < H
        in_t = in_h & (first + o_c < end)
        b_rate = read_rate(tl.load(rate + o_h, mask=in_h, other=0.0), LOG_RATE)
        b_bias = tl.zeros((HEADS, 1), tl.float32)
        if HAS_BIAS:
            b_bias = tl.load(dt_bias + o_h, mask=in_h, other=0.0).to(tl.float32)
        b_dt = tl.load(dt + (first.to(tl.int64) + o_c) * dt_stride + o_h, mask=in_t, other=0.0)
        b_step = time_step(b_dt, b_bias, least, greatest, SOFTPLUS)
        if not SOFTPLUS:
            # Clamped in any case: it has a logarithm.
            b_step = tl.where(b_step < least, least, b_step)
            b_step = tl.where(b_step > greatest, greatest, b_step)
        b_g = b_rate * b_step
        b_g = tl.where(b_g < STRONGEST, STRONGEST, b_g)
        b_g = tl.cumsum(tl.where(in_t, b_g, 0.0) * LOG2_E, axis=1)
        # A step of 0, and what is behind the row's end, weighs nothing: its exponent is above all others.
        b_log = tl.where(in_t & (b_step > 0.0), tl.log2(tl.where(b_step > 0.0, b_step, 1.0)), float("-inf"))
        b_log = tl.where(in_t & (b_step != b_step), b_step, b_log)
        p_steps = steps + (i_slot.to(tl.int64) * H + o_h) * (2 * CHUNK) + o_c
        tl.store(p_steps, b_g, mask=in_h)
        tl.store(p_steps + CHUNK, b_g - b_log, mask=in_h)


def launch_steps(inputs: MambaInputs, rows: Rows) -> Tensor:
    """Return the steps `[slots, H, STEPS]` fp32 of all chunks, which have the slots of `find_chunk`.

    A time step is within the limits without `softplus` too. The slots of no chunk are left as they are.
    """
    heads, dt = inputs.heads, inputs.dt
    rate, _, dt_bias = inputs.weights
    num_slots = dt.shape[0] // CHUNK + rows.num_rows
    steps = torch.empty((num_slots, heads.num_heads, STEPS), dtype=torch.float32, device=dt.device)
    _sum_steps[(num_slots * triton.cdiv(heads.num_heads, HEADS),)](
        dt,
        rate,
        dt_bias,
        steps,
        rows.control,
        rows.num_rows,
        *heads.dt_limit,
        dt.stride(0),
        H=heads.num_heads,
        CHUNK=CHUNK,
        HEADS=HEADS,
        **inputs.steps,
        num_warps=WARPS,
    )
    return steps
