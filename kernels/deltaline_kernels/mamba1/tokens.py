"""Tokens of a row and records of drafts for the channels of a tile (tile.py), in Triton.

A group is DEAL tokens, one or as many as threads share a channel. Of several each thread has what is one value of the
channel, x, dt, z and y, of a token of its own: time steps and gates are computed once.
"""

import triton
import triton.language as tl

from deltaline_kernels.device.activation import silu, softplus
from deltaline_kernels.device.state_tile import below
from deltaline_kernels.mamba1.tile import (
    advance,
    load_channels,
    load_keys,
    load_pairs,
    multiply,
    pick,
    store_states,
    to_keys,
)


@triton.jit
def find_tokens(
    tokens,
    strides,
    i_t,
    i_group,
    o_c,
    G: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Return pointers to B and C, and to x, dt and z of the channels, of token i_t, which is int64."""
    o_channel = i_group * P + o_c + tl.zeros((1, SPLIT), tl.int32)
    p_b = tokens[2] + i_t * strides[2] + i_group * S
    p_x = tokens[0] + i_t * strides[0] + o_channel
    p_dt = tokens[1] + i_t * strides[1] + o_channel
    return p_b, p_b + G * S, p_x, p_dt, tokens[3] + i_t * strides[3] + o_channel


@triton.jit
def load_tokens(
    pointers,
    strides,
    count,
    o_c,
    P: tl.constexpr,
    S: tl.constexpr,
    HAS_Z: tl.constexpr,
    PAIRS: tl.constexpr,
    CH: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEAL: tl.constexpr,
):
    """Return AT_ONCE tokens from `pointers` on, in groups of DEAL, of which the first `count` tokens are there.

    A group is B and C of each of its tokens, then x, dt and z, as they come; of several tokens each thread of a channel
    has those of one.
    """
    o_t = tl.arange(0, SPLIT)[None, :] * (DEAL > 1)
    groups = ()
    for g in tl.static_range(AT_ONCE // DEAL):
        bs, cs = (), ()
        for j in tl.static_range(g * DEAL, g * DEAL + DEAL):
            p_b, p_c = pointers[0] + j * strides[2], pointers[1] + j * strides[2]
            if PAIRS:
                bs = bs + (load_pairs(p_b, j < count, CH, SPLIT, PIECES),)
                cs = cs + (load_pairs(p_c, j < count, CH, SPLIT, PIECES),)
            else:
                bs = bs + (load_keys(p_b, j < count, S, CH, SPLIT, PIECES),)
                cs = cs + (load_keys(p_c, j < count, S, CH, SPLIT, PIECES),)
        first = g * DEAL + o_t
        inside = (first < count) & below(o_c, P, CH)
        values = tl.load(pointers[2] + first * strides[0], mask=inside)
        steps = tl.load(pointers[3] + first * strides[1], mask=inside)
        gates = tl.load(pointers[4] + first * strides[3], mask=inside) if HAS_Z else values
        groups = groups + ((bs, cs, values, steps, gates),)
    return groups


@triton.jit
def run_group(
    group,
    count,
    tile,
    weights,
    p_y,
    o_c,
    GP: tl.constexpr,
    P: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_Z: tl.constexpr,
    EXACT: tl.constexpr,
    KIND: tl.constexpr,
    CH: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECES: tl.constexpr,
    DEAL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write the outputs of a group, from p_y on; return the tile after it, and the B, u and d of a single token.

    Of its DEAL tokens `count` are there, or all if WHOLE. `weights` are the channels' rates, dt_bias and D. KIND is
    that of keys in pairs, or None.
    """
    rates, bias, skip = weights
    o_s = tl.arange(0, SPLIT)[None, :]
    values = group[2].to(tl.float32)
    steps = group[3].to(tl.float32) + bias
    if SOFTPLUS:
        steps = softplus(steps)
    updates = steps * values
    seen = values  # of another token each, at last
    b = to_keys(group[0][0], KIND, CH, SPLIT, PIECES)
    for j in tl.static_range(DEAL):
        if DEAL == 1:
            tile = advance(tile, rates, steps, updates, b, PIECES)
            seen, _ = tl.broadcast(
                multiply(tile, to_keys(group[1][j], KIND, CH, SPLIT, PIECES), CH, SPLIT, PIECES), values
            )
        else:
            if WHOLE or j < count:
                step, update = pick(steps, j, SPLIT), pick(updates, j, SPLIT)
                tile = advance(tile, rates, step, update, to_keys(group[0][j], KIND, CH, SPLIT, PIECES), PIECES)
                c = to_keys(group[1][j], KIND, CH, SPLIT, PIECES)
                seen = tl.where(o_s == j, multiply(tile, c, CH, SPLIT, PIECES), seen)
    b_y = tl.fma(skip, values, seen)
    if HAS_Z:
        b_y *= silu(group[4].to(tl.float32), EXACT)
    mask = below(o_c, P, CH) & ((o_s < DEAL) & (WHOLE | (o_s < count)))
    tl.store(p_y + o_s * GP, b_y.to(p_y.dtype.element_ty), mask=mask)
    return tile, b, updates, steps


@triton.jit
def load_record(
    pointer,
    mask,
    i_group,
    o_c,
    G: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    CH: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Return B, u and d of the draft at `pointer`; anything where `mask` is not set."""
    b = load_keys(pointer + i_group * S, mask, S, CH, SPLIT, PIECES)
    p_values = pointer + G * S + i_group * P
    updates = load_channels(p_values, mask, o_c, P, CH, SPLIT)
    return b, updates, load_channels(p_values + G * P, mask, o_c, P, CH, SPLIT)


@triton.jit
def store_record(
    pointer,
    b,
    updates,
    steps,
    with_keys,
    i_group,
    o_c,
    G: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    CH: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Write u and d, and B if `with_keys`, to the draft at `pointer`."""
    o_s = tl.arange(0, SPLIT)[None, :]
    p_values = pointer + G * S + i_group * P + o_c + 0 * o_s
    mask = below(o_c, P, CH) & (o_s == 0)
    tl.store(p_values, updates, mask=mask)
    tl.store(p_values + G * P, steps, mask=mask)
    if with_keys:
        # Of one channel: a row of a state.
        store_states(pointer + i_group * S, b, o_c - o_c, 1, S, CH, SPLIT, PIECES)
