"""Experts in Triton over tiles of choices that have the same one: its weights are read once per tile.

The choices of all tokens, `[T * C]`, are called pairs, of a token and an expert.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.activation import relu2, silu
from deltaline_kernels.device.group import group_triton
from deltaline_kernels.device.sizes import count_tiles
from deltaline_kernels.device.state_tile import below
from deltaline_kernels.moe.combine import combine_triton
from deltaline_kernels.moe.plan import ProductPlan, TilePlan


# One compiled variant whatever tiles a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize_on_alignment=["tile_experts", "tile_pairs"])
def _multiply(
    x,
    w,
    y,
    tile_experts,
    tile_pairs,
    x_stride,
    CHOICES: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    GATED: tl.constexpr,
    RELU2: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Write BLOCK_N outputs of the pairs of a tile to their rows of y `[pairs, N]`.

    GATED: silu(x G^T) * (x U^T) with w of G and U one below the other; RELU2: relu(x w^T) ** 2; else x w^T. CHOICES:
    pairs of a row of x.
    """
    PARTS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // PARTS
    o_n = tl.program_id(0) % PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    # Tiles behind the last one have no expert.
    if expert >= 0:
        pair = tl.load(tile_pairs + tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
        in_m = (pair >= 0)[:, None]
        o_k = tl.arange(0, BLOCK_K)
        p_x = x + (pair // CHOICES).to(tl.int64)[:, None] * x_stride + o_k[None, :]
        HALVES: tl.constexpr = 2 if GATED else 1
        p_w = w + expert * (HALVES * N * K) + o_n.to(tl.int64)[None, :] * K + o_k[:, None]
        in_n = below(o_n[None, :], N, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(0, STEPS):
            in_k = below(i * BLOCK_K + o_k, K, BLOCK_K)
            inside = in_n & in_k[:, None]
            b_x = tl.load(p_x, mask=in_m & in_k[None, :], other=0.0)
            total = tl.dot(b_x, tl.load(p_w, mask=inside, other=0.0), total, input_precision="ieee")
            if GATED:
                b_up = tl.load(p_w + N * K, mask=inside, other=0.0)
                up = tl.dot(b_x, b_up, up, input_precision="ieee")
            p_x += BLOCK_K
            p_w += BLOCK_K
        if GATED:
            total = silu(total, EXACT) * up
        if RELU2:
            total = relu2(total)
        p_y = y + pair.to(tl.int64)[:, None] * N + o_n[None, :]
        tl.store(p_y, total.to(y.dtype.element_ty), mask=in_m & (o_n < N)[None, :])


def _launch(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    tile_experts: Tensor,
    tile_pairs: Tensor,
    plan: ProductPlan,
    *,
    choices: int,
    gated: bool = False,
    squared: bool = False,
) -> None:
    """Write y `[pairs, N]` of x, whose row has so many `choices`."""
    inputs, outputs = w.shape[2], y.shape[1]
    options = plan.options(inputs, outputs)
    _multiply[(len(tile_experts) * triton.cdiv(outputs, options["BLOCK_N"]),)](
        x,
        w,
        y,
        tile_experts,
        tile_pairs,
        x.stride(0),
        CHOICES=choices,
        K=inputs,
        N=outputs,
        GATED=gated,
        RELU2=squared,
        EXACT=x.dtype == torch.float32,
        BLOCK_M=tile_pairs.shape[1],
        **options,
    )


def run_tiles(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    experts: Tensor,
    out: Tensor,
    plan: TilePlan,
    *,
    gated: bool,
) -> None:
    """Write out `[T, H]`."""
    num_pairs, choices = experts.numel(), experts.shape[1]
    num_experts, width, inner = down.shape
    tile_experts = experts.new_empty(count_tiles(num_pairs, num_experts, plan.rows))
    tile_pairs = experts.new_empty(len(tile_experts), plan.rows)
    group_triton(experts.view(-1), num_experts, tile_experts, tile_pairs)
    hidden = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_pairs, width), dtype=torch.float32 if plan.wide else x.dtype, device=x.device)
    form = {"gated": gated, "squared": not gated}
    _launch(x, gate_up, hidden, tile_experts, tile_pairs, plan.first, choices=choices, **form)
    _launch(hidden, down, parts, tile_experts, tile_pairs, plan.second, choices=1)
    combine_triton(parts, None, weights, experts, num_experts, out)
