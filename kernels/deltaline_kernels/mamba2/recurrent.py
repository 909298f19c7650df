"""The Mamba2 recurrence token by token in Triton: decode, verify and the replay of accepted drafts in one kernel.

    d = clamp(softplus(dt + dt_bias));  g = A d;  u = d x;  h = exp(g) h + u B^T;  y = h C + D x

A program holds some rows of one head's state in registers: it folds the replayed drafts, stores the state if the row
commits nothing itself, then runs the row's tokens. Decode is a verify of one token that commits it. A verify keeps each
token's B, u and g, so that its replay leaves what committing leaves, to the bit.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.row import TOKEN_LINES, load_row
from deltaline_kernels.device.state_tile import (
    below,
    fold,
    load_key,
    load_record,
    load_tile,
    load_values,
    multiply,
    scale,
    store_tile,
    to_fp32,
)
from deltaline_kernels.mamba2.gates import read_rate, time_step
from deltaline_kernels.mamba2.inputs import MambaInputs
from deltaline_kernels.mamba2.plan import ROWS_PER_WARP, choose_tile
from deltaline_kernels.rows import Rows, StateLines

# Records of accepted drafts loaded at once, while the state is on its way: as many as its registers have room for.
AT_ONCE = tl.constexpr(3)


@triton.jit
def _load_token(
    p_token,
    p_dt,
    i_group,
    i_head,
    o_p,
    mask,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Return B, C, x and dt of a token of one head, as they come; anything where `mask` is not set."""
    p_keys = p_token + H * P + i_group * S
    b = load_key(p_keys, mask, S, SUB, BLOCK_S)
    c = load_key(p_keys + G * S, mask, S, SUB, BLOCK_S)
    values = load_values(p_token + i_head * P, mask, o_p, P, PARTS, SUB)
    return b, c, values, tl.load(p_dt + i_head, mask=mask)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride", "token_units"], do_not_specialize_on_alignment=["control"])
def _recurrent(
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
    TABLE: tl.constexpr,
    ONE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    BLOCKS: tl.constexpr = (S + BLOCK_S - 1) // BLOCK_S
    BLOCK_P: tl.constexpr = PARTS * SUB
    GATES: tl.constexpr = G * S + H * P
    RECORD: tl.constexpr = GATES + H
    NUM_BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    # A multiple of UNIT and, for all the compiler knows, of no more: it loads B and C no wider than the state.
    token_stride = token_units * UNIT
    i_block = tl.program_id(0) % NUM_BLOCKS
    i_head = tl.program_id(0) // NUM_BLOCKS % H
    i_row = tl.program_id(0) // (NUM_BLOCKS * H)
    i_group = i_head // (H // G)
    begin, n, read, write, committed, replayed, half = load_row(control, control_stride, i_row)

    o_p = i_block * BLOCK_P + tl.arange(0, SUB)[:, None]
    p_y = y + (begin * H + i_head) * P
    if (read == -1) & (write == -1):
        for _ in range(0, n):
            for r in tl.static_range(PARTS):
                o_row = o_p + r * SUB
                tl.store(p_y + o_row, tl.zeros((SUB, 1), y.dtype.element_ty), mask=below(o_row, P, BLOCK_P))
            p_y += H * P
        n = 0
    p_state = find_state(lines, read - LINE_SHIFT, i_head, P * S)
    raw = load_tile(p_state, read > 0, o_p, P, S, PARTS, SUB, BLOCK_S)
    p_token = xBC + begin * token_stride
    p_dt = dt + begin * dt_stride
    b, c, values, b_dt = _load_token(p_token, p_dt, i_group, i_head, o_p, n > 0, H, G, P, S, PARTS, SUB, BLOCK_S)
    b_rate = read_rate(tl.load(rate + i_head), LOG_RATE)
    b_bias, b_skip = 0.0, 0.0
    if HAS_BIAS:
        b_bias = tl.load(dt_bias + i_head).to(tl.float32)
    if HAS_D:
        b_skip = tl.load(D + i_head).to(tl.float32)

    tile = to_fp32(raw, PARTS * BLOCKS)
    if replayed > 0:
        p_old = find_drafts(lines, read - LINE_SHIFT, half)
        rest = 1.0
        for i in range(0, replayed, AT_ONCE):
            # Several are on their way at once. The last one comes again, which costs no mask.
            waiting = ()
            for j in tl.static_range(AT_ONCE):
                p_record = p_old + tl.minimum(i + j, replayed - 1) * RECORD
                waiting = waiting + (load_record(p_record, i_group, i_head, o_p, G, H, S, P, PARTS, SUB, BLOCK_S),)
            for j in tl.static_range(AT_ONCE):
                if i + j < replayed:
                    rest *= tl.exp(waiting[j][2])
                    tile, rest = fold(tile, rest, waiting[j][1], waiting[j][0], PARTS, BLOCKS)
        tile = scale(tile, rest, PARTS * BLOCKS)

    p_new = find_written(lines, write - LINE_SHIFT, i_head, P * S, APART)
    if (write > 0) & (committed == 0) & ((replayed > 0) | is_elsewhere(read, write, APART)):
        store_tile(p_new, tile, o_p, P, S, PARTS, SUB, BLOCK_S)

    # B is shared by the programs of a group: one of them records it. The gates are shared by the blocks of P.
    records = (write > 0) & (committed == 0)
    records_gates = records & (i_block == 0)
    records_b = records_gates & (i_head % (H // G) == 0)
    p_draft = find_drafts(lines, write - LINE_SHIFT, 1 - half)
    b, c, values = to_fp32(b, BLOCKS), to_fp32(c, BLOCKS), to_fp32(values, PARTS)
    rest = 1.0
    for t in range(0, n):
        if not ONE:
            # The last one comes twice, which costs no mask.
            more = t + 1 < n
            p_token += tl.where(more, token_stride, 0)
            p_dt += tl.where(more, dt_stride, 0)
            following = _load_token(p_token, p_dt, i_group, i_head, o_p, True, H, G, P, S, PARTS, SUB, BLOCK_S)
        step = time_step(b_dt, b_bias, dt_least, dt_greatest, SOFTPLUS)
        g = b_rate * step
        rest *= tl.exp(g)
        aligned = multiply(b, 0, c, BLOCKS)
        # h C after the token is the old tile's product and the token's own share: nothing waits for the new tile.
        outputs = ()
        updates = ()
        for r in tl.static_range(PARTS):
            outputs = outputs + (rest * multiply(tile, r * BLOCKS, c, BLOCKS),)
            updates = updates + (step * values[r],)
        # Nobody reads what the last token of a VERIFY would leave.
        if (t + 1 < n) | (committed > 0):
            tile, rest = fold(tile, rest, updates, b, PARTS, BLOCKS)
        if TABLE:
            # What is stored is rounded, the tile that goes on is not.
            line = tl.load(control + (TOKEN_LINES + t) * control_stride + i_row).to(tl.int64)
            if line > 0:
                tile, rest = scale(tile, rest, PARTS * BLOCKS), 1.0
                p_token_line = find_written(lines, line - LINE_SHIFT, i_head, P * S, APART)
                store_tile(p_token_line, tile, o_p, P, S, PARTS, SUB, BLOCK_S)
        for r in tl.static_range(PARTS):
            o_row = o_p + r * SUB
            b_y = tl.fma(updates[r], aligned, outputs[r]) + b_skip * values[r]
            tl.store(p_y + o_row, b_y.to(y.dtype.element_ty), mask=below(o_row, P, BLOCK_P))
        p_y += H * P
        if records:
            if records_b:
                for j in tl.static_range(BLOCKS):
                    o_s = j * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
                    first = (o_p == i_block * BLOCK_P) & (o_s < S)
                    tl.store(p_draft + i_group * S + o_s + 0 * o_p, b[j], mask=first)
            for r in tl.static_range(PARTS):
                o_row = o_p + r * SUB
                tl.store(p_draft + G * S + i_head * P + o_row, updates[r], mask=below(o_row, P, BLOCK_P))
            tl.store(p_draft + GATES + i_head, g, mask=records_gates)
            p_draft += RECORD
        if not ONE:
            b, c, values = to_fp32(following[0], BLOCKS), to_fp32(following[1], BLOCKS), to_fp32(following[2], PARTS)
            b_dt = following[3]

    if (write > 0) & (committed > 0):
        tile = scale(tile, rest, PARTS * BLOCKS)
        store_tile(p_new, tile, o_p, P, S, PARTS, SUB, BLOCK_S)


def launch_recurrent(inputs: MambaInputs, lines: StateLines, rows: Rows, y: Tensor) -> None:
    """Run `rows` token by token; arguments as of `mamba2_triton`. Mutates `lines` and `y`."""
    if rows.num_rows == 0:
        return
    heads, xBC, state_bytes = inputs.heads, inputs.xBC, lines.state.element_size()
    tile = choose_tile(heads, rows.num_rows, state_bytes, one=rows.max_length <= 1)
    sub = ROWS_PER_WARP * tile.num_warps
    unit = math.gcd(16 // state_bytes, xBC.stride(0))
    _recurrent[(rows.num_rows * heads.num_heads * triton.cdiv(heads.head_dim, tile.parts * sub),)](
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
        TABLE=rows.num_token_lines > 0,
        ONE=rows.max_length <= 1,
        UNIT=unit,
        PARTS=tile.parts,
        SUB=sub,
        BLOCK_S=tile.block_s,
        num_warps=tile.num_warps,
        num_stages=1,
        maxnreg=tile.max_registers,
    )
