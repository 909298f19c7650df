"""Tokens of a row and records of drafts for the channels of a tile (tile.py), in Triton."""

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
):
    """Return B, C, x, dt and z of AT_ONCE tokens from `pointers` on, as they come; the first `count` are there."""
    tokens = ()
    for j in tl.static_range(AT_ONCE):
        p_b, p_c = pointers[0] + j * strides[2], pointers[1] + j * strides[2]
        if PAIRS:
            b, c = load_pairs(p_b, j < count, CH, SPLIT, PIECES), load_pairs(p_c, j < count, CH, SPLIT, PIECES)
        else:
            b, c = load_keys(p_b, j < count, S, CH, SPLIT, PIECES), load_keys(p_c, j < count, S, CH, SPLIT, PIECES)
        inside = (j < count) & below(o_c, P, CH)
        values = tl.load(pointers[2] + j * strides[0], mask=inside)
        steps = tl.load(pointers[3] + j * strides[1], mask=inside)
        gates = tl.load(pointers[4] + j * strides[3], mask=inside) if HAS_Z else values
        tokens = tokens + ((b, c, values, steps, gates),)
    return tokens


@triton.jit
def run_token(
    token,
    tile,
    weights,
    p_y,
    o_c,
    P: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_Z: tl.constexpr,
    EXACT: tl.constexpr,
    KIND: tl.constexpr,
    CH: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Write a token's output to p_y; return the tile after it, and its B, u and d.

    `weights` are the channels' rates, dt_bias and D. KIND is that of keys in pairs, or None.
    """
    rates, bias, skip = weights
    b, c = to_keys(token[0], KIND, CH, SPLIT, PIECES), to_keys(token[1], KIND, CH, SPLIT, PIECES)
    values = token[2].to(tl.float32)
    steps = token[3].to(tl.float32) + bias
    if SOFTPLUS:
        steps = softplus(steps)
    updates = steps * values
    tile = advance(tile, rates, steps, updates, b, PIECES)
    b_y, _ = tl.broadcast(multiply(tile, c, CH, SPLIT, PIECES), values)
    b_y = tl.fma(skip, values, b_y)
    if HAS_Z:
        b_y *= silu(token[4].to(tl.float32), EXACT)
    o_s = tl.arange(0, SPLIT)[None, :]
    tl.store(p_y, b_y.to(p_y.dtype.element_ty), mask=below(o_c, P, CH) & (o_s == 0))
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
