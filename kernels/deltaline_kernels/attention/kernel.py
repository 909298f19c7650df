"""Attention of packed rows over pages of keys, in Triton: short rows in splits of their keys, long ones in tiles.

A tile has as columns the queries of a few tokens and of all heads that share a head of keys; its rows are keys, and
channels of the output:

    S = scale K Q^T, modified;  P = exp2(S log2 e - m);  O = O exp2(m' - m) + V^T P

Scores that nothing modifies are made exponents of 2 with their scale, by one product for both.

So the left operands come from shared memory as they are, and what is rounded, P, is a right one: an assembler that may
overwrite a left operand in registers too early has none.

Items of work are in items.py. Of items that are splits a program takes so many that follow each other, and goes
through those of the same queries in one loop, whose loads of keys never pause; the sums of each split begin at zero all
the same, so that they don't depend on where a program begins. Of items that are not split it takes every n-th one: the
tiles of a long row take longer and longer.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from deltaline_kernels.attention.items import count_items, count_rows, locate, pick
from deltaline_kernels.attention.keys import key_offsets, load_pages
from deltaline_kernels.attention.modifiers.modify import find_range, load_masks, load_scores, modify, sees
from deltaline_kernels.attention.modifiers.spec import num_clauses, num_scores
from deltaline_kernels.attention.output import finish, store_sums

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["control_stride", "table_stride", "num_rows"],
    do_not_specialize_on_alignment=["control", "page_table", "blocks"],
)
def attend_kernel(
    q,
    k,
    v,
    page_table,
    control,
    parameters,
    blocks,
    sinks,
    gate,
    o,
    lse,
    partials,
    q_stride,
    control_stride,
    table_stride,
    num_rows,
    SCALE: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    Q_HEAD: tl.constexpr,
    GATE_ROW: tl.constexpr,
    GATE_HEAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    # No pages: the keys of a row lie together, and table_stride is how many have room there.
    DENSE: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPEC: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    # Values are the first DV channels of keys, which are loaded once; behind them keys have D - DV more.
    LATENT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_BEHIND: tl.constexpr,
    SPLIT: tl.constexpr,
    # Rows looked at at once, and whether there may be more.
    ROWS: tl.constexpr,
    MANY: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write what the items of a program attend to: the outputs, or those of splits."""
    if OVERLAP:
        # The combine may start, and wait.
        gdc_launch_dependents()
    HEADS: tl.constexpr = HQ // GROUP
    TOKENS: tl.constexpr = BLOCK_M // PADDED
    COLUMNS: tl.constexpr = TOKENS * GROUP
    ITEM: tl.constexpr = COLUMNS * DV + (2 * COLUMNS + 3) // 4 * 4
    MODIFIED: tl.constexpr = num_scores(SPEC) > 0
    FIRST: tl.constexpr = DV if LATENT else D
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_DV)
    pid = tl.program_id(0)
    if MANY:
        num_items = count_items(
            control, control_stride, num_rows, parameters, blocks, HQ, HEADS, TOKENS, SPLIT, ROWS, DENSE, BLOCKS, SPEC
        )
    else:
        o_r = tl.arange(0, ROWS)
        count, row_splits, row_low, row_high = count_rows(
            o_r, control, control_stride, num_rows, parameters, blocks, HQ, HEADS, TOKENS, SPLIT, DENSE, BLOCKS, SPEC
        )
        num_items = tl.sum(count, 0)
    item = pid
    if SPLIT > 0:
        share = num_items // tl.num_programs(0)
        more = num_items % tl.num_programs(0)
        item = pid * share + tl.minimum(pid, more)
        num_items = item + share + tl.where(pid < more, 1, 0)
    while item < num_items:
        if MANY:
            row, base, splits, low, high = locate(
                item,
                control,
                control_stride,
                num_rows,
                parameters,
                blocks,
                HQ,
                HEADS,
                TOKENS,
                SPLIT,
                ROWS,
                DENSE,
                BLOCKS,
                SPEC,
            )
        else:
            row, base, splits, low, high = pick(o_r, item, count, row_splits, row_low, row_high)
        begin = tl.load(control + row)
        n = tl.load(control + row + 1) - begin
        b = tl.load(control + 2 * control_stride + row)
        position = tl.load(control + 6 * control_stride + row)
        num_keys = tl.where(b >= 0, tl.maximum(position + n, 0), 0)
        rest = item - base
        i_split = 0 * rest
        # Items of the same queries that this program takes in one go.
        run = 0 * rest + 1
        if SPLIT > 0:
            i_split = rest % splits
            rest = rest // splits
            if BLOCKS is None:
                run = tl.minimum(splits - i_split, num_items - item)
        i_group = rest % HEADS
        i_tile = rest // HEADS
        i_kv = i_group * GROUP // (HQ // HKV)

        i_t = i_tile * TOKENS + o_m // PADDED
        in_m = (i_t < n) & (o_m % PADDED < GROUP)
        h = tl.minimum(i_group * GROUP + o_m % PADDED, HQ - 1)
        start_q = position
        if DENSE:
            start_q = position * 0
        h_m, q_m = h[None, :], (start_q + i_t)[None, :]
        line = tl.maximum(b, 0)
        if SPLIT == 0 and BLOCKS is None:
            last = tl.minimum(i_tile * TOKENS + TOKENS, n) - 1
            zero = tl.zeros((1, 1), tl.int32)
            low, high = find_range(
                parameters,
                zero + line,
                zero + start_q + i_tile * TOKENS,
                zero + start_q + last,
                zero + num_keys,
                HQ,
                SPEC,
            )
            low, high = tl.sum(tl.sum(low, 1), 0), tl.sum(tl.sum(high, 1), 0)
        # Keys from `first` on, in tiles; or tiles of the blocks in the lists.
        p_list = blocks
        if BLOCKS is None:
            first = low // BLOCK_N * BLOCK_N
            end = high
            if SPLIT > 0:
                i_first = low // SPLIT + i_split
                first = tl.maximum(first, i_first * SPLIT)
                end = tl.minimum(high, (i_first + run) * SPLIT)
            num_tiles = tl.maximum(end - first + BLOCK_N - 1, 0) // BLOCK_N
        else:
            # (lines, values of a line, heads, blocks of queries, columns of each list, queries, keys of a block)
            SUB: tl.constexpr = BLOCKS[7] // BLOCK_N
            in_list = line.to(tl.int64) if BLOCKS[0] > 1 else 0
            of_head = i_group * GROUP * BLOCKS[3] if BLOCKS[2] > 1 else 0
            i_q = tl.minimum(i_tile * TOKENS // BLOCKS[6], BLOCKS[3] - 1)
            p_list += in_list * BLOCKS[1] + 1 + (of_head + i_q) * (2 + BLOCKS[4] + BLOCKS[5])
            num_partial = tl.load(p_list)
            entries = num_partial + tl.load(p_list + 1)
            first = 0
            end = entries
            if SPLIT > 0:
                first = i_split * SPLIT
                end = tl.minimum(entries, first + SPLIT)
            num_tiles = tl.where(b >= 0, tl.maximum(end - first, 0) * SUB, 0)

        p_table = page_table + line.to(tl.int64) * table_stride
        last_key = tl.maximum(num_keys - 1, 0)
        page_line = line * 0 if SHARED else line
        if BLOCKS is None:
            pages = load_pages(p_table, page_line, tl.minimum(first, last_key), last_key, o_n, PAGE, DENSE, BLOCK_N)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_DV, BLOCK_M), tl.float32)
        p_q = q + (begin + i_t).to(tl.int64) * q_stride + h * Q_HEAD
        b_q = tl.load(p_q[None, :] + o_d[:, None], mask=in_m[None, :] & (o_d < FIRST)[:, None], other=0.0)
        if BLOCK_BEHIND > 0:
            o_behind = DV + tl.arange(0, BLOCK_BEHIND)
            in_q = in_m[None, :] & (o_behind < D)[:, None]
            b_q_behind = tl.load(p_q[None, :] + o_behind[:, None], mask=in_q, other=0.0)
        score_values = load_scores(parameters, line, h_m, SPEC)
        mask_values = load_masks(parameters, line, h_m, SPEC)
        p_item = partials + item.to(tl.int64) * ITEM
        column = o_m // PADDED * GROUP + o_m % PADDED
        for i in tl.range(0, num_tiles, num_stages=STAGES):
            if BLOCKS is None:
                start = first + i * BLOCK_N
                own = pages
                # Of the next tile, so that nothing waits for a page's number.
                pages = load_pages(
                    p_table, page_line, tl.minimum(start + BLOCK_N, last_key), last_key, o_n, PAGE, DENSE, BLOCK_N
                )
            else:
                entry = first + i // SUB
                is_full = entry >= num_partial
                in_room = tl.where(is_full, BLOCKS[4] + entry - num_partial, entry)
                start = tl.load(p_list + 2 + in_room) * BLOCKS[7] + i % SUB * BLOCK_N
                own = load_pages(p_table, page_line, tl.minimum(start, last_key), last_key, o_n, PAGE, DENSE, BLOCK_N)
            kv = start + o_n
            in_n = kv < num_keys
            at_k = key_offsets(own, start, o_n, i_kv, table_stride, HKV, D, PAGE, DENSE, HEADS_FIRST, BLOCK_N)
            if not LATENT:
                at_v = key_offsets(own, start, o_n, i_kv, table_stride, HKV, DV, PAGE, DENSE, HEADS_FIRST, BLOCK_N)
            b_k = tl.load(k + at_k[:, None] + o_d[None, :], mask=in_n[:, None] & (o_d < FIRST)[None, :], other=0.0)
            if LATENT:
                b_v = b_k
            else:
                b_v = tl.load(v + at_v[:, None] + o_v[None, :], mask=in_n[:, None] & (o_v < DV)[None, :], other=0.0)
            s = tl.dot(b_k, b_q, input_precision="ieee")
            if BLOCK_BEHIND > 0:
                in_k = in_n[:, None] & (o_behind < D)[None, :]
                b_k_behind = tl.load(k + at_k[:, None] + o_behind[None, :], mask=in_k, other=0.0)
                s = tl.dot(b_k_behind, b_q_behind, acc=s, input_precision="ieee")
            if MODIFIED:
                s = modify(s * SCALE, score_values, line, h_m, q_m, kv[:, None], SPEC)
            else:
                s *= SCALE * LOG2_E
            seen = in_n[:, None] & (o_m >= 0)[None, :]
            if num_clauses(SPEC) > 0:
                allowed = sees(mask_values, line, h_m, q_m, kv[:, None], SPEC)
                if BLOCKS is not None:
                    allowed = allowed | is_full
                seen = seen & allowed
            s = tl.where(seen, s, float("-inf"))
            # Of modified scores the maximum alone becomes an exponent of 2: a bias makes them large, and one more
            # rounding of them would show in p.
            top = tl.max(s, 0)
            new_m = tl.maximum(m, top * LOG2_E if MODIFIED else top)
            # Where nothing was seen yet the difference of two infinities would be no number.
            safe = tl.where(new_m == float("-inf"), 0.0, new_m)
            decay = tl.exp2(m - safe)
            p = tl.exp2(tl.fma(s, LOG2_E, -safe[None, :]) if MODIFIED else s - safe[None, :])
            total = total * decay + tl.sum(p, 0)
            acc = tl.dot(tl.trans(b_v), p.to(b_v.dtype), acc=acc * decay[None, :], input_precision="ieee")
            m = new_m
            if SPLIT > 0 and BLOCKS is None:
                is_end = ((start + BLOCK_N) % SPLIT == 0) | (i == num_tiles - 1)
                if is_end & (splits > 1):
                    store_sums(p_item, acc, m, total, column, o_v, in_m, COLUMNS, DV)
                    p_item += ITEM
                    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                    total = tl.zeros((BLOCK_M,), tl.float32)
                    acc = tl.zeros((BLOCK_DV, BLOCK_M), tl.float32)

        if SPLIT > 0 and splits > 1:
            if BLOCKS is not None:
                # Here, for a list that has no more entries has to be told too.
                store_sums(p_item, acc, m, total, column, o_v, in_m, COLUMNS, DV)
        else:
            finish(
                acc,
                m,
                total,
                begin + i_t,
                h,
                o_v,
                in_m,
                b >= 0,
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
        if SPLIT > 0:
            item += run
        else:
            item += tl.num_programs(0)
