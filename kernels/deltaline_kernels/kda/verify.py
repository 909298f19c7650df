"""Rows of a few tokens as one small chunk, for 16-bit tokens, in Triton: VERIFY, and what is short beside it.

With g_t the log decays of a token's key channels, G_t the sum of the first t of them, h the state before the row's
tokens, k and q after their norms, and x . y the products of channels one by one:

    u_t = beta_t (v_t - h (exp(G_t) . k_t) - sum_{j<t} <k_t, exp(G_t - G_j) . k_j> u_j)
    o_t = h (exp(G_t) . q_t) + sum_{j<=t} <q_t, exp(G_t - G_j) . k_j> u_j
    h = h . exp(G_n) + sum_t u_t (exp(G_n - G_t) . k_t)^T

So all products of the state are one, of h and the row's decayed keys and queries. All that is of key channels alone, a
launch of its own finds once for each head (tokens.py); this one begins to load states while that one runs. A program
has some rows of one head's state in the registers of one warp: it folds the replayed drafts, stores the state if the
row commits nothing itself, then computes the row's tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.overlap import can_overlap, launch_options
from deltaline_kernels.device.row import load_row
from deltaline_kernels.device.state_tile import (
    add_outer,
    below,
    decay_keys,
    hand_out,
    load_tile,
    load_values,
    store_tile,
    to_fp32,
)
from deltaline_kernels.device.token_tile import TOKENS, add_tokens, load_keys, load_pairs, multiply_pairs
from deltaline_kernels.kda.tokens import BETWEEN, OLD, OWN, SQUARE, count_room, prepare_tokens
from deltaline_kernels.rows import Rows, StateLines

# Threads that share a row of the state, and bytes that each loads at once.
ROW_THREADS, LOAD_BYTES = 4, 16
# Rows of a part of the state.
SUB = 16
# Parts of the state per program, and registers, of which three warps share those of a scheduler. Each program is one
# warp: several would exchange operands. Measurements: docs/log.md.
PARTS, MAX_REGISTERS = 1, 168
# Records that are asked for before the state has come, by the bytes of its values: those of 2 bytes take registers of
# their own until they are fp32.
AT_ONCE = {4: 3, 2: 2}


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride", "v_units"], do_not_specialize_on_alignment=["control"])
def _verify_keyed(
    v,
    lines,
    o,
    control,
    control_stride,
    room,
    v_units,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    LINE_SHIFT: tl.constexpr,
    APART: tl.constexpr,
    UNIT: tl.constexpr,
    ROOM: tl.constexpr,
    OVERLAP: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    BLOCKS: tl.constexpr = K // BLOCK_K
    BLOCK_V: tl.constexpr = PARTS * SUB
    RECORD: tl.constexpr = H * K + HV * V + HV * K
    v_stride = v_units * UNIT
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_v = tl.program_id(0) % NUM_BLOCKS
    i_hv = tl.program_id(0) // NUM_BLOCKS % HV
    i_row = tl.program_id(0) // (NUM_BLOCKS * HV)
    begin, length, read, write, committed, replayed, half = load_row(control, control_stride, i_row)
    # Of a skipped row nothing is read; what is computed from nothing is zero.
    n = tl.where((read == -1) & (write == -1), 0, length)

    o_v = i_v * BLOCK_V + tl.arange(0, SUB)
    p_state = find_state(lines, read - LINE_SHIFT, i_hv, V * K)
    raw = load_tile(p_state, read > 0, o_v[:, None], V, K, PARTS, SUB, BLOCK_K)
    o_t = tl.arange(0, TOKENS)[:, None]
    values = ()
    for r in tl.static_range(PARTS):
        o_r = (o_v + r * SUB)[None, :]
        inside = (o_t < n) & below(o_r, V, BLOCK_V)
        values = values + (tl.load(v + (begin + o_t) * v_stride + i_hv * V + o_r, mask=inside, other=0.0),)
    p_old = find_drafts(lines, read - LINE_SHIFT, half) + H * K + i_hv * V
    # A program asks for all that it needs before it waits for the state. Keys it holds as its threads loaded them, a
    # few channels each: those of every row are handed theirs where they are needed.
    drafted, held = (), ()
    for j in tl.static_range(AT_ONCE):
        drafted = drafted + (load_values(p_old + j * RECORD, j < replayed, o_v[:, None], V, PARTS, SUB),)

    if OVERLAP:
        gdc_wait()
    p_room = room + (i_row * HV + i_hv).to(tl.int64) * ROOM
    p_between = p_room + BETWEEN * K
    beta = tl.load(p_between + 2 * SQUARE + o_t)
    o_earlier = tl.arange(0, TOKENS)[None, :]
    to_updates = tl.load(p_between + o_t * TOKENS + o_earlier)
    to_outputs = tl.load(p_between + SQUARE + o_t * TOKENS + o_earlier)
    p_left = p_room + OLD * K + tl.arange(0, K)
    left = tl.load(p_left, mask=replayed > 0)
    for j in tl.static_range(AT_ONCE):
        held = held + (tl.load(p_left + (1 + j) * K, mask=j < replayed),)
    pairs = load_pairs(p_room, n, K, BLOCK_K)

    tile = to_fp32(raw, PARTS * BLOCKS)
    if replayed > 0:
        tile = decay_keys(tile, hand_out(left, 1, BLOCK_K, BLOCKS, LEVELS), PARTS, BLOCKS)
        for j in tl.static_range(AT_ONCE):
            if j < replayed:
                tile = add_outer(tile, drafted[j], hand_out(held[j], 1, BLOCK_K, BLOCKS, LEVELS), PARTS, BLOCKS)
        for i in range(AT_ONCE, replayed):
            update = load_values(p_old + i * RECORD, True, o_v[:, None], V, PARTS, SUB)
            key = tl.load(p_left + (1 + i) * K)
            tile = add_outer(tile, update, hand_out(key, 1, BLOCK_K, BLOCKS, LEVELS), PARTS, BLOCKS)
    p_new = find_written(lines, write - LINE_SHIFT, i_hv, V * K, APART)
    if (write > 0) & (committed == 0) & ((replayed > 0) | is_elsewhere(read, write, APART)):
        store_tile(p_new, tile, o_v[:, None], V, K, PARTS, SUB, BLOCK_K)

    # Row t is u_t as soon as what the tokens before it add is in it.
    seen, outputs = multiply_pairs(tile, pairs, PARTS, SUB, BLOCK_K, BLOCKS)
    updates = ()
    for r in tl.static_range(PARTS):
        updates = updates + (beta * (values[r].to(tl.float32) - seen[r]),)
    updates, outputs = add_tokens(updates, outputs, to_updates, to_outputs, n, PARTS, SUB)

    p_draft = find_drafts(lines, write - LINE_SHIFT, 1 - half) + H * K + i_hv * V
    for r in tl.static_range(PARTS):
        o_r = (o_v + r * SUB)[None, :]
        inside = below(o_r, V, BLOCK_V)
        p_o = o + ((begin + o_t) * HV + i_hv) * V + o_r
        tl.store(p_o, outputs[r].to(o.dtype.element_ty), mask=inside & (o_t < length))
        records = (write > 0) & (committed == 0) & (o_t < n)
        tl.store(p_draft + o_t * RECORD + o_r, updates[r], mask=inside & records)

    if (write > 0) & (committed > 0):
        tile = decay_keys(tile, load_keys(p_room + OWN * K, True, K, BLOCK_K), PARTS, BLOCKS)
        for t in range(0, n):
            columns = ()
            for r in tl.static_range(PARTS):
                columns = columns + (tl.sum(tl.where(o_t == t, updates[r], 0.0), axis=0)[:, None],)
            key = load_keys(p_room + (OWN + 1 + t) * K, True, K, BLOCK_K)
            tile = add_outer(tile, columns, key, PARTS, BLOCKS)
        store_tile(p_new, tile, o_v[:, None], V, K, PARTS, SUB, BLOCK_K)


def launch_verify(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Run `rows`, for which `can_verify` holds, as a chunk each; arguments as of `kda_triton`.

    Mutates `lines` and `o`.
    """
    if rows.num_rows == 0:
        return
    heads, overlap = inputs.heads, can_overlap(inputs.v)
    size = (rows.num_rows, heads.num_value_heads, count_room(heads.key_dim))
    room = torch.empty(size, dtype=torch.float32, device=inputs.device)
    vector = LOAD_BYTES // lines.state.element_size()
    block_k = ROW_THREADS * vector
    prepare_tokens(inputs, lines, rows, room, block_k, overlap=overlap)
    unit, (_, _, v_units) = inputs.count_strides(vector)
    _verify_keyed[(rows.num_rows * heads.num_value_heads * triton.cdiv(heads.value_dim, PARTS * SUB),)](
        inputs.v,
        *lines.arguments(rows, o),
        room,
        v_units,
        **inputs.sizes,
        **lines.constants,
        UNIT=unit,
        ROOM=room.shape[2],
        OVERLAP=overlap,
        PARTS=PARTS,
        SUB=SUB,
        BLOCK_K=block_k,
        AT_ONCE=AT_ONCE[lines.state.element_size()],
        LEVELS=(heads.key_dim // block_k).bit_length() - 1,
        num_warps=1,
        num_stages=1,
        maxnreg=MAX_REGISTERS,
        **launch_options(overlap=overlap),
    )
