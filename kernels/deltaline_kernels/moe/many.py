"""Experts of many tokens in Triton: choices lie sorted by expert, and products are those of whole tiles of them.

The first product gathers tokens as it reads them and leaves silu(gate) * up; the second one's programs stay, so that
the next tile is on its way while one is stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deltaline_kernels.checks import FP8_BLOCK
from deltaline_kernels.device.activation import limited, relu2, silu
from deltaline_kernels.device.state_tile import below
from deltaline_kernels.moe.combine import combine_triton
from deltaline_kernels.moe.plan import SORTED_FIRST, SORTED_ROWS, SORTED_SECOND
from deltaline_kernels.moe.sort import Sorted, sort_choices
from deltaline_kernels.moe.weight import ExpertWeights

BLOCK = tl.constexpr(FP8_BLOCK)


@triton.jit
def _up(
    x,
    w,
    scales,
    hidden,
    tokens,
    tiles,
    x_stride,
    H: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Write BLOCK_N channels of silu(x G^T) * (x U^T) of the rows of a tile, without gates relu(x U^T) ** 2.

    scales: of blocks of weights in FP8, else None.
    """
    PARTS: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    p_tile = tiles + tl.program_id(0) // PARTS * 3
    expert = tl.load(p_tile)
    # Tiles behind the last one have no expert.
    if expert >= 0:
        row = tl.load(p_tile + 1) + tl.arange(0, BLOCK_M)
        in_m = row < tl.load(p_tile + 2)
        token = tl.load(tokens + row, mask=in_m, other=0).to(tl.int64)
        o_n = tl.program_id(0) % PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = tl.arange(0, BLOCK_K)
        p_x = x + token[:, None] * x_stride + o_k[None, :]
        HALVES: tl.constexpr = 2 if GATED else 1
        p_w = w + expert.to(tl.int64) * (HALVES * INNER * H) + o_n.to(tl.int64)[None, :] * H + o_k[:, None]
        in_n = below(o_n[None, :], INNER, BLOCK_N)
        if scales is not None:
            ROWS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
            COLUMNS: tl.constexpr = (H + BLOCK - 1) // BLOCK
            # The outputs of a program are of one block.
            p_row = expert.to(tl.int64) * (HALVES * ROWS) + tl.program_id(0) % PARTS * BLOCK_N // BLOCK
            p_scales = scales + p_row * COLUMNS
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(0, STEPS):
            in_k = below(i * BLOCK_K + o_k, H, BLOCK_K)
            # Rows behind the expert's last one are those of token 0, and are not stored.
            b_x = tl.load(p_x, mask=in_k[None, :], other=0.0)
            inside = in_n & in_k[:, None]
            b_gate = tl.load(p_w, mask=inside, other=0.0)
            if scales is None:
                gate = tl.dot(b_x, b_gate, gate)
            else:
                gate += tl.dot(b_x, b_gate.to(b_x.dtype)) * tl.load(p_scales + i * BLOCK_K // BLOCK)
            if GATED:
                b_up = tl.load(p_w + INNER * H, mask=inside, other=0.0)
                if scales is None:
                    up = tl.dot(b_x, b_up, up)
                else:
                    scale = tl.load(p_scales + ROWS * COLUMNS + i * BLOCK_K // BLOCK)
                    up += tl.dot(b_x, b_up.to(b_x.dtype)) * scale
            p_x += BLOCK_K
            p_w += BLOCK_K
        if GATED:
            gate, up = limited(gate, up, LIMIT)
        y = silu(gate, False) * up if GATED else relu2(gate)
        p_y = hidden + row.to(tl.int64)[:, None] * INNER + o_n[None, :]
        tl.store(p_y, y.to(hidden.dtype.element_ty), mask=in_m[:, None] & (o_n < INNER)[None, :])


@triton.jit
def _down(
    hidden,
    w,
    scales,
    parts,
    tiles,
    num_tiles,
    H: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Write the outputs of tiles, BLOCK_N at a time; `hidden` and `w` are descriptors of tensors of two dimensions.

    scales: as above. INNER: inputs.
    """
    PARTS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    ROWS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    COLUMNS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    for job in tl.range(tl.program_id(0), tl.load(num_tiles) * PARTS, tl.num_programs(0), flatten=True):
        p_tile = tiles + job // PARTS * 3
        expert, begin, end = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
        n = job % PARTS * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(0, STEPS):
            b_w = w.load([expert * H + n, i * BLOCK_K])
            if scales is None:
                total = tl.dot(hidden.load([begin, i * BLOCK_K]), b_w.T, total)
            else:
                b_h = hidden.load([begin, i * BLOCK_K])
                row = expert.to(tl.int64) * ROWS + n // BLOCK
                scale = tl.load(scales + row * COLUMNS + i * BLOCK_K // BLOCK)
                total += tl.dot(b_h, b_w.to(b_h.dtype).T) * scale
        row, o_n = begin + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
        p_y = parts + row.to(tl.int64)[:, None] * H + o_n[None, :]
        # Behind the expert's last row are those of another one, and behind its last output too.
        tl.store(p_y, total.to(parts.dtype.element_ty), mask=(row < end)[:, None] & (o_n < H)[None, :])


def run_sorted(
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    out: Tensor,
    *,
    gated: bool,
    limit: float,
) -> None:
    """Write out `[T, H]`; gated: with silu, else with relu2. limit: as `run_experts` has it."""
    num_experts, width, inner = down.values.shape
    made = sort_choices(experts, num_experts, SORTED_ROWS)
    hidden = torch.empty((experts.numel(), inner), dtype=x.dtype, device=x.device)
    _launch_up(x, gate_up, hidden, made, gated=gated, limit=limit)
    parts = torch.empty((experts.numel(), width), dtype=x.dtype, device=x.device)
    _launch_down(hidden, down, parts, made)
    combine_triton(parts, made.places, weights, experts, num_experts, out)


def _launch_up(x: Tensor, gate_up: ExpertWeights, hidden: Tensor, made: Sorted, *, gated: bool, limit: float) -> None:
    width, inner = gate_up.values.shape[2], hidden.shape[1]
    options = SORTED_FIRST.options(width, inner, in_fp8=gate_up.scales is not None)
    _up[(len(made.tiles) * triton.cdiv(inner, options["BLOCK_N"]),)](
        x,
        gate_up.values,
        gate_up.scales,
        hidden,
        made.tokens,
        made.tiles,
        x.stride(0),
        H=width,
        INNER=inner,
        GATED=gated,
        LIMIT=limit,
        BLOCK_M=SORTED_ROWS,
        **options,
    )


def _launch_down(hidden: Tensor, down: ExpertWeights, parts: Tensor, made: Sorted) -> None:
    width, inner = down.values.shape[1:]
    options = SORTED_SECOND.options(inner, width, in_fp8=down.scales is not None)
    stacked, block_k = down.values.view(-1, inner), options["BLOCK_K"]
    # The interpreter of the tests has no device.
    programs = (
        1 if hidden.device.type == "cpu" else torch.cuda.get_device_properties(hidden.device).multi_processor_count
    )
    _down[(programs,)](
        TensorDescriptor.from_tensor(hidden, [SORTED_ROWS, block_k]),
        TensorDescriptor.from_tensor(stacked, [options["BLOCK_N"], block_k]),
        down.scales,
        parts,
        made.tiles,
        made.num_tiles,
        H=width,
        INNER=inner,
        BLOCK_M=SORTED_ROWS,
        **options,
    )
