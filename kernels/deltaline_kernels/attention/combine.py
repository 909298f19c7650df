"""Puts together what the splits of a row's keys gave, in Triton; sinks, gate and rounding with it.

A program has some channels of a token's head, in every n-th row, and looks at one row at a time: of a row with one
split it leaves at once what is there already, while the attention still runs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from deltaline_kernels.attention.items import count_items, find_splits
from deltaline_kernels.attention.output import finish


@triton.jit(
    do_not_specialize=["control_stride", "num_rows"],
    do_not_specialize_on_alignment=["control", "blocks"],
)
def combine_kernel(
    control,
    parameters,
    blocks,
    sinks,
    gate,
    o,
    lse,
    partials,
    control_stride,
    num_rows,
    HQ: tl.constexpr,
    DV: tl.constexpr,
    GATE_ROW: tl.constexpr,
    GATE_HEAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPEC: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the outputs of rows from those of their splits."""
    HEADS: tl.constexpr = HQ // GROUP
    COLUMNS: tl.constexpr = TOKENS * GROUP
    ITEM: tl.constexpr = COLUMNS * DV + (2 * COLUMNS + 3) // 4 * 4
    PARTS: tl.constexpr = (DV + BLOCK_DV - 1) // BLOCK_DV
    i_part = tl.program_id(0) % PARTS
    h = tl.program_id(0) // PARTS % HQ
    i_t = tl.program_id(0) // (PARTS * HQ)
    for row in range(tl.program_id(1), num_rows, tl.num_programs(1)):
        begin = tl.load(control + row)
        n = tl.load(control + row + 1) - begin
        splits = find_splits(
            row, control, control_stride, num_rows, parameters, blocks, HQ, HEADS, TOKENS, SPLIT, DENSE, BLOCKS, SPEC
        )
        # A row of one split has its outputs; one without tokens left nothing here.
        if (i_t < n) & (splits > 1):
            base = count_items(
                control, control_stride, row, parameters, blocks, HQ, HEADS, TOKENS, SPLIT, ROWS, DENSE, BLOCKS, SPEC
            )
            column = i_t % TOKENS * GROUP + h % GROUP
            item = base + (i_t // TOKENS * HEADS + h // GROUP) * splits
            p_item = partials + item.to(tl.int64) * ITEM
            o_s = tl.arange(0, BLOCK_S)
            o_v = i_part * BLOCK_DV + tl.arange(0, BLOCK_DV)
            m = tl.full((1,), float("-inf"), tl.float32)
            total = tl.zeros((1,), tl.float32)
            acc = tl.zeros((BLOCK_DV, 1), tl.float32)
            if OVERLAP:
                # The launch before this one is the attention itself, and may still run: what is above reads nothing
                # that it writes.
                gdc_wait()
            for s in range(0, splits, BLOCK_S):
                in_s = s + o_s < splits
                p_s = p_item + (s + o_s).to(tl.int64) * ITEM
                b_m = tl.load(p_s + COLUMNS * DV + column, mask=in_s, other=float("-inf"))
                b_total = tl.load(p_s + COLUMNS * (DV + 1) + column, mask=in_s, other=0.0)
                b_acc = tl.load(
                    p_s[None, :] + column * DV + o_v[:, None], mask=in_s[None, :] & (o_v < DV)[:, None], other=0.0
                )
                new_m = tl.maximum(m, tl.max(b_m, 0))
                safe = tl.where(new_m == float("-inf"), 0.0, new_m)
                decay = tl.exp2(m - safe)
                weight = tl.exp2(b_m - safe)
                total = total * decay + tl.sum(weight * b_total, 0)
                acc = acc * decay[None, :] + tl.sum(b_acc * weight[None, :], 1)[:, None]
                m = new_m
            one = tl.zeros((1,), tl.int32)
            finish(
                acc,
                m,
                total,
                begin + i_t + one,
                h + one,
                o_v,
                one == 0,
                True,
                sinks,
                gate,
                o,
                lse,
                GATE_ROW,
                HQ,
                DV,
                GATE_HEAD,
                HAS_SINKS,
                HAS_GATE,
                HAS_LSE,
            )
    if OVERLAP and (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        # One program with nothing to do too: who waits for this launch waits for the attention.
        gdc_wait()
