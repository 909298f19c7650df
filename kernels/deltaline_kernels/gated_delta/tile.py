"""A tile of state in registers, and what a token does to it.

    h = exp(g) h;  u = beta (v - h k);  h += u k^T;  o = h q

A tile has PARTS parts of `[SUB rows, K]`, each a tuple of `[SUB, BLOCK_K]` tensors whose rows are 128 bytes of state:
so 8 threads share a row, load 16 bytes at once, and most of a sum over K stays inside a thread. Keys and queries have
the shape of one such tuple, the same in every row: loaded so, each thread has what it needs, for all parts, without an
exchange. They are used as they come, and their norms as factors of the products. Values and outputs are `[SUB, 1]`.
"""

import triton
import triton.language as tl


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
            tile = tile + (tl.load(pointer + o_row * K + o_k, mask=mask & (o_row < V) & (o_k < K), other=0.0),)
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
            tl.store(pointer + o_row * K + o_k, value, mask=(o_row < V) & (o_k < K))


@triton.jit
def load_key(pointer, mask, K: tl.constexpr, SUB: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return K values at `pointer` for every row, as they come; zero where `mask` is not set."""
    key = ()
    for j in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        o_k = j * BLOCK_K + tl.arange(0, BLOCK_K)[None, :] + tl.zeros((SUB, 1), tl.int32)
        key = key + (tl.load(pointer + o_k, mask=mask & (o_k < K), other=0.0),)
    return key


@triton.jit
def load_values(pointer, mask, o_v, V: tl.constexpr, PARTS: tl.constexpr, SUB: tl.constexpr):
    """Return the values of every part at `pointer` `[V]`, as they come; zero where `mask` is not set."""
    values = ()
    for r in tl.static_range(PARTS):
        o_row = o_v + r * SUB
        values = values + (tl.load(pointer + o_row, mask=mask & (o_row < V), other=0.0),)
    return values


@triton.jit
def multiply(tile, first: tl.constexpr, key, BLOCKS: tl.constexpr):
    """Return the sums over K of the tensors of `tile` from `first` on times those of `key`, fp32 `[SUB, 1]`."""
    total = tile[first].to(tl.float32) * key[0].to(tl.float32)
    for j in tl.static_range(1, BLOCKS):
        total += tile[first + j].to(tl.float32) * key[j].to(tl.float32)
    return tl.sum(total, axis=1, keep_dims=True)


@triton.jit
def fold_token(tile, k, factor, values, g, beta, PARTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the tile after the token (k * factor, values, g, beta), and u times factor of every part."""
    decay = tl.exp(g)
    folded = ()
    updates = ()
    for r in tl.static_range(PARTS):
        seen = multiply(tile, r * BLOCKS, k, BLOCKS) * factor
        u = beta * (values[r].to(tl.float32) - decay * seen) * factor
        for j in tl.static_range(BLOCKS):
            folded = folded + (tile[r * BLOCKS + j] * decay + u * k[j].to(tl.float32),)
        updates = updates + (u,)
    return folded, updates
