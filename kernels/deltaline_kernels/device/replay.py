"""The replay of accepted drafts into a tile of state, for the kernels that walk through chunks.

h = exp(g) h + u k^T, with the update u that the VERIFY has already computed.
"""

import triton
import triton.language as tl


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
    KEYED: tl.constexpr = False,
):
    """Return the tile b_h `[V block, K]` after the first `num_drafts` records (k, u, g) from p_drafts.

    KEYED: each key channel has a g of its own.
    """
    GATES: tl.constexpr = H * K + HV * V
    DECAYS: tl.constexpr = HV * K if KEYED else HV
    for _ in range(0, num_drafts):
        b_k = tl.load(p_drafts + i_h * K + o_k, mask=o_k < K, other=0.0)
        b_u = tl.load(p_drafts + H * K + i_hv * V + o_v, mask=o_v < V, other=0.0)
        if KEYED:
            b_g = tl.load(p_drafts + GATES + i_hv * K + o_k, mask=o_k < K, other=0.0)
            b_h = b_h * tl.exp(b_g)[None, :] + b_u[:, None] * b_k[None, :]
        else:
            b_g = tl.load(p_drafts + GATES + i_hv)
            b_h = b_h * tl.exp(b_g) + b_u[:, None] * b_k[None, :]
        p_drafts += GATES + DECAYS
    return b_h
