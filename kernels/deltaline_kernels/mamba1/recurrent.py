"""The Mamba-1 recurrence in Triton: prefill, decode, verify and the replay of accepted drafts in one kernel.

    d = softplus(dt + dt_bias);  u = d x;  h = exp(d A) h + u B^T;  y = (h C + D x) silu(z)

A decay per channel and state leaves no product of matrices to a chunk of tokens, so that rows go token by token,
however long they are. A program holds the states of some channels in the registers of one warp: it folds the replayed
drafts, stores the state if the row commits nothing itself, then runs the row's tokens. A verify keeps each token's B, u
and d, so that its replay leaves what committing leaves, to the bit.

Channels that share B and C are a group. Tiles, parts and their loads are those of device/state_tile.py.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.activation import LOG2_E, silu, softplus
from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.row import TOKEN_LINES, load_row
from deltaline_kernels.device.state_tile import below, load_key, load_tile, load_values, multiply, store_tile, to_fp32
from deltaline_kernels.device.waypoints import TOKENS, find_waypoint
from deltaline_kernels.mamba1.inputs import ScanInputs
from deltaline_kernels.mamba1.plan import choose_tile
from deltaline_kernels.rows import Rows, StateLines

# Tokens, or records of drafts, that are on their way at once; a divisor of the distance of two waypoints.
AT_ONCE = 4


@triton.jit
def _advance(tile, rates, steps, updates, b, PARTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return exp(d A) h + u B^T, with the d and u of every part; `rates` are exponents of 2."""
    advanced = ()
    for r in tl.static_range(PARTS):
        for j in tl.static_range(BLOCKS):
            decay = tl.exp2(rates[r * BLOCKS + j] * steps[r])
            # One way to round: which product a compiler fuses with the sum is its choice in each kernel anew.
            advanced = advanced + (tl.fma(decay, tile[r * BLOCKS + j], updates[r] * b[j]),)
    return advanced


@triton.jit
def _load_record(
    pointer,
    i_group,
    o_p,
    G: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Return B, and u and d of every part, of the draft at `pointer`."""
    b = load_key(pointer + i_group * S, True, S, SUB, BLOCK_S)
    p_values = pointer + G * S + i_group * P
    return b, load_values(p_values, True, o_p, P, PARTS, SUB), load_values(p_values + G * P, True, o_p, P, PARTS, SUB)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride"], do_not_specialize_on_alignment=["control", "waypoints"])
def _scan(
    x,
    dt,
    BC,
    z,
    rate,
    D,
    dt_bias,
    lines,
    y,
    control,
    control_stride,
    x_stride,
    dt_stride,
    BC_units,
    z_stride,
    waypoints,
    G: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    LOG_RATE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_Z: tl.constexpr,
    EXACT: tl.constexpr,
    LINE_SHIFT: tl.constexpr,
    APART: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_S: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    BLOCKS: tl.constexpr = (S + BLOCK_S - 1) // BLOCK_S
    BLOCK_P: tl.constexpr = PARTS * SUB
    STEPS: tl.constexpr = G * S + G * P
    RECORD: tl.constexpr = STEPS + G * P
    NUM_BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    # A multiple of UNIT and, for all the compiler knows, of no more: it loads B and C no wider than the state.
    BC_stride = BC_units * UNIT
    i_block = tl.program_id(0) % NUM_BLOCKS
    i_group = tl.program_id(0) // NUM_BLOCKS % G
    i_row = tl.program_id(0) // (NUM_BLOCKS * G)
    begin, n, read, write, committed, replayed, half = load_row(control, control_stride, i_row)

    o_p = i_block * BLOCK_P + tl.arange(0, SUB)[:, None]
    first_channel = i_group * P
    p_y = y + begin * (G * P) + first_channel
    if (read == -1) & (write == -1):
        for _ in range(0, n):
            for r in tl.static_range(PARTS):
                o_row = o_p + r * SUB
                tl.store(p_y + o_row, tl.zeros((SUB, 1), y.dtype.element_ty), mask=below(o_row, P, BLOCK_P))
            p_y += G * P
        n = 0
    p_state = find_state(lines, read - LINE_SHIFT, i_group, P * S)
    raw = load_tile(p_state, read > 0, o_p, P, S, PARTS, SUB, BLOCK_S)
    given = to_fp32(load_tile(rate + first_channel * S, True, o_p, P, S, PARTS, SUB, BLOCK_S), PARTS * BLOCKS)
    rates = ()
    for r in tl.static_range(PARTS * BLOCKS):
        rates = rates + ((-tl.exp(given[r]) if LOG_RATE else given[r]) * LOG2_E,)
    biases, skips = (), ()
    for r in tl.static_range(PARTS):
        o_row = o_p + r * SUB
        b_bias, b_skip = tl.zeros((SUB, 1), tl.float32), tl.zeros((SUB, 1), tl.float32)
        if HAS_BIAS:
            b_bias = tl.load(dt_bias + first_channel + o_row, mask=below(o_row, P, BLOCK_P), other=0.0).to(tl.float32)
        if HAS_D:
            b_skip = tl.load(D + first_channel + o_row, mask=below(o_row, P, BLOCK_P), other=0.0).to(tl.float32)
        biases, skips = biases + (b_bias,), skips + (b_skip,)

    tile = to_fp32(raw, PARTS * BLOCKS)
    if replayed > 0:
        p_old = find_drafts(lines, read - LINE_SHIFT, half)
        for i in range(0, replayed, AT_ONCE):
            # The last one comes again, which costs no mask.
            waiting = ()
            for j in tl.static_range(AT_ONCE):
                p_record = p_old + tl.minimum(i + j, replayed - 1) * RECORD
                waiting = waiting + (_load_record(p_record, i_group, o_p, G, P, S, PARTS, SUB, BLOCK_S),)
            for j in tl.static_range(AT_ONCE):
                if i + j < replayed:
                    tile = _advance(tile, rates, waiting[j][2], waiting[j][1], waiting[j][0], PARTS, BLOCKS)

    p_new = find_written(lines, write - LINE_SHIFT, i_group, P * S, APART)
    if (write > 0) & (committed == 0) & ((replayed > 0) | is_elsewhere(read, write, APART)):
        store_tile(p_new, tile, o_p, P, S, PARTS, SUB, BLOCK_S)

    # B is shared by the programs of a group: one of them records it.
    records = (write > 0) & (committed == 0)
    records_b = records & (i_block == 0)
    p_draft = find_drafts(lines, write - LINE_SHIFT, 1 - half)
    for first in range(0, n, AT_ONCE):
        waiting = ()
        for j in tl.static_range(AT_ONCE):
            i_t = begin + tl.minimum(first + j, n - 1)
            p_keys = BC + i_t * BC_stride + i_group * S
            token = (load_key(p_keys, True, S, SUB, BLOCK_S), load_key(p_keys + G * S, True, S, SUB, BLOCK_S))
            token = token + (load_values(x + i_t * x_stride + first_channel, True, o_p, P, PARTS, SUB),)
            token = token + (load_values(dt + i_t * dt_stride + first_channel, True, o_p, P, PARTS, SUB),)
            if HAS_Z:
                token = token + (load_values(z + i_t * z_stride + first_channel, True, o_p, P, PARTS, SUB),)
            waiting = waiting + (token,)
        for j in tl.static_range(AT_ONCE):
            if first + j < n:
                b, c = to_fp32(waiting[j][0], BLOCKS), to_fp32(waiting[j][1], BLOCKS)
                values = to_fp32(waiting[j][2], PARTS)
                steps, updates = (), ()
                for r in tl.static_range(PARTS):
                    step = waiting[j][3][r].to(tl.float32) + biases[r]
                    if SOFTPLUS:
                        step = softplus(step)
                    steps, updates = steps + (step,), updates + (step * values[r],)
                tile = _advance(tile, rates, steps, updates, b, PARTS, BLOCKS)
                for r in tl.static_range(PARTS):
                    o_row = o_p + r * SUB
                    in_p = below(o_row, P, BLOCK_P)
                    b_y = tl.fma(skips[r], values[r], multiply(tile, r * BLOCKS, c, BLOCKS))
                    if HAS_Z:
                        b_y *= silu(waiting[j][4][r].to(tl.float32), EXACT)
                    tl.store(p_y + o_row, b_y.to(y.dtype.element_ty), mask=in_p)
                    if records:
                        p_update = p_draft + G * S + first_channel + o_row
                        tl.store(p_update, updates[r], mask=in_p)
                        tl.store(p_update + G * P, steps[r], mask=in_p)
                if records_b:
                    for r in tl.static_range(BLOCKS):
                        o_s = r * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
                        tl.store(p_draft + i_group * S + o_s + 0 * o_p, b[r], mask=(o_p == 0) & (o_s < S))
                p_draft += RECORD
                p_y += G * P
                if TABLE:
                    # What is stored is rounded, the tile that goes on is not.
                    line = tl.load(control + (TOKEN_LINES + first + j) * control_stride + i_row).to(tl.int64)
                    if line > 0:
                        p_token_line = find_written(lines, line - LINE_SHIFT, i_group, P * S, APART)
                        store_tile(p_token_line, tile, o_p, P, S, PARTS, SUB, BLOCK_S)
        if waypoints is not None:
            done = first + AT_ONCE
            if done % TOKENS == 0:
                line = find_waypoint(waypoints, begin, n, i_row, done)
                if line > 0:
                    p_kept = find_written(lines, line - LINE_SHIFT, i_group, P * S, APART)
                    store_tile(p_kept, tile, o_p, P, S, PARTS, SUB, BLOCK_S)

    # An empty row changes its line only by a replay or by a move, which are done.
    if (write > 0) & (committed > 0):
        store_tile(p_new, tile, o_p, P, S, PARTS, SUB, BLOCK_S)


def mamba1_triton(inputs: ScanInputs, lines: StateLines, rows: Rows, y: Tensor) -> None:
    """Write the rows' outputs to y `[T, D]`, which may be fp32; mutates `lines`. Checked by the caller.

    Rows of every kind go in one launch, and which of them decode, verify or replay is read on the device.
    """
    if rows.num_rows == 0:
        return
    sizes, x, dt, BC, z = inputs.heads, inputs.x, inputs.dt, inputs.BC, inputs.z
    state_bytes = lines.state.element_size()
    tile = choose_tile(sizes, rows.num_rows, state_bytes)
    unit = math.gcd(16 // state_bytes, BC.stride(0))
    absent = x  # what is not there is never read
    num_blocks = triton.cdiv(sizes.group_channels, tile.channels)
    _scan[(rows.num_rows * sizes.num_groups * num_blocks,)](
        x,
        dt,
        BC,
        absent if z is None else z,
        inputs.rate,
        absent if inputs.D is None else inputs.D,
        absent if inputs.dt_bias is None else inputs.dt_bias,
        *lines.arguments(rows, y),
        x.stride(0),
        dt.stride(0),
        BC.stride(0) // unit,
        0 if z is None else z.stride(0),
        rows.waypoints,
        G=sizes.num_groups,
        P=sizes.group_channels,
        S=sizes.state_dim,
        LOG_RATE=inputs.log_rate,
        SOFTPLUS=inputs.softplus,
        HAS_D=inputs.D is not None,
        HAS_BIAS=inputs.dt_bias is not None,
        HAS_Z=z is not None,
        EXACT=x.dtype.itemsize == 4,
        **lines.constants,
        TABLE=rows.num_token_lines > 0,
        UNIT=unit,
        PARTS=tile.parts,
        SUB=tile.sub,
        BLOCK_S=tile.block_s,
        AT_ONCE=1 if rows.max_length <= 1 else AT_ONCE,
        num_warps=1,
        num_stages=1,
    )
