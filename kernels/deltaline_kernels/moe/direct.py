"""Experts of few tokens in Triton: each choice of a token for itself, in two launches.

What takes time is to read the weights. The first launch is there when the routes are, and has read what does not depend
on them; the second one has its first weights on their way while the first one ends.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.checks import FP8_BLOCK
from deltaline_kernels.device.activation import limited, relu2, silu
from deltaline_kernels.device.overlap import can_overlap, launch_options
from deltaline_kernels.device.state_tile import below
from deltaline_kernels.moe.plan import plan_direct_first, plan_direct_second
from deltaline_kernels.moe.weight import ExpertWeights

BLOCK = tl.constexpr(FP8_BLOCK)
# Of a thread of the second launch: all of its programs for a token are there before the first launch has ended.
SECOND_REGISTERS = 128


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_tokens", "num_experts"], do_not_specialize_on_alignment=["experts"])
def _first(
    x,
    gate_up,
    scales,
    experts,
    hidden,
    x_stride,
    num_tokens,
    num_experts,
    H: tl.constexpr,
    INNER: tl.constexpr,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    EXACT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write silu(gate) * up of a choice and BLOCK_N inner channels, limited, without gates relu(up) ** 2.

    scales: of blocks of weights in FP8, else None. SHARED: so many choices, the last ones, are known to be the last
    experts, and don't wait for their routes. OVERLAP: with the launches before and behind.
    """
    PARTS: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    # The last choices come first.
    place = tl.program_id(0) // PARTS
    choice = C - 1 - place // num_tokens
    token = place % num_tokens
    pair = token * C + choice
    o_n = tl.program_id(0) % PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = num_experts - C + choice
    if choice < C - SHARED:
        if OVERLAP:
            gdc_wait()
        expert = tl.load(experts + pair)
    if OVERLAP:
        # Only now: so what was there before this launch is there for the next one, too.
        gdc_launch_dependents()
    if (expert >= 0) & (expert < num_experts):
        p_x = x + token.to(tl.int64) * x_stride
        HALVES: tl.constexpr = 2 if GATED else 1
        p_gate = gate_up + expert.to(tl.int64) * (HALVES * INNER * H) + o_n.to(tl.int64)[:, None] * H
        gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        if scales is not None:
            ROWS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
            COLUMNS: tl.constexpr = (H + BLOCK - 1) // BLOCK
            # The rows of a program are of one block.
            row = expert.to(tl.int64) * (HALVES * ROWS) + tl.program_id(0) % PARTS * BLOCK_N // BLOCK
            p_scales = scales + row * COLUMNS
        for i in range(0, STEPS):
            o_k = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            in_k = below(o_k, H, BLOCK_K)
            inside = below(o_n[:, None], INNER, BLOCK_N) & in_k
            b_gate = tl.load(p_gate + o_k, mask=inside, other=0.0)
            if GATED:
                b_up = tl.load(p_gate + INNER * H + o_k, mask=inside, other=0.0)
            b_x = tl.load(p_x + o_k, mask=in_k, other=0.0).to(tl.float32)
            b_y = b_x
            if scales is not None:
                if GATED:
                    b_y = b_x * tl.load(p_scales + ROWS * COLUMNS + o_k // BLOCK, mask=in_k, other=0.0)
                b_x = b_x * tl.load(p_scales + o_k // BLOCK, mask=in_k, other=0.0)
            gate += b_gate.to(tl.float32) * b_x
            if GATED:
                up += b_up.to(tl.float32) * b_y
        if GATED:
            own_gate, own_up = limited(tl.sum(gate, axis=1), tl.sum(up, axis=1), LIMIT)
            y = silu(own_gate, EXACT) * own_up
        else:
            y = relu2(tl.sum(gate, axis=1))
        tl.store(hidden + pair.to(tl.int64) * INNER + o_n, y.to(hidden.dtype.element_ty), mask=o_n < INNER)


@triton.jit
def _load_choices(
    down,
    experts,
    o_n,
    i,
    num_experts,
    H: tl.constexpr,
    INNER: tl.constexpr,
    C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return block i of the weights of every choice, `[BLOCK_N, BLOCK_K]` as they come; zeros where it has none."""
    o_k = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tiles = ()
    for c in tl.static_range(C):
        expert = tl.load(experts + c)
        inside = (expert >= 0) & (expert < num_experts) & below(o_n[:, None], H, BLOCK_N) & below(o_k, INNER, BLOCK_K)
        p_down = down + expert.to(tl.int64) * (H * INNER) + o_n.to(tl.int64)[:, None] * INNER + o_k
        tiles = tiles + (tl.load(p_down, mask=inside, other=0.0),)
    return tiles


@triton.jit
def _add_choices(
    total,
    tiles,
    scales,
    hidden,
    weights,
    experts,
    i,
    num_experts,
    H: tl.constexpr,
    INNER: tl.constexpr,
    C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return `total` and what block i of every choice adds to it, in the order of the choices."""
    # As wide as the tiles: each thread loads what it multiplies, and nothing is exchanged between two loads.
    o_k = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :] + tl.zeros((BLOCK_N, 1), tl.int32)
    PARTS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    ROWS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    COLUMNS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    for c in tl.static_range(C):
        expert = tl.load(experts + c)
        is_used = (expert >= 0) & (expert < num_experts)
        weight = tl.load(weights + c, mask=is_used, other=0.0)
        inside = is_used & below(o_k, INNER, BLOCK_K)
        b_h = tl.load(hidden + c * INNER + o_k, mask=inside, other=0.0)
        if scales is not None:
            # The rows of a program are of one block.
            row = expert.to(tl.int64) * ROWS + tl.program_id(0) % PARTS * BLOCK_N // BLOCK
            b_h = b_h.to(tl.float32) * tl.load(scales + row * COLUMNS + o_k // BLOCK, mask=inside, other=0.0)
        total += tiles[c].to(tl.float32) * (weight * b_h.to(tl.float32))
    return total


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_experts"], do_not_specialize_on_alignment=["experts", "weights"])
def _second(
    hidden,
    down,
    scales,
    weights,
    experts,
    out,
    num_experts,
    H: tl.constexpr,
    INNER: tl.constexpr,
    C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write BLOCK_N outputs of a token: the weighted sum over its choices."""
    PARTS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    o_n = tl.program_id(0) % PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
    experts += token * C
    weights += token * C
    hidden += token * (C * INNER)
    # The experts were there before the first launch let this one begin.
    tiles = _load_choices(down, experts, o_n, 0, num_experts, H, INNER, C, BLOCK_N, BLOCK_K)
    if OVERLAP:
        gdc_wait()
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    total = _add_choices(total, tiles, scales, hidden, weights, experts, 0, num_experts, H, INNER, C, BLOCK_N, BLOCK_K)
    for i in range(1, STEPS):
        tiles = _load_choices(down, experts, o_n, i, num_experts, H, INNER, C, BLOCK_N, BLOCK_K)
        total = _add_choices(
            total, tiles, scales, hidden, weights, experts, i, num_experts, H, INNER, C, BLOCK_N, BLOCK_K
        )
    tl.store(out + token * H + o_n, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=o_n < H)


def run_direct(
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    out: Tensor,
    *,
    gated: bool,
    limit: float,
    num_shared: int = 0,
) -> None:
    """Write out `[T, H]`; from Hopper on a launch may start while the one before it runs.

    num_shared: so many choices of each token, the last ones, are the last experts, whatever `experts` holds. Their
    products may be made while the launch before this call runs, which must be one that writes none of its arguments but
    weights and experts, and that did not begin itself before the one before it had ended.
    """
    num_tokens, choices = experts.shape
    num_experts, width, inner = down.values.shape
    overlap = can_overlap(x)
    hidden = torch.empty((num_tokens * choices, inner), dtype=x.dtype, device=x.device)
    sizes = {"H": width, "INNER": inner, "C": choices}
    first = plan_direct_first(width)
    programs = num_tokens * triton.cdiv(inner, first.block_n)
    _first[(choices * programs,)](
        x,
        gate_up.values,
        gate_up.scales,
        experts,
        hidden,
        x.stride(0),
        num_tokens,
        num_experts,
        **sizes,
        SHARED=num_shared,
        BLOCK_N=first.block_n,
        BLOCK_K=first.block_k,
        STEPS=first.steps,
        GATED=gated,
        LIMIT=limit,
        EXACT=x.dtype == torch.float32,
        OVERLAP=overlap,
        num_warps=first.warps,
        num_stages=1,
        **launch_options(overlap=overlap),
    )
    second = plan_direct_second(inner, choices, down.values.element_size())
    _second[(num_tokens * triton.cdiv(width, second.block_n),)](
        hidden,
        down.values,
        down.scales,
        weights,
        experts,
        out,
        num_experts,
        **sizes,
        BLOCK_N=second.block_n,
        BLOCK_K=second.block_k,
        STEPS=second.steps,
        OVERLAP=overlap,
        num_warps=second.warps,
        num_stages=1,
        maxnreg=SECOND_REGISTERS,
        **launch_options(overlap=overlap),
    )
