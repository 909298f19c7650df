"""What becomes of a sum over keys: partial results; or sinks, the division, the gate, the one rounding."""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def store_sums(p_item, acc, m, total, column, o_v, in_m, COLUMNS: tl.constexpr, DV: tl.constexpr):
    """Store what the combine needs of a split: sums of each of its columns, maxima, and sums of weights."""
    tl.store(p_item + column[None, :] * DV + o_v[:, None], acc, mask=in_m[None, :] & (o_v < DV)[:, None])
    tl.store(p_item + COLUMNS * DV + column, m, mask=in_m)
    tl.store(p_item + COLUMNS * DV + COLUMNS + column, total, mask=in_m)


@triton.jit
def finish(
    acc,
    m,
    total,
    i_t,
    h,
    o_v,
    mask,
    is_live,
    sinks,
    gate,
    o,
    lse,
    GATE_ROW: tl.constexpr,
    HQ: tl.constexpr,
    DV: tl.constexpr,
    GATE_HEAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Store the outputs of a tile; o_v `[V block]` are channels, what belongs to a query is `[M]`.

    Args:
        acc: `[V block, M]`, sum of exp2(s log2 e - m) v, s the scores. m: the largest s log2 e, -inf where nothing was
            seen. total: sum of exp2(s log2 e - m).
        is_live: False: a skipped row, whose sums are those of no keys; its sinks don't count either.
    """
    if HAS_SINKS:
        sink = tl.where(is_live, tl.load(sinks + h).to(tl.float32), float("-inf"))
        top = tl.maximum(m, sink * LOG2_E)
        safe = tl.where(top == float("-inf"), 0.0, top)
        decay = tl.exp2(m - safe)
        total = total * decay + tl.exp2(tl.fma(sink, LOG2_E, -safe))
        acc = acc * decay[None, :]
        m = top
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    b_o = acc / total[None, :]
    in_o = mask[None, :] & (o_v < DV)[:, None]
    at = i_t.to(tl.int64) * HQ + h
    if HAS_GATE:
        p_gate = gate + i_t.to(tl.int64) * GATE_ROW + h * GATE_HEAD
        b_gate = tl.load(p_gate[None, :] + o_v[:, None], mask=in_o, other=0.0).to(tl.float32)
        b_o = b_o / (1.0 + tl.exp2(b_gate * -LOG2_E))
    tl.store(o + (at * DV)[None, :] + o_v[:, None], b_o.to(o.dtype.element_ty), mask=in_o)
    if HAS_LSE:
        tl.store(lse + at, tl.where(is_empty, float("-inf"), tl.fma(m, LN_2, tl.log2(total) * LN_2)), mask=mask)
