"""Experts of many tokens by torch's grouped products: pairs of a token and an expert lie sorted by expert."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from deltaline_kernels.device.activation import relu2, silu
from deltaline_kernels.device.sizes import pow2
from deltaline_kernels.moe.combine import combine_triton

# Pairs that a program looks at at once, channels of a program.
BLOCK_PAIRS, BLOCK_CHANNELS = 4096, 1024
# Values of a row of a grouped product are a multiple of these; so many experts are too many for one.
ROW_UNIT, TOO_MANY_EXPERTS = 8, 1024
# Compute capabilities, without the digit behind the point, for which torch has them; on others it asks the device where
# groups end, and waits.
ARCHITECTURES = (9, 10)


def has_grouped(x: Tensor, down: Tensor) -> bool:
    """Return whether torch has grouped products of tokens x with experts `[E, H, I]` of this dtype, on this device."""
    num_experts, width, inner = down.shape
    return (
        hasattr(functional, "grouped_mm")
        and x.dtype == torch.bfloat16
        and x.device.type != "cpu"
        and torch.cuda.get_device_capability(x.device)[0] in ARCHITECTURES
        and num_experts < TOO_MANY_EXPERTS
        and width % ROW_UNIT == 0
        and inner % ROW_UNIT == 0
    )


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["num_pairs", "num_experts"], do_not_specialize_on_alignment=["experts", "places", "ends"]
)
def _sort(experts, places, ends, num_pairs, num_experts, BLOCK: tl.constexpr):
    """Write where the pairs of an expert lie, and where they end; a program more: -1 for those without an expert."""
    own = tl.program_id(0)
    o_p = tl.arange(0, BLOCK)
    if own == num_experts:
        for begin in range(0, num_pairs, BLOCK):
            inside = begin + o_p < num_pairs
            expert = tl.load(experts + begin + o_p, mask=inside, other=0)
            tl.store(places + begin + o_p, -1, mask=inside & ((expert < 0) | (expert >= num_experts)))
    else:
        lower = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, num_pairs, BLOCK):
            expert = tl.load(experts + begin + o_p, mask=begin + o_p < num_pairs, other=-1)
            lower += ((expert >= 0) & (expert < own)).to(tl.int32)
        end = tl.sum(lower, axis=0)
        for begin in range(0, num_pairs, BLOCK):
            mine = tl.load(experts + begin + o_p, mask=begin + o_p < num_pairs, other=-1) == own
            ones = mine.to(tl.int32)
            tl.store(places + begin + o_p, end + tl.cumsum(ones, axis=0) - 1, mask=mine)
            end += tl.sum(ones, axis=0)
        tl.store(ends + own, end)


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize_on_alignment=["places"])
def _spread(x, rows, places, x_stride, H: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Write BLOCK channels of a token to the rows of its pairs."""
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o_h = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x + token * x_stride + o_h, mask=o_h < H, other=0.0)
    for c in tl.static_range(C):
        row = tl.load(places + token * C + c).to(tl.int64)
        tl.store(rows + row * H + o_h, b_x, mask=(row >= 0) & (o_h < H))


# One compiled variant whatever experts a layer has.
@triton.jit(do_not_specialize=["num_experts"])
def _activate(both, hidden, ends, num_experts, INNER: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Write silu(gate) * up of BLOCK channels of a row, without gates relu(up) ** 2; behind the last pair there is
    nothing."""
    BLOCKS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o_i = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    HALVES: tl.constexpr = 2 if GATED else 1
    p_gate = both + row * (HALVES * INNER) + o_i
    inside = (o_i < INNER) & (row < tl.load(ends + num_experts - 1))
    gate = tl.load(p_gate, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(p_gate + INNER, mask=inside, other=0.0).to(tl.float32)
        y = silu(gate, False) * up
    else:
        y = relu2(gate)
    tl.store(hidden + row * INNER + o_i, y.to(hidden.dtype.element_ty), mask=inside)


def run_grouped(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor, out: Tensor, *, gated: bool
) -> None:
    """Write out `[T, H]`."""
    num_tokens, choices = experts.shape
    num_experts, width, inner = down.shape
    num_pairs = num_tokens * choices
    places, ends = experts.new_empty(num_pairs), experts.new_empty(num_experts)
    block = min(BLOCK_PAIRS, max(16, pow2(num_pairs)))
    _sort[(num_experts + 1,)](
        experts, places, ends, num_pairs, num_experts, BLOCK=block, num_warps=8 if block == BLOCK_PAIRS else 4
    )
    rows = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    block = min(BLOCK_CHANNELS, pow2(width))
    grid = (num_tokens * triton.cdiv(width, block),)
    _spread[grid](x, rows, places, x.stride(0), H=width, C=choices, BLOCK=block, num_warps=4)
    both = functional.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
    # The parts go where the rows were, and each is as large as a batch's tokens times their choices.
    del rows
    hidden = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    block = min(BLOCK_CHANNELS, pow2(inner))
    grid = (num_pairs * triton.cdiv(inner, block),)
    _activate[grid](both, hidden, ends, num_experts, INNER=inner, GATED=gated, BLOCK=block, num_warps=2)
    parts = functional.grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    combine_triton(parts, places, weights, experts, num_experts, out)
