"""The weighted sum over the choices of each token, in their order, in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.sizes import pow2

MAX_BLOCK = 1024


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_experts"], do_not_specialize_on_alignment=["places", "weights", "experts"])
def _combine(
    parts,
    places,
    weights,
    experts,
    out,
    num_experts,
    H: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK outputs of a token; `places`: rows of `parts` of its choices, None for one behind the other."""
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o_h = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for c in tl.static_range(C):
        pair = token * C + c
        expert = tl.load(experts + pair)
        is_used = (expert >= 0) & (expert < num_experts)
        if places is None:
            row = pair
        else:
            row = tl.load(places + pair).to(tl.int64)
        weight = tl.load(weights + pair, mask=is_used, other=0.0)
        # Nothing was written for a choice without an expert.
        part = tl.load(parts + row * H + o_h, mask=is_used & (o_h < H), other=0.0)
        total += weight * part.to(tl.float32)
    tl.store(out + token * H + o_h, total.to(out.dtype.element_ty), mask=o_h < H)


def combine_triton(
    parts: Tensor, places: Tensor | None, weights: Tensor, experts: Tensor, num_experts: int, out: Tensor
) -> None:
    """Write out `[T, H]` of the parts `[T * C, H]`, those of choice i in row `places[i]` or i; `places` `[T * C]`."""
    num_tokens, choices = experts.shape
    width = out.shape[1]
    block = min(MAX_BLOCK, pow2(width))
    _combine[(num_tokens * triton.cdiv(width, block),)](
        parts,
        places,
        weights,
        experts,
        out,
        num_experts,
        H=width,
        C=choices,
        BLOCK=block,
        num_warps=4,
        num_stages=1,
    )
