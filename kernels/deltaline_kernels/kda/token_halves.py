"""What the tokens of a short row and its replayed drafts are without the state, in Triton.

A program per row and value head: a vector of key channels is `[K]`, and every thread of its warp has some channels of
its own, so that gates, norms and decays are computed once, and not by all programs and threads that share a head. What
it finds goes through memory, `ROOM` fp32 values of which no more are touched than the row has tokens:

    [TOKENS, 2 * K]  exp(G_t) . k_t and exp(G_t) . q_t, which meet the state before the row, as `store_pairs` lays them
    [1 + TOKENS, K]  what the replayed drafts leave of each channel, then their keys, each as far as it is left
    [1 + TOKENS, K]  the same of the row's own tokens, if it commits them
    [2, TOKENS, TOKENS]  -beta_t <k_t, exp(G_t - G_j) . k_j> and <q_t, exp(G_t - G_j) . k_j> at [t, j]
    [TOKENS]  beta_t

with G_t the sums of log decays up to token t, G_t - G_j never larger than 0: earlier keys decay as tokens go by, and
nothing is divided by what is left.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from deltaline_kernels.device.delta_rule.gates import key_log_decay, read_strength
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.lines import find_drafts
from deltaline_kernels.device.row import load_row
from deltaline_kernels.device.state_tile import scale
from deltaline_kernels.device.token_tile import TOKENS, store_pairs
from deltaline_kernels.rows import Rows, StateLines

# So that as many programs as 64 rows of 32 heads have run at once.
MAX_REGISTERS = 128
# Where these parts begin, in units of K values, and what is behind them.
OLD = tl.constexpr(2 * TOKENS.value)
OWN = tl.constexpr(OLD.value + 1 + TOKENS.value)
BETWEEN = tl.constexpr(OWN.value + 1 + TOKENS.value)
SQUARE = tl.constexpr(TOKENS.value**2)


def count_room(key_dim: int) -> int:
    """Return ROOM, the values of one row and value head."""
    return int(BETWEEN.value * key_dim + 2 * SQUARE.value + TOKENS.value)


@triton.jit
def _store_left(pointer, keys, decays, count, K: tl.constexpr):
    """Write what `count` tokens of these log decays leave of each channel, then of each of their keys."""
    o_k = tl.arange(0, K)
    left = tl.full((K,), 1.0, tl.float32)
    # The last one first.
    for i in tl.static_range(TOKENS):
        if TOKENS - 1 - i < count:
            tl.store(pointer + (TOKENS - i) * K + o_k, keys[TOKENS - 1 - i] * left)
            left *= tl.exp(decays[TOKENS - 1 - i])
    tl.store(pointer + o_k, left)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride", "q_units", "k_units"], do_not_specialize_on_alignment=["control"])
def _prepare_halves(
    q,
    k,
    gates,
    lines,
    room,
    control,
    control_stride,
    query_scale,
    eps,
    a_stride,
    b_stride,
    q_units,
    k_units,
    lower_bound,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    RAW: tl.constexpr,
    NORM: tl.constexpr,
    LINE_SHIFT: tl.constexpr,
    UNIT: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    GATES: tl.constexpr = H * K + HV * V
    RECORD: tl.constexpr = GATES + HV * K
    a, b, A_log, dt_bias = gates
    # Multiples of UNIT and, for all the compiler knows, of no more: every vector lies in the same threads.
    q_stride, k_stride = q_units * UNIT, k_units * UNIT
    i_place = tl.program_id(0) // 2
    i_hv = i_place % HV
    i_row = i_place // HV
    i_h = i_hv // (HV // H)
    begin, length, read, write, committed, replayed, half = load_row(control, control_stride, i_row)
    # Nothing is read of a skipped row.
    n = tl.where((read == -1) & (write == -1), 0, length)

    o_k = tl.arange(0, K)
    o_t = tl.arange(0, TOKENS)
    p_room = room + i_place.to(tl.int64) * ROOM
    # Of two programs of a head one has the drafts, the other the row's own tokens.
    if tl.program_id(0) % 2 == 1:
        if replayed > 0:
            p_old = find_drafts(lines, read - LINE_SHIFT, half) + o_k
            keys, decays = (), ()
            for i in tl.static_range(TOKENS):
                p_record = p_old + i * RECORD
                keys = keys + (tl.load(p_record + i_h * K, mask=i < replayed, other=0.0),)
                decays = decays + (tl.load(p_record + GATES + i_hv * K, mask=i < replayed, other=0.0),)
            _store_left(p_room + OLD * K, keys, decays, replayed, K)
    else:
        p_q = q + begin * q_stride + i_h * K + o_k
        p_k = k + begin * k_stride + i_h * K + o_k
        p_a = a + begin * a_stride + i_hv * K + o_k
        raw_q, raw_k, raw_a = (), (), ()
        for t in tl.static_range(TOKENS):
            raw_q = raw_q + (tl.load(p_q + t * q_stride, mask=t < n, other=0.0),)
            raw_k = raw_k + (tl.load(p_k + t * k_stride, mask=t < n, other=0.0),)
            raw_a = raw_a + (tl.load(p_a + t * a_stride, mask=t < n, other=0.0),)
        beta = tl.load(b + (begin + o_t) * b_stride + i_hv, mask=o_t < n, other=0.0)
        rate, bias = 0.0, 0.0
        if not RAW:
            rate = tl.load(A_log + i_hv).to(tl.float32)
            bias = tl.load(dt_bias + i_hv * K + o_k).to(tl.float32)
        # k is shared by the programs of a key head: one of them records it.
        records = (write > 0) & (committed == 0)
        records_k = records & (i_hv % (HV // H) == 0)
        p_draft = find_drafts(lines, write - LINE_SHIFT, 1 - half) + o_k
        o_square = tl.arange(0, SQUARE)
        kk = tl.zeros((SQUARE,), tl.float32)
        kq = kk
        total = tl.full((K,), 1.0, tl.float32)
        own_keys, own_decays, earlier = (), (), ()
        for t in tl.static_range(TOKENS):
            key, g = tl.zeros((K,), tl.float32), tl.zeros((K,), tl.float32)
            if t < n:
                g = key_log_decay(raw_a[t], rate, bias, lower_bound, RAW)
                key, query = raw_k[t].to(tl.float32), raw_q[t].to(tl.float32)
                factor_k, factor_q = 1.0, query_scale
                if NORM:
                    factor_k = tl.rsqrt(tl.sum(key * key, axis=0) + eps)
                    factor_q = query_scale * tl.rsqrt(tl.sum(query * query, axis=0) + eps)
                key, query = key * factor_k, query * factor_q
                decay = tl.exp(g)
                total *= decay
                earlier = scale(earlier, decay, t)
                for j in tl.static_range(t):
                    kk = tl.where(o_square == t * TOKENS + j, tl.sum(earlier[j] * key, axis=0), kk)
                    kq = tl.where(o_square == t * TOKENS + j, tl.sum(earlier[j] * query, axis=0), kq)
                kq = tl.where(o_square == t * TOKENS + t, tl.sum(key * query, axis=0), kq)
                store_pairs(p_room + t * 2 * K, key * total, query * total, K, BLOCK_K)
                if records:
                    tl.store(p_draft + t * RECORD + GATES + i_hv * K, g)
                if records_k:
                    tl.store(p_draft + t * RECORD + i_h * K, key)
            own_keys, own_decays, earlier = own_keys + (key,), own_decays + (g,), earlier + (key,)

        beta = read_strength(beta, RAW)
        p_between = p_room + BETWEEN * K
        p_square = p_between + o_t[:, None] * TOKENS + o_t[None, :]
        tl.store(p_square, tl.reshape(kk, (TOKENS, TOKENS)) * -beta[:, None])
        tl.store(p_square + SQUARE, tl.reshape(kq, (TOKENS, TOKENS)))
        tl.store(p_between + 2 * SQUARE + o_t, beta)
        if (write > 0) & (committed > 0):
            _store_left(p_room + OWN * K, own_keys, own_decays, n, K)


def prepare_tokens(
    inputs: DeltaInputs, lines: StateLines, rows: Rows, room: Tensor, block_k: int, *, overlap: bool
) -> None:
    """Write what `rows` are without their states to `room` `[rows, HV, count_room(K)]` fp32, for `launch_verify`.

    Mutates the drafts of `lines`, keys and log decays alone. block_k: channels that a row's threads load at once;
    `overlap`: the next launch may begin.
    """
    heads = inputs.heads
    (lines_of, _, control, control_stride) = lines.arguments(rows, room)
    unit, (q_units, k_units, _) = inputs.count_strides(4)
    constants = lines.constants
    _prepare_halves[(2 * rows.num_rows * heads.num_value_heads,)](
        inputs.q,
        inputs.k,
        inputs.gates,
        lines_of,
        room,
        control,
        control_stride,
        *inputs.numbers,
        q_units,
        k_units,
        inputs.lower_bound,
        **inputs.sizes,
        RAW=inputs.A_log is None,
        NORM=inputs.normalize,
        LINE_SHIFT=constants["LINE_SHIFT"],
        UNIT=unit,
        ROOM=room.shape[2],
        BLOCK_K=block_k,
        OVERLAP=overlap,
        num_warps=1,
        num_stages=1,
        maxnreg=MAX_REGISTERS,
    )
