"""Routing in Triton: a warp or a few per token, which keep its scores and take the largest one again and again."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from deltaline_kernels.device.overlap import can_overlap
from deltaline_kernels.device.sizes import pow2
from deltaline_kernels.moe.router import Router

# As in the reference: NaN counts as the least choice, and what can't be chosen is below it.
LEAST_CHOICE = tl.constexpr(-1e38)
# Below every score as an integer, -infinity too.
TAKEN = tl.constexpr(-(2**31))
# Experts of a warp.
WARP_EXPERTS = 512


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["num_rows", "logits_stride"],
    do_not_specialize_on_alignment=["logits", "query_start_loc", "weights", "experts"],
)
def _route(
    logits,
    bias,
    query_start_loc,
    weights,
    experts,
    logits_stride,
    num_rows,
    scale,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GATE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Choose the experts of a token. OVERLAP: the next launch may begin, which waits for this one."""
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK_C)
    p_weights, p_experts = weights + token * CHOICES + o_c, experts + token * CHOICES + o_c
    is_live = True
    if query_start_loc is not None:
        is_live = token < tl.load(query_start_loc + num_rows)
    o_g = tl.arange(0, BLOCK_G)[:, None]
    o_s = tl.arange(0, BLOCK_S)[None, :]
    expert = o_g * SIZE + o_s
    inside = (o_g < GROUPS) & (o_s < SIZE)
    p_logits = logits + token * logits_stride
    row = tl.load(p_logits + expert, mask=inside & is_live, other=0.0).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-row))
    else:
        row = tl.where(inside, row, float("-inf"))
        raised = tl.exp(row - tl.max(tl.max(row, axis=1), axis=0))
        scores = raised / tl.sum(tl.sum(raised, axis=1), axis=0)
    choices = scores
    if bias is not None:
        choices += tl.load(bias + expert, mask=inside, other=0.0)
    # A comparison with NaN is false: it becomes the least choice, and an expert of the layer is chosen all the same.
    choices = tl.where(choices > LEAST_CHOICE, choices, LEAST_CHOICE)
    choices = tl.where(inside, choices, float("-inf"))
    if TOP_GROUPS < GROUPS:
        choices = _keep_groups(choices, TOP_GROUPS, BLOCK_G, BLOCK_S, bias is not None)
    # As integers of the same order: a warp has an instruction for the largest of 32, which numbers with a point lack.
    flat = _ordered(tl.reshape(choices, (BLOCK_G * BLOCK_S,)))
    flat_scores = tl.reshape(scores, (BLOCK_G * BLOCK_S,)).to(tl.int32, bitcast=True)
    o_e = tl.arange(0, BLOCK_G * BLOCK_S)
    weight = tl.zeros((BLOCK_C,), tl.float32)
    chosen = tl.zeros((BLOCK_C,), tl.int32)
    for i in range(TOP_K):
        # The leftmost of equal ones, and that is the lowest expert.
        place = tl.min(tl.where(flat == tl.max(flat, axis=0), o_e, BLOCK_G * BLOCK_S), axis=0)
        score = tl.max(tl.where(o_e == place, flat_scores, TAKEN), axis=0).to(tl.float32, bitcast=True)
        weight = tl.where(o_c == i, score, weight)
        chosen = tl.where(o_c == i, place // BLOCK_S * SIZE + place % BLOCK_S, chosen)
        flat = tl.where(o_e == place, TAKEN, flat)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    weight *= scale
    if CHOICES > TOP_K:
        shared = 1.0
        if GATE:
            gate = tl.load(p_logits + GROUPS * SIZE, mask=is_live, other=0.0).to(tl.float32)
            shared = 1.0 / (1.0 + tl.exp(-gate))
        weight = tl.where(o_c >= TOP_K, shared, weight)
        chosen = tl.where(o_c >= TOP_K, GROUPS * SIZE + o_c - TOP_K, chosen)
    tl.store(p_weights, tl.where(is_live, weight, 0.0), mask=o_c < CHOICES)
    tl.store(p_experts, tl.where(is_live, chosen, -1), mask=o_c < CHOICES)


@triton.jit
def _ordered(values):
    """Return fp32 values, none of them NaN, as int32 in the same order."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _keep_groups(choices, TOP_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, TWO: tl.constexpr):
    """Return `choices` `[BLOCK_G, BLOCK_S]`, but -infinity in all groups but the best TOP_GROUPS."""
    best = tl.max(choices, axis=1)
    if TWO:
        first = tl.argmax(choices, axis=1, tie_break_left=True)
        rest = tl.where(tl.arange(0, BLOCK_S)[None, :] == first[:, None], float("-inf"), choices)
        best += tl.max(rest, axis=1)
    o_g = tl.arange(0, BLOCK_G)
    kept = o_g < 0
    for _ in range(TOP_GROUPS):
        place = tl.argmax(best, axis=0, tie_break_left=True)
        kept = kept | (o_g == place)
        best = tl.where(o_g == place, float("-inf"), best)
    return tl.where(kept[:, None], choices, float("-inf"))


def route_triton(
    logits: Tensor,
    router: Router,
    bias: Tensor | None,
    query_start_loc: Tensor | None,
    weights: Tensor,
    experts: Tensor,
) -> None:
    """Write weights and experts `[T, C]`; arguments are validated by `route_tokens`."""
    num_experts = logits.shape[1] - router.shared_gate
    size = num_experts // router.num_groups
    block_g, block_s = pow2(router.num_groups), pow2(size)
    _route[(logits.shape[0],)](
        logits,
        bias,
        query_start_loc,
        weights,
        experts,
        logits.stride(0),
        0 if query_start_loc is None else query_start_loc.shape[0] - 1,
        router.scale,
        SIGMOID=router.scoring == "sigmoid",
        NORMALIZE=router.normalize,
        GATE=router.shared_gate,
        GROUPS=router.num_groups,
        TOP_GROUPS=router.top_groups,
        SIZE=size,
        TOP_K=router.top_k,
        CHOICES=router.num_choices,
        BLOCK_G=block_g,
        BLOCK_S=block_s,
        BLOCK_C=pow2(router.num_choices),
        OVERLAP=can_overlap(logits),
        num_warps=max(1, min(8, block_g * block_s // WARP_EXPERTS)),
        num_stages=1,
    )
