"""A tile of a recurrent state in registers, and what a token does to it, for the kernels that go token by token.

    h = exp(g) h;  h += u k^T;  o = h q

Keys k and queries q, updates u and values have the names of the gated delta rule; a Mamba2 layer calls k B and q C.

A tile has PARTS parts of `[SUB rows, K]`, each a tuple of `[SUB, BLOCK_K]` tensors whose rows are 128 bytes of state:
so 8 threads share a row, load 16 bytes at once, and most of a sum over K stays inside a thread. Keys and queries have
the shape of one such tuple, the same in every row: loaded so, each thread has what it needs, for all parts, without an
exchange. Values and outputs are `[SUB, 1]`.

The state is rest * tile: a token's decay goes to that factor, so that folding a token is one instruction per value
instead of two. Sums of products are written as fused: left to the compiler, it chooses in each kernel anew which
product to round, and a replayed token would not leave the bits that the same token leaves when it is committed at once.
"""

import triton
import triton.language as tl

# Below this the tile is scaled after all: what is added to it is divided by `rest`, and must stay finite.
SMALLEST_REST = tl.constexpr(2.0**-16)


@triton.jit
def below(offsets, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return whether offsets of a block are below SIZE, which needs no instruction where blocks fill it."""
    return (offsets < SIZE) | (SIZE % BLOCK == 0)


@triton.jit
def load_tile(
    pointer, mask, o_v, V: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SUB: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return the parts at `pointer` `[V, K]` from row o_v on, as they come; zero where `mask` is not set."""
    tile = ()
    for r in tl.static_range(PARTS):
        o_row = o_v + r * SUB
        for j in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
            o_k = j * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            inside = mask & below(o_row, V, PARTS * SUB) & below(o_k, K, BLOCK_K)
            tile = tile + (tl.load(pointer + o_row * K + o_k, mask=inside, other=0.0),)
    return tile


@triton.jit
def store_tile(
    pointer, tile, o_v, V: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SUB: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Write the parts to `pointer` `[V, K]` from row o_v on."""
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # Other threads than those that store a value may have loaded it.
    tl.debug_barrier()
    for r in tl.static_range(PARTS):
        o_row = o_v + r * SUB
        for j in tl.static_range(BLOCKS):
            o_k = j * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            value = tile[r * BLOCKS + j].to(pointer.dtype.element_ty)
            inside = below(o_row, V, PARTS * SUB) & below(o_k, K, BLOCK_K)
            tl.store(pointer + o_row * K + o_k, value, mask=inside)


@triton.jit
def load_key(pointer, mask, K: tl.constexpr, SUB: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return K values at `pointer` for every row, as they come; anything where `mask` is not set."""
    key = ()
    for j in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        o_k = j * BLOCK_K + tl.arange(0, BLOCK_K)[None, :] + tl.zeros((SUB, 1), tl.int32)
        if K % BLOCK_K == 0:
            key = key + (tl.load(pointer + o_k, mask=mask),)
        else:
            key = key + (tl.load(pointer + o_k, mask=mask & (o_k < K), other=0.0),)
    return key


@triton.jit
def hand_out(key, SUB: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr, LEVELS: tl.constexpr):
    """Return a key `[BLOCK_K * 2 ** LEVELS]`, of which each thread has values of its own, as SUB rows have it.

    A tuple of the first BLOCKS blocks, `[SUB, BLOCK_K]` each: one exchange through shared memory.
    """
    blocks = (key,)
    for level in tl.static_range(LEVELS):
        halves = ()
        for j in tl.static_range(1 << level):
            apart = tl.permute(tl.reshape(blocks[j], (2, BLOCK_K << (LEVELS - 1 - level))), (1, 0))
            low, high = tl.split(apart)
            halves = halves + (low, high)
        blocks = halves
    rows = ()
    for j in tl.static_range(BLOCKS):
        rows = rows + (tl.broadcast_to(blocks[j][None, :], (SUB, BLOCK_K)),)
    return rows


@triton.jit
def load_values(pointer, mask, o_v, V: tl.constexpr, PARTS: tl.constexpr, SUB: tl.constexpr):
    """Return the values of every part at `pointer` `[V]`, as they come; anything where `mask` is not set."""
    values = ()
    for r in tl.static_range(PARTS):
        o_row = o_v + r * SUB
        values = values + (tl.load(pointer + o_row, mask=mask & below(o_row, V, PARTS * SUB)),)
    return values


@triton.jit
def to_fp32(tensors, COUNT: tl.constexpr):
    """Return the first COUNT of `tensors` in fp32."""
    converted = ()
    for j in tl.static_range(COUNT):
        converted = converted + (tensors[j].to(tl.float32),)
    return converted


@triton.jit
def multiply(tile, first: tl.constexpr, key, BLOCKS: tl.constexpr):
    """Return the sums over K of the tensors of `tile` from `first` on times those of `key`, fp32 `[SUB, 1]`."""
    # Fused with nothing: a plain product that is the only one would be fused with one sum or another of those over K,
    # as the compiler pleases, and kernels that compute the same differ in the last bit.
    total = tl.fma(tile[first], key[0], 0.0)
    for j in tl.static_range(1, BLOCKS):
        total = tl.fma(tile[first + j], key[j], total)
    return tl.sum(total, axis=1, keep_dims=True)


@triton.jit
def scale(tile, factor, COUNT: tl.constexpr):
    """Return the first COUNT tensors of `tile` times `factor`."""
    scaled = ()
    for j in tl.static_range(COUNT):
        scaled = scaled + (tile[j] * factor,)
    return scaled


@triton.jit
def fold(tile, rest, updates, k, PARTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Add u k^T to the state rest * tile, with the u of every part in `updates`; return its tile and rest."""
    if rest < SMALLEST_REST:
        # A barrier keeps this a branch: the assembler would issue every product each time, switched off.
        tl.debug_barrier()
        tile = scale(tile, rest, PARTS * BLOCKS)
        rest = 1.0
    folded = ()
    inverse = 1.0 / rest
    for r in tl.static_range(PARTS):
        update = updates[r] * inverse
        for j in tl.static_range(BLOCKS):
            # Equal shapes: fma does not broadcast.
            u, _ = tl.broadcast(update, k[j])
            folded = folded + (tl.fma(u, k[j], tile[r * BLOCKS + j]),)
    return folded, rest


@triton.jit
def decay_keys(tile, decays, PARTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the tile whose key channels are multiplied by `decays`, in the shape of a key."""
    decayed = ()
    for r in tl.static_range(PARTS):
        for j in tl.static_range(BLOCKS):
            decayed = decayed + (tile[r * BLOCKS + j] * decays[j],)
    return decayed


@triton.jit
def add_outer(tile, updates, k, PARTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the tile plus u k^T, with the u of every part in `updates`."""
    added = ()
    for r in tl.static_range(PARTS):
        for j in tl.static_range(BLOCKS):
            # Equal shapes: fma does not broadcast.
            u, key = tl.broadcast(updates[r], k[j])
            added = added + (tl.fma(u, key, tile[r * BLOCKS + j]),)
    return added


@triton.jit
def load_record(
    pointer,
    i_h,
    i_hv,
    o_v,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return k, u of every part and g of the draft at `pointer`, of one head."""
    k = load_key(pointer + i_h * K, True, K, SUB, BLOCK_K)
    updates = load_values(pointer + H * K + i_hv * V, True, o_v, V, PARTS, SUB)
    return k, updates, tl.load(pointer + H * K + HV * V + i_hv)
