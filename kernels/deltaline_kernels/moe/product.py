"""Experts in Triton over tiles of choices that have the same one: its weights are read once per tile.

The choices of all tokens, `[T * C]`, are called pairs, of a token and an expert.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.checks import FP8_BLOCK
from deltaline_kernels.device.activation import limited, relu2, silu
from deltaline_kernels.device.group import group_triton
from deltaline_kernels.device.sizes import count_tiles
from deltaline_kernels.device.state_tile import below
from deltaline_kernels.moe.combine import combine_triton
from deltaline_kernels.moe.plan import ProductPlan, TilePlan
from deltaline_kernels.moe.weight import ExpertWeights

BLOCK = tl.constexpr(FP8_BLOCK)


# One compiled variant whatever tiles a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize_on_alignment=["tile_experts", "tile_pairs"])
def _multiply(
    x,
    w,
    scales,
    y,
    tile_experts,
    tile_pairs,
    x_stride,
    CHOICES: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    RELU2: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Write BLOCK_N outputs of the pairs of a tile to their rows of y `[pairs, N]`.

    GATED: silu(x G^T) * (x U^T), limited, with w of G and U one below the other; RELU2: relu(x w^T) ** 2; else x w^T.
    scales: of blocks of w in FP8, else None. CHOICES: pairs of a row of x.
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
        if scales is not None:
            ROWS: tl.constexpr = (N + BLOCK - 1) // BLOCK
            COLUMNS: tl.constexpr = (K + BLOCK - 1) // BLOCK
            # The outputs of a program are of one block.
            row = expert * (HALVES * ROWS) + tl.program_id(0) % PARTS * BLOCK_N // BLOCK
            p_scales = scales + row * COLUMNS
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(0, STEPS):
            in_k = below(i * BLOCK_K + o_k, K, BLOCK_K)
            inside = in_n & in_k[:, None]
            b_x = tl.load(p_x, mask=in_m & in_k[None, :], other=0.0)
            b_w = tl.load(p_w, mask=inside, other=0.0)
            if scales is None:
                total = tl.dot(b_x, b_w, total, input_precision="ieee")
            else:
                scale = tl.load(p_scales + i * BLOCK_K // BLOCK)
                total += tl.dot(b_x, b_w.to(b_x.dtype), input_precision="ieee") * scale
            if GATED:
                b_up = tl.load(p_w + N * K, mask=inside, other=0.0)
                if scales is None:
                    up = tl.dot(b_x, b_up, up, input_precision="ieee")
                else:
                    scale = tl.load(p_scales + ROWS * COLUMNS + i * BLOCK_K // BLOCK)
                    up += tl.dot(b_x, b_up.to(b_x.dtype), input_precision="ieee") * scale
            p_x += BLOCK_K
            p_w += BLOCK_K
        if GATED:
            total, up = limited(total, up, LIMIT)
            total = silu(total, EXACT) * up
        if RELU2:
            total = relu2(total)
        p_y = y + pair.to(tl.int64)[:, None] * N + o_n[None, :]
        tl.store(p_y, total.to(y.dtype.element_ty), mask=in_m & (o_n < N)[None, :])


def _launch(
    x: Tensor,
    w: ExpertWeights,
    y: Tensor,
    tile_experts: Tensor,
    tile_pairs: Tensor,
    plan: ProductPlan,
    *,
    choices: int,
    gated: bool = False,
    limit: float = 0.0,
    squared: bool = False,
) -> None:
    """Write y `[pairs, N]` of x, whose row has so many `choices`."""
    inputs, outputs = w.values.shape[2], y.shape[1]
    options = plan.options(inputs, outputs, in_fp8=w.scales is not None)
    _multiply[(len(tile_experts) * triton.cdiv(outputs, options["BLOCK_N"]),)](
        x,
        w.values,
        w.scales,
        y,
        tile_experts,
        tile_pairs,
        x.stride(0),
        CHOICES=choices,
        K=inputs,
        N=outputs,
        GATED=gated,
        LIMIT=limit,
        RELU2=squared,
        EXACT=x.dtype == torch.float32,
        BLOCK_M=tile_pairs.shape[1],
        **options,
    )


def run_tiles(
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    out: Tensor,
    plan: TilePlan,
    *,
    gated: bool,
    limit: float,
) -> None:
    """Write out `[T, H]`."""
    num_pairs, choices = experts.numel(), experts.shape[1]
    num_experts, width, inner = down.values.shape
    tile_experts = experts.new_empty(count_tiles(num_pairs, num_experts, plan.rows))
    tile_pairs = experts.new_empty(len(tile_experts), plan.rows)
    group_triton(experts.view(-1), num_experts, tile_experts, tile_pairs)
    hidden = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_pairs, width), dtype=torch.float32 if plan.wide else x.dtype, device=x.device)
    form: dict[str, Any] = {"gated": gated, "squared": not gated, "limit": limit}
    _launch(x, gate_up, hidden, tile_experts, tile_pairs, plan.first, choices=choices, **form)
    _launch(hidden, down, parts, tile_experts, tile_pairs, plan.second, choices=1)
    combine_triton(parts, None, weights, experts, num_experts, out)
