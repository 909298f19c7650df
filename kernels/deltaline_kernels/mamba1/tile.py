"""The states of some channels in the registers of a program, and what a token does to them, in Triton.

    h = exp(d A) h + u B^T;  y = h C

A tile has the states of CH channels. SPLIT threads share a channel, and each has its states in pieces of 4: piece j of
thread s begins at state (j * SPLIT + s) * 4. A tile is a tuple of PIECES tensors `[CH, SPLIT, 4]`, one piece of each
thread, so that a load is 16 bytes of fp32 a thread and the sum over states stays in a thread but for a shuffle where
SPLIT is 2. Keys have the same form, the same for all channels. What is one value of a channel is `[CH, SPLIT]`: each of
its threads has it.

States advance by a fused sum of a rounded product, and outputs are summed in one order, whatever SPLIT is: tiles of
other forms leave the same bits.
"""

import triton
import triton.language as tl

from deltaline_kernels.device.state_tile import below, to_fp32


@triton.jit
def _piece(j: tl.constexpr, SPLIT: tl.constexpr):
    """Return which states piece j of each thread has, `[1, SPLIT, 4]`."""
    o_s = j * SPLIT + tl.arange(0, SPLIT)
    return (o_s[:, None] * 4 + tl.arange(0, 4)[None, :])[None, :, :]


@triton.jit
def load_states(
    pointer, mask, o_c, P: tl.constexpr, S: tl.constexpr, CH: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr
):
    """Return the tile at `pointer` `[P, S]` of the channels o_c `[CH, 1]`, as it comes; zero without `mask`."""
    tile = ()
    for j in tl.static_range(PIECES):
        o_s = _piece(j, SPLIT)
        inside = mask & below(o_c, P, CH)[:, :, None] & below(o_s, S, PIECES * SPLIT * 4)
        tile = tile + (tl.load(pointer + o_c[:, :, None] * S + o_s, mask=inside, other=0.0),)
    return tile


@triton.jit
def _join(parts, CH: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr):
    """Return PIECES tensors `[CH, SPLIT, 4, 1]` as one `[CH, SPLIT, 4, PIECES]`."""
    for level in tl.static_range(PIECES.bit_length() - 1):
        pairs = ()
        for j in tl.static_range(PIECES // 2 ** (level + 1)):
            pair = tl.join(parts[j], parts[j + PIECES // 2 ** (level + 1)])
            pairs = pairs + (tl.reshape(pair, (CH, SPLIT, 4, 2 ** (level + 1))),)
        parts = pairs
    return parts[0]


@triton.jit
def store_states(
    pointer, tile, o_c, P: tl.constexpr, S: tl.constexpr, CH: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr
):
    """Write the tile to `pointer` `[P, S]`, whole lines at once: threads exchange their pieces."""
    BLOCK_S: tl.constexpr = PIECES * SPLIT * 4
    joined = ()
    for j in tl.static_range(PIECES):
        joined = joined + (tl.reshape(tile[j].to(pointer.dtype.element_ty), (CH, SPLIT, 4, 1)),)
    values = tl.reshape(tl.permute(_join(joined, CH, SPLIT, PIECES), (0, 3, 1, 2)), (CH, BLOCK_S))
    o_s = tl.arange(0, BLOCK_S)[None, :]
    # Other threads than those that store a value have loaded it.
    tl.debug_barrier()
    tl.store(pointer + o_c * S + o_s, values, mask=below(o_c, P, CH) & below(o_s, S, BLOCK_S))


@triton.jit
def load_keys(pointer, mask, S: tl.constexpr, CH: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr):
    """Return S values at `pointer` for every channel, as they come; anything where `mask` is not set."""
    BLOCK_S: tl.constexpr = PIECES * SPLIT * 4
    keys = ()
    for j in tl.static_range(PIECES):
        o_s = _piece(j, SPLIT) + tl.zeros((CH, 1, 1), tl.int32)
        if S % BLOCK_S == 0:
            keys = keys + (tl.load(pointer + o_s, mask=mask),)
        else:
            keys = keys + (tl.load(pointer + o_s, mask=mask & (o_s < S), other=0.0),)
    return keys


@triton.jit
def load_pairs(pointer, mask, CH: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr):
    """Return the same keys of 16 bits as pairs, int32 `[CH, SPLIT, 2]`: the registers that the load writes.

    A single one is taken from its pair at once: in a loop that asks for keys ahead, that would wait for them.
    """
    p_pairs = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
    keys = ()
    for j in tl.static_range(PIECES):
        o_s = (j * SPLIT + tl.arange(0, SPLIT))[:, None] * 2 + tl.arange(0, 2)[None, :]
        keys = keys + (tl.load(p_pairs + (o_s[None, :, :] + tl.zeros((CH, 1, 1), tl.int32)), mask=mask),)
    return keys


@triton.jit
def to_keys(pairs, kind: tl.constexpr, CH: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr):
    """Return in fp32 what `load_pairs` returned of keys of `kind` bf16 or fp16, or `load_keys`, of None."""
    if kind is None:
        return to_fp32(pairs, PIECES)
    else:  # Triton reads on behind a return
        keys = ()
        for j in tl.static_range(PIECES):
            if kind == tl.bfloat16:
                low, high = pairs[j] << 16, pairs[j] & -65536
                low, high = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
            else:
                low, high = pairs[j].to(tl.int16), (pairs[j] >> 16).to(tl.int16)
                low, high = low.to(kind, bitcast=True).to(tl.float32), high.to(kind, bitcast=True).to(tl.float32)
            keys = keys + (tl.reshape(tl.join(low, high), (CH, SPLIT, 4)),)
        return keys


@triton.jit
def load_channels(pointer, mask, o_c, P: tl.constexpr, CH: tl.constexpr, SPLIT: tl.constexpr):
    """Return the values at `pointer` `[P]` of the channels, as they come; anything where `mask` is not set."""
    return tl.load(pointer + o_c + tl.zeros((1, SPLIT), tl.int32), mask=mask & below(o_c, P, CH))


@triton.jit
def advance(tile, rates, steps, updates, b, PIECES: tl.constexpr):
    """Return exp(d A) h + u B^T of the channels' d and u; `rates` are exponents of 2."""
    advanced = ()
    for j in tl.static_range(PIECES):
        decay = tl.exp2(rates[j] * steps[:, :, None])
        # One way to round: which product a compiler fuses with the sum is its choice in each kernel anew.
        advanced = advanced + (tl.fma(decay, tile[j], updates[:, :, None] * b[j]),)
    return advanced


@triton.jit
def _apart(piece, CH: tl.constexpr, SPLIT: tl.constexpr):
    """Return the four states of a piece, `[CH, SPLIT]` each."""
    even, odd = tl.split(tl.reshape(piece, (CH, SPLIT, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _fold(sums, PIECES: tl.constexpr):
    """Return the sum of PIECES tensors, of which the upper half is added to the lower one, and so on."""
    for level in tl.static_range(PIECES.bit_length() - 1):
        folded = ()
        for j in tl.static_range(PIECES // 2 ** (level + 1)):
            folded = folded + (sums[j] + sums[j + PIECES // 2 ** (level + 1)],)
        sums = folded
    return sums[0]


@triton.jit
def multiply(tile, c, CH: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr):
    """Return h C, `[CH, 1]`: pieces first, then the upper half of all pieces is added to the lower one, and so on."""
    sums = ()
    for j in tl.static_range(PIECES):
        h, keys = _apart(tile[j], CH, SPLIT), _apart(c[j], CH, SPLIT)
        # Fused with nothing: a plain product is fused with one sum or another, as the compiler pleases.
        total = tl.fma(h[0], keys[0], 0.0)
        for i in tl.static_range(1, 4):
            total = tl.fma(h[i], keys[i], total)
        sums = sums + (total,)
    # The threads' sums by the same rule: so does a GPU, of the lanes of a warp.
    return tl.sum(_fold(sums, PIECES), axis=1, keep_dims=True)
