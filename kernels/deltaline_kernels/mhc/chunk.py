"""Many tokens in Triton, a chunk at a time: one launch multiplies a chunk and collapses the one before it.

The streams of a chunk come from memory once: its collapse finds them in the L2 while the next chunk is on its way.
Launches overlap. One may begin when every program of the one before it has begun, and those that collapse begin when
the launch before that is complete; so of three buffers for partials the one that is written is read by no one.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.mhc.collapse import collapse_streams
from deltaline_kernels.mhc.plan import Plan, cdiv
from deltaline_kernels.mhc.product import multiply_streams
from deltaline_kernels.mhc.sinkhorn import gate_sizes, write_gates

BUFFERS = 3
# A collapse that needs more takes fewer: a tile of products has no use for them.
MOST_WARPS = 8


@triton.jit(do_not_specialize=["next_tokens", "num_tokens", "product_programs", "gate_programs"])
def _chunk(
    next_residual,
    residual,
    weight,
    next_partials,
    partials,
    scale,
    base,
    norm_weight,
    y,
    post,
    comb,
    residual_stride,
    next_tokens,
    num_tokens,
    product_programs,
    gate_programs,
    H: tl.constexpr,
    S: tl.constexpr,
    HEAD: tl.constexpr,
    PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    AT_ONCE: tl.constexpr,
    RMS_EPS: tl.constexpr,
    PRE_EPS: tl.constexpr,
    SINKHORN_EPS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    REPEAT: tl.constexpr,
    NORM_EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < product_programs:
        if OVERLAP:
            gdc_launch_dependents()
        multiply_streams(
            pid,
            next_residual,
            weight,
            next_partials,
            residual_stride,
            next_tokens,
            S * H,
            S if HEAD else S * (2 + S),
            0 if HEAD else S * S,
            PAD,
            SPLITS,
            BLOCK_M,
            BLOCK_K,
            STEPS,
            TERMS,
        )
        if OVERLAP:
            # Late: nothing here reads what the launch before wrote, but who waits for this one waits for both.
            gdc_wait()
    elif pid < product_programs + gate_programs:
        if OVERLAP:
            gdc_wait()
            gdc_launch_dependents()
        if not HEAD:
            write_gates(
                partials,
                scale,
                base,
                post,
                comb,
                (pid - product_programs) * BLOCK_T + tl.arange(0, BLOCK_T),
                num_tokens,
                S * H,
                S,
                BLOCK_S,
                PAD,
                SPLITS,
                AT_ONCE,
                RMS_EPS,
                SINKHORN_EPS,
                MULTIPLIER,
                REPEAT,
            )
    else:
        collapse_streams(
            pid - product_programs - gate_programs,
            residual,
            partials,
            scale,
            base,
            norm_weight,
            y,
            residual_stride,
            num_tokens,
            H,
            S,
            HEAD,
            PAD,
            SPLITS,
            BLOCK_S,
            BLOCK_H,
            RMS_EPS,
            PRE_EPS,
            NORM_EPS,
            False,
            OVERLAP,
            OVERLAP,
        )


def launch_chunk(
    next_residual: Tensor,
    residual: Tensor,
    weight: Tensor,
    next_partials: Tensor,
    partials: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    y: Tensor,
    gates: tuple[Tensor, Tensor] | None,
    plan: Plan,
    numbers: dict[str, float],
    *,
    overlap: bool,
    first: bool,
) -> None:
    """Write next_partials `[splits, n, columns]` of next_residual `[n, S, H]`, and what partials and residual give.

    Either may have no token. Other arguments: see `launch_collapse`. `overlap`: the device starts launches early;
    `first`: this one may not, as what is before it is unknown.
    """
    num_tokens, streams, hidden = residual.shape
    next_tokens = next_residual.shape[0]
    sizes = gate_sizes(streams, plan.splits)
    product_programs = cdiv(next_tokens, plan.block_m) * plan.splits
    gate_programs = 0 if gates is None else cdiv(num_tokens, sizes["BLOCK_T"])
    post, comb = (partials, partials) if gates is None else gates
    options: dict[str, Any] = {"launch_pdl": True} if overlap and not first else {}
    _chunk[(product_programs + gate_programs + num_tokens * cdiv(hidden, plan.block_h),)](
        next_residual,
        residual,
        weight,
        next_partials,
        partials,
        scale,
        base,
        norm_weight,
        y,
        post,
        comb,
        residual.stride(0),
        next_tokens,
        num_tokens,
        product_programs,
        gate_programs,
        H=hidden,
        S=streams,
        HEAD=gates is None,
        PAD=partials.shape[2],
        SPLITS=plan.splits,
        BLOCK_M=plan.block_m,
        BLOCK_K=plan.block_k,
        STEPS=plan.steps,
        TERMS=plan.terms,
        BLOCK_H=plan.block_h,
        OVERLAP=overlap,
        num_warps=max(plan.warps, min(MOST_WARPS, plan.collapse_warps)),
        num_stages=plan.stages,
        **sizes,
        **numbers,
        **options,
    )
