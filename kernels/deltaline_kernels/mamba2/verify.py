"""Rows of a few tokens as one small chunk, for 16-bit tokens, in Triton: VERIFY, and what is short beside it.

With G_t the sum of the first t log decays, u_t the time step times x_t, and h the state before them:

    y_t = exp(G_t) h C_t + sum_{j<=t} exp(G_t - G_j) (B_j.C_t) u_j + D x_t
    h = exp(G_n) h + sum_t exp(G_n - G_t) u_t B_t^T

So all products of the state are one, of h and the row's C, and what does not need the state is computed while it is on
its way. A program has some rows of one head's state in the registers of one warp: it folds the replayed drafts, stores
the state if the row commits nothing itself, then computes the row's tokens.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.row import load_row
from deltaline_kernels.device.state_tile import below, hand_out, load_tile, scale, store_tile, to_fp32
from deltaline_kernels.device.token_tile import (
    TOKENS,
    compare_queries,
    decay_between,
    fold_token,
    has_room,
    load_keys,
    load_records,
    load_rows,
    multiply_pairs,
    order_tokens,
    remain,
    take_token,
    take_weights,
)
from deltaline_kernels.mamba2.gates import read_rate, time_step
from deltaline_kernels.mamba2.inputs import MambaInputs
from deltaline_kernels.mamba2.plan import SHORT_ROWS, choose_short_tile
from deltaline_kernels.rows import Rows, StateLines

STATES = (64, 128)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride", "token_units"], do_not_specialize_on_alignment=["control"])
def _verify(
    xBC,
    dt,
    rate,
    D,
    dt_bias,
    lines,
    y,
    control,
    control_stride,
    dt_least,
    dt_greatest,
    token_units,
    dt_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    LOG_RATE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LINE_SHIFT: tl.constexpr,
    APART: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_S: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    BLOCKS: tl.constexpr = S // BLOCK_S
    BLOCK_P: tl.constexpr = PARTS * SUB
    GATES: tl.constexpr = G * S + H * P
    RECORD: tl.constexpr = GATES + H
    NUM_BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    # A multiple of UNIT and, for all the compiler knows, of no more: as many values of B and C at once as of the state.
    token_stride = token_units * UNIT
    i_block = tl.program_id(0) % NUM_BLOCKS
    i_head = tl.program_id(0) // NUM_BLOCKS % H
    i_row = tl.program_id(0) // (NUM_BLOCKS * H)
    i_group = i_head // (H // G)
    begin, length, read, write, committed, replayed, half = load_row(control, control_stride, i_row)
    # Of a skipped row nothing is read; what is computed from nothing is zero.
    n = tl.where((read == -1) & (write == -1), 0, length)

    o_p = i_block * BLOCK_P + tl.arange(0, SUB)
    p_token = xBC + begin * token_stride
    p_b = p_token + H * P + i_group * S
    p_c = p_b + G * S
    o_t = tl.arange(0, TOKENS)
    o_row = o_t[:, None]
    o_column = o_t[None, :]
    values = ()
    for r in tl.static_range(PARTS):
        o_r = (o_p + r * SUB)[None, :]
        inside = (o_row < n) & below(o_r, P, BLOCK_P)
        values = values + (tl.load(p_token + i_head * P + o_row * token_stride + o_r, mask=inside, other=0.0),)
    b_skip = 0.0
    if HAS_D:
        b_skip = tl.load(D + i_head).to(tl.float32)

    p_state = find_state(lines, read - LINE_SHIFT, i_head, P * S)
    raw = load_tile(p_state, read > 0, o_p[:, None], P, S, PARTS, SUB, BLOCK_S)
    p_old = find_drafts(lines, read - LINE_SHIFT, half)
    drafted, held = load_records(p_old, 0, replayed, i_group, i_head, o_p[:, None], G, H, S, P, PARTS, SUB, AT_ONCE)
    kept = 1.0
    left = tl.zeros((TOKENS,), tl.float32)
    g = tl.zeros((TOKENS,), tl.float32)
    step, total = g, g
    to_outputs = tl.zeros((TOKENS, TOKENS), tl.float32)
    if n + replayed > 0:
        # A branch, and what it needs is loaded in it: loads that are on their way across a branch share one counter, so
        # that who waits for a token would wait for the state.
        c = load_rows(p_c, n, token_stride, 2 * TOKENS, S, BLOCK_S)
        b = load_rows(p_b, n, token_stride, TOKENS, S, BLOCK_S)
        b_dt = tl.load(dt + (begin + o_t) * dt_stride + i_head, mask=o_t < n, other=0.0)
        b_rate = read_rate(tl.load(rate + i_head), LOG_RATE)
        b_bias = 0.0
        if HAS_BIAS:
            b_bias = tl.load(dt_bias + i_head).to(tl.float32)
        old = tl.load(p_old + o_t * RECORD + GATES + i_head, mask=o_t < replayed, other=0.0)
        kept, left = remain(old)
        # What the row's tokens are to each other: rows are later tokens, columns earlier ones.
        scores = compare_queries(c, b, BLOCK_S, BLOCKS)
        step = tl.where(o_t < n, time_step(b_dt, b_bias, dt_least, dt_greatest, SOFTPLUS), 0.0)
        g = step * b_rate
        total, decay = decay_between(g)
        to_outputs = tl.where(o_row >= o_column, scores * decay, 0.0)

    tile = to_fp32(raw, PARTS * BLOCKS)
    if replayed > 0:
        tile = scale(tile, kept, PARTS * BLOCKS)
        for j in tl.static_range(AT_ONCE):
            if j < replayed:
                key = hand_out(held[j], 1, BLOCK_S, BLOCKS, LEVELS)
                tile = fold_token(tile, left, j, drafted[j], key, PARTS, BLOCKS)
        for i in range(AT_ONCE, replayed):
            more = load_records(p_old, i, replayed, i_group, i_head, o_p[:, None], G, H, S, P, PARTS, SUB, 1)
            key = hand_out(more[1][0], 1, BLOCK_S, BLOCKS, LEVELS)
            tile = fold_token(tile, left, i, more[0][0], key, PARTS, BLOCKS)
    p_new = find_written(lines, write - LINE_SHIFT, i_head, P * S, APART)
    if (write > 0) & (committed == 0) & ((replayed > 0) | is_elsewhere(read, write, APART)):
        store_tile(p_new, tile, o_p[:, None], P, S, PARTS, SUB, BLOCK_S)

    # Once more: to keep them, or to have them come while records are folded, takes registers that the state needs.
    c = load_rows(p_c, n, token_stride, 2 * TOKENS, S, BLOCK_S)
    seen, _ = multiply_pairs(tile, order_tokens(c, BLOCK_S, BLOCKS), PARTS, SUB, BLOCK_S, BLOCKS, EXACT=True)
    updates, outputs = (), ()
    for r in tl.static_range(PARTS):
        value = values[r].to(tl.float32)
        updates = updates + (step[:, None] * value,)
        outputs = outputs + (total[:, None] * seen[r] + b_skip * value,)
    for t in range(0, n):
        weights = take_weights(to_outputs, t)
        new_outputs = ()
        for r in tl.static_range(PARTS):
            u = take_token(updates[r], t, SUB)
            # Not a sum with zeros: of a token that is not finite the tokens before it know nothing.
            new_outputs = new_outputs + (tl.where(o_row >= t, outputs[r] + u * weights, outputs[r]),)
        outputs = new_outputs

    records = (write > 0) & (committed == 0)
    p_draft = find_drafts(lines, write - LINE_SHIFT, 1 - half)
    for r in tl.static_range(PARTS):
        o_r = (o_p + r * SUB)[None, :]
        inside = below(o_r, P, BLOCK_P)
        p_y = y + ((begin + o_row) * H + i_head) * P + o_r
        tl.store(p_y, outputs[r].to(y.dtype.element_ty), mask=inside & (o_row < length))
        p_update = p_draft + o_row * RECORD + G * S + i_head * P + o_r
        tl.store(p_update, updates[r], mask=inside & (o_row < n) & records)
    # B is shared by the programs of a group: one of them records it. The gates are shared by the blocks of P.
    if records & (i_block == 0):
        tl.store(p_draft + o_t * RECORD + GATES + i_head, g, mask=o_t < n)
        if i_head % (H // G) == 0:
            keys = load_rows(p_b, n, token_stride, TOKENS, S, BLOCK_S)
            for j in tl.static_range(BLOCKS):
                p_key = p_draft + i_group * S + o_row * RECORD + j * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
                tl.store(p_key, keys[j].to(tl.float32), mask=o_row < n)

    if (write > 0) & (committed > 0):
        kept, left = remain(g)
        tile = scale(tile, kept, PARTS * BLOCKS)
        for t in range(0, n):
            columns = ()
            for r in tl.static_range(PARTS):
                columns = columns + (tl.sum(tl.where(o_row == t, updates[r], 0.0), axis=0)[:, None],)
            key = to_fp32(load_keys(p_b + t * token_stride, True, S, BLOCK_S), BLOCKS)
            tile = fold_token(tile, left, t, columns, key, PARTS, BLOCKS)
        store_tile(p_new, tile, o_p[:, None], P, S, PARTS, SUB, BLOCK_S)


def can_verify(inputs: MambaInputs, lines: StateLines, rows: Rows) -> bool:
    """Say whether `launch_verify` takes these short rows: a few tokens of 16 bits, states of a size that it has."""
    return has_room(lines, rows) and inputs.xBC.dtype != torch.float32 and inputs.heads.state_dim in STATES


def launch_verify(inputs: MambaInputs, lines: StateLines, rows: Rows, y: Tensor) -> None:
    """Run `rows`, for which `can_verify` holds, as a chunk each; arguments as of `mamba2_triton`.

    Mutates `lines` and `y`.
    """
    if rows.num_rows == 0:
        return
    heads, xBC, state_bytes = inputs.heads, inputs.xBC, lines.state.element_size()
    tile = choose_short_tile(heads, rows.num_rows, state_bytes)
    unit = math.gcd(16 // state_bytes, xBC.stride(0))
    _verify[(rows.num_rows * heads.num_heads * triton.cdiv(heads.head_dim, tile.parts * SHORT_ROWS),)](
        xBC,
        inputs.dt,
        *inputs.weights,
        *lines.arguments(rows, y),
        *heads.dt_limit,
        xBC.stride(0) // unit,
        inputs.dt.stride(0),
        **inputs.sizes,
        **inputs.steps,
        HAS_D=inputs.D is not None,
        **lines.constants,
        UNIT=unit,
        PARTS=tile.parts,
        SUB=SHORT_ROWS,
        BLOCK_S=tile.block_s,
        AT_ONCE=tile.records,
        LEVELS=(heads.state_dim // tile.block_s).bit_length() - 1,
        num_warps=tile.num_warps,
        num_stages=1,
        maxnreg=tile.max_registers,
    )
