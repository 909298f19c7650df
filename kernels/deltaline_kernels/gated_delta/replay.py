"""One token's update of a state tile, and the replay of accepted drafts, shared by the gated delta kernels.

h = exp(g) h;  u = beta (v - h k);  h += u k^T
"""

import triton
import triton.language as tl


@triton.jit
def fold_token(b_h, b_k, b_x, b_g, b_beta):
    """Return the tile b_h `[V block, K]` after the token (k, v = b_x, g, beta)."""
    b_h = b_h * tl.exp(b_g)
    b_u = b_beta * (b_x - tl.sum(b_h * b_k[None, :], axis=1))
    return b_h + b_u[:, None] * b_k[None, :]


@triton.jit
def fold_drafts(
    b_h,
    p_drafts,
    num_drafts,
    i_h,
    i_hv,
    o_k,
    o_v,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Return the tile b_h `[V block, K]` after the first `num_drafts` records from p_drafts."""
    GATES: tl.constexpr = H * K + HV * V
    for _ in range(0, num_drafts):
        b_k = tl.load(p_drafts + i_h * K + o_k, mask=o_k < K, other=0.0)
        b_x = tl.load(p_drafts + H * K + i_hv * V + o_v, mask=o_v < V, other=0.0)
        b_g = tl.load(p_drafts + GATES + i_hv)
        b_beta = tl.load(p_drafts + GATES + HV + i_hv)
        b_h = fold_token(b_h, b_k, b_x, b_g, b_beta)
        p_drafts += GATES + 2 * HV
    return b_h
