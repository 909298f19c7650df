"""Rows in parts that are walked at once: where each ends, and what stands before it.

A part makes h P + E of a state h `[V, K]`: E `[V, K]` is where it ends from zero, P `[K, K]` where it ends from the
identity without values. The ends of a part are E and the transpose of P, which the state that the row starts from
replaces in the first part.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.delta_rule.inputs import DeltaHeads, DeltaInputs
from deltaline_kernels.device.row_splits import RowSplits
from deltaline_kernels.rows import Rows

SMALLEST_KEY = 64
# A program has so many rows of a state, and so many parts on their way.
BLOCK_V, STAGES = 16, 2


@triton.jit(do_not_specialize=["part_length"], do_not_specialize_on_alignment=["control"])
def _join(
    ends,
    control,
    part_length,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Put the states before the parts 2.. of a row in the place of where the parts before them end from zero."""
    END: tl.constexpr = (V + (K if K > V else V)) * K
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_v = tl.program_id(0) % BLOCKS
    i_hv = tl.program_id(0) // BLOCKS % HV
    i_row = tl.program_id(0) // (BLOCKS * HV)
    begin = tl.load(control + i_row).to(tl.int64)
    n = (tl.load(control + i_row + 1) - begin).to(tl.int32)
    o_v = (i_v * BLOCK_V + tl.arange(0, BLOCK_V))[:, None]
    o_k = tl.arange(0, BLOCK_K)
    in_h = (o_v < V) & (o_k < K)[None, :]
    in_p = (o_k < K)[:, None] & (o_k < K)[None, :]
    p_end = ends + (begin // part_length * HV + i_hv) * END
    o_h = o_v * K + o_k[None, :]
    o_p = V * K + o_k[:, None] * K + o_k[None, :]
    # What stands before part 1 is where part 0 ends.
    b_h = tl.load(p_end + o_h, mask=in_h & (part_length < n), other=0.0)
    for _ in tl.range(2 * part_length, n, part_length, num_stages=STAGES):
        p_end += HV * END
        b_end = tl.load(p_end + o_h, mask=in_h, other=0.0)
        b_p = tl.load(p_end + o_p, mask=in_p, other=0.0)  # the transpose of P
        b_h = tl.dot(b_h, tl.trans(b_p), acc=b_end, input_precision="tf32")
        tl.store(p_end + o_h, b_h, mask=in_h)


def empty_ends(inputs: DeltaInputs, plan: RowSplits) -> Tensor:
    """Return room for the ends of all parts, fp32; of whole rows there are none."""
    heads = inputs.heads
    num_ends = inputs.num_tokens // plan.part_length + 1 if plan.num_parts > 1 else 0
    size = (num_ends, heads.num_value_heads, heads.value_dim + max(heads.value_dim, heads.key_dim), heads.key_dim)
    return torch.empty(size, dtype=torch.float32, device=inputs.device)


def join_parts(ends: Tensor, heads: DeltaHeads, rows: Rows, plan: RowSplits) -> None:
    """Put the states before the parts of `rows` from the third on in the place of E of the parts before them."""
    _join[(rows.num_rows * heads.num_value_heads * triton.cdiv(heads.value_dim, BLOCK_V),)](
        ends,
        rows.control,
        plan.part_length,
        HV=heads.num_value_heads,
        K=heads.key_dim,
        V=heads.value_dim,
        BLOCK_K=max(SMALLEST_KEY, triton.next_power_of_2(heads.key_dim)),
        BLOCK_V=BLOCK_V,
        STAGES=STAGES,
        num_warps=4,
        num_stages=STAGES,
    )
