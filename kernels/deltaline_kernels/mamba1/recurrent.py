"""The Mamba-1 recurrence in Triton: prefill, decode, verify and the replay of accepted drafts in one kernel.

    d = softplus(dt + dt_bias);  u = d x;  h = exp(d A) h + u B^T;  y = (h C + D x) silu(z)

A decay per channel and state leaves no product of matrices to a chunk of tokens, so that rows go token by token,
however long they are. A program holds the states of some channels in registers (tile.py): it folds the replayed drafts,
stores the state if the row commits nothing itself, then runs the row's tokens. A verify keeps each token's B, u and d,
so that its replay leaves what committing leaves, to the bit.

Channels that share B and C are a group. Short rows and long ones have a launch each. Of a long row a program asks for
the next tokens before it computes those that are there.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.activation import LOG2_E
from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.row import TOKEN_LINES, load_row
from deltaline_kernels.device.state_tile import below, to_fp32
from deltaline_kernels.device.waypoints import TOKENS, find_waypoint
from deltaline_kernels.mamba1.inputs import ScanInputs
from deltaline_kernels.mamba1.plan import PIECE, choose_tile
from deltaline_kernels.mamba1.tile import advance, load_channels, load_states, store_states
from deltaline_kernels.mamba1.tokens import find_tokens, load_record, load_tokens, run_token, store_record
from deltaline_kernels.rows import Rows, StateLines


@triton.jit
def _step(
    token,
    tile,
    weights,
    p_y,
    p_draft,
    records,
    place,
    t,
    lines,
    G: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_Z: tl.constexpr,
    EXACT: tl.constexpr,
    LINE_SHIFT: tl.constexpr,
    APART: tl.constexpr,
    TABLE: tl.constexpr,
    KIND: tl.constexpr,
    CH: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Return the tile after token t of a row; write its output, its record if `records`, and its line if it has one."""
    control, control_stride, i_row, i_block, i_group, o_c = place
    tile, b, updates, steps = run_token(
        token, tile, weights, p_y, o_c, P, SOFTPLUS, HAS_Z, EXACT, KIND, CH, SPLIT, PIECES
    )
    if records:
        # B is shared by the programs of a group: one of them records it.
        store_record(p_draft, b, updates, steps, i_block == 0, i_group, o_c, G, P, S, CH, SPLIT, PIECES)
    if TABLE:
        # What is stored is rounded, the tile that goes on is not.
        line = tl.load(control + (TOKEN_LINES + t) * control_stride + i_row).to(tl.int64)
        if line > 0:
            p_token_line = find_written(lines, line - LINE_SHIFT, i_group, P * S, APART)
            store_states(p_token_line, tile, o_c, P, S, CH, SPLIT, PIECES)
    return tile


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride"], do_not_specialize_on_alignment=["control", "waypoints"])
def _scan(
    tokens,
    strides,
    rate,
    D,
    dt_bias,
    lines,
    y,
    control,
    control_stride,
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
    SHORT: tl.constexpr,
    TABLE: tl.constexpr,
    ONE: tl.constexpr,
    UNIT: tl.constexpr,
    PAIRS: tl.constexpr,
    CH: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    RECORD: tl.constexpr = G * S + 2 * G * P
    NUM_BLOCKS: tl.constexpr = (P + CH - 1) // CH
    KIND: tl.constexpr = tokens[2].dtype.element_ty if PAIRS else None
    # A multiple of UNIT and, for all the compiler knows, of no more.
    strides = (strides[0], strides[1], strides[2] * UNIT, strides[3])
    i_block = tl.program_id(0) % NUM_BLOCKS
    i_group = tl.program_id(0) // NUM_BLOCKS % G
    i_row = tl.program_id(0) // (NUM_BLOCKS * G)
    first_channel = i_group * P
    o_c = i_block * CH + tl.arange(0, CH)[:, None]
    o_s = tl.arange(0, SPLIT)[None, :]

    begin, n, read, write, committed, replayed, half = load_row(control, control_stride, i_row)
    raw = load_states(find_state(lines, read - LINE_SHIFT, i_group, P * S), read > 0, o_c, P, S, CH, SPLIT, PIECES)
    # What computes with the rates waits for them: the first tokens are asked for before.
    pointers = find_tokens(tokens, strides, begin, i_group, o_c, G, P, S, SPLIT)
    waiting = load_tokens(pointers, strides, n, o_c, P, S, HAS_Z, PAIRS, CH, SPLIT, PIECES, AT_ONCE)
    given = to_fp32(load_states(rate + first_channel * S, True, o_c, P, S, CH, SPLIT, PIECES), PIECES)
    bias, skip = tl.zeros((CH, SPLIT), tl.float32), tl.zeros((CH, SPLIT), tl.float32)
    if HAS_BIAS:
        bias = load_channels(dt_bias + first_channel, True, o_c, P, CH, SPLIT).to(tl.float32)
    if HAS_D:
        skip = load_channels(D + first_channel, True, o_c, P, CH, SPLIT).to(tl.float32)
    rates = ()
    for j in tl.static_range(PIECES):
        rates = rates + ((-tl.exp(given[j]) if LOG_RATE else given[j]) * LOG2_E,)

    tile = to_fp32(raw, PIECES)
    p_row = y + begin * (G * P) + first_channel
    p_y = p_row + o_c + tl.zeros((1, SPLIT), tl.int32)
    if (read == -1) & (write == -1):
        zeros, mask = tl.zeros((CH, SPLIT), y.dtype.element_ty), below(o_c, P, CH) & (o_s == 0)
        for _ in range(0, n):
            tl.store(p_row + o_c + 0 * o_s, zeros, mask=mask)
            p_row += G * P
        n = 0

    if replayed > 0:
        p_old = find_drafts(lines, read - LINE_SHIFT, half)
        record = load_record(p_old, True, i_group, o_c, G, P, S, CH, SPLIT, PIECES)
        for i in range(0, replayed):
            # The last one comes again, which costs no mask.
            p_old += tl.where(i + 1 < replayed, RECORD, 0)
            following = load_record(p_old, True, i_group, o_c, G, P, S, CH, SPLIT, PIECES)
            tile = advance(tile, rates, record[2], record[1], record[0], PIECES)
            record = following

    p_new = find_written(lines, write - LINE_SHIFT, i_group, P * S, APART)
    keeps = (write > 0) & (committed == 0)
    if keeps & ((replayed > 0) | is_elsewhere(read, write, APART)):
        store_states(p_new, tile, o_c, P, S, CH, SPLIT, PIECES)

    # A long row commits its tokens, unless it has none.
    records = keeps & SHORT
    p_draft = find_drafts(lines, write - LINE_SHIFT, 1 - half)
    place = (control, control_stride, i_row, i_block, i_group, o_c)
    for first in range(0, n, AT_ONCE):
        if not ONE:
            pointers = find_tokens(tokens, strides, begin + first + AT_ONCE, i_group, o_c, G, P, S, SPLIT)
            count = n - first - AT_ONCE
            later = load_tokens(pointers, strides, count, o_c, P, S, HAS_Z, PAIRS, CH, SPLIT, PIECES, AT_ONCE)
        # A branch in any case: the assembler moves loads that nothing waits for to the end of their block.
        if first + AT_ONCE <= n:
            for j in tl.static_range(AT_ONCE):
                tile = _step(
                    waiting[j],
                    tile,
                    (rates, bias, skip),
                    p_y + j * (G * P),
                    p_draft + j * RECORD,
                    records,
                    place,
                    first + j,
                    lines,
                    G,
                    P,
                    S,
                    SOFTPLUS,
                    HAS_Z,
                    EXACT,
                    LINE_SHIFT,
                    APART,
                    TABLE,
                    KIND,
                    CH,
                    SPLIT,
                    PIECES,
                )
        else:
            for j in tl.static_range(AT_ONCE - 1):
                if first + j < n:
                    tile = _step(
                        waiting[j],
                        tile,
                        (rates, bias, skip),
                        p_y + j * (G * P),
                        p_draft + j * RECORD,
                        records,
                        place,
                        first + j,
                        lines,
                        G,
                        P,
                        S,
                        SOFTPLUS,
                        HAS_Z,
                        EXACT,
                        LINE_SHIFT,
                        APART,
                        TABLE,
                        KIND,
                        CH,
                        SPLIT,
                        PIECES,
                    )
        p_y += AT_ONCE * (G * P)
        p_draft += AT_ONCE * RECORD
        if not ONE:
            waiting = later
        if waypoints is not None:
            done = first + AT_ONCE
            if done % TOKENS == 0:
                line = find_waypoint(waypoints, begin, n, i_row, done)
                if line > 0:
                    p_kept = find_written(lines, line - LINE_SHIFT, i_group, P * S, APART)
                    store_states(p_kept, tile, o_c, P, S, CH, SPLIT, PIECES)

    # An empty row changes its line only by a replay or by a move, which are done.
    if (write > 0) & (committed > 0):
        store_states(p_new, tile, o_c, P, S, CH, SPLIT, PIECES)


def mamba1_triton(inputs: ScanInputs, lines: StateLines, rows: Rows, y: Tensor) -> None:
    """Write the rows' outputs to y `[T, D]`, which may be fp32; mutates `lines`. Checked by the caller.

    Which of the short rows decode, verify or replay is read on the device.
    """
    _launch(inputs, lines, rows.short(), y, short=True)
    _launch(inputs, lines, rows.long(), y, short=False)


def _launch(inputs: ScanInputs, lines: StateLines, rows: Rows, y: Tensor, *, short: bool) -> None:
    if rows.num_rows == 0:
        return
    sizes, x, dt, BC, z = inputs.heads, inputs.x, inputs.dt, inputs.BC, inputs.z
    tile = choose_tile(sizes, rows.num_rows, rows.max_length, short=short)
    unit = math.gcd(PIECE, BC.stride(0))
    is_aligned = (
        unit == PIECE
        and sizes.state_dim == PIECE * tile.split * tile.pieces(sizes.state_dim)
        and BC.data_ptr() % 8 == 0
    )
    absent = x  # what is not there is never read
    num_blocks = triton.cdiv(sizes.group_channels, tile.channels)
    _scan[(rows.num_rows * sizes.num_groups * num_blocks,)](
        (x, dt, BC, absent if z is None else z),
        (x.stride(0), dt.stride(0), BC.stride(0) // unit, 0 if z is None else z.stride(0)),
        inputs.rate,
        absent if inputs.D is None else inputs.D,
        absent if inputs.dt_bias is None else inputs.dt_bias,
        *lines.arguments(rows, y),
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
        SHORT=short,
        TABLE=rows.num_token_lines > 0,
        ONE=rows.max_length <= 1,
        UNIT=unit,
        PAIRS=BC.element_size() == 2 and is_aligned,
        CH=tile.channels,
        SPLIT=tile.split,
        PIECES=tile.pieces(sizes.state_dim),
        AT_ONCE=tile.at_once,
        num_warps=1,
        num_stages=1,
        maxnreg=tile.max_registers,
    )
