"""A tile of state, and the few tokens of a short row, all at once: loads, products and sums, in Triton.

Keys k and queries q have the names of the gated delta rule; a Mamba2 layer calls k B and q C.

Tiles and parts are those of state_tile.py, but that 4 threads share a row of the state, and that a part has the 16 rows
of two matrix instructions. Such an instruction wants other threads to hold the values of a row. Its products may have
the columns in any order, as long as it is the same one on both sides: `_reorder` picks one in which nothing changes
hands, of tokens of 16 bits, and `_order_pairs` of fp32.
"""

import triton
import triton.language as tl

from deltaline_kernels.device.state_tile import add_outer, load_values, scale
from deltaline_kernels.rows import Rows, StateLines

# Tokens of the longest row; keys and queries together are as many as a matrix instruction has at least.
TOKENS = tl.constexpr(8)
# The bits of fp32 that a matrix instruction reads as TF32.
TF32_BITS = tl.constexpr(-(2**13))


def has_room(lines: StateLines, rows: Rows) -> bool:
    """Return whether the tile is for rows of so many tokens and drafts: several, none of which has its own line."""
    few = 1 < rows.max_length <= TOKENS.value and lines.drafts.shape[2] <= TOKENS.value
    return few and rows.num_token_lines == 0


@triton.jit
def _reorder(block, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return `[ROWS, BLOCK_K]` with its columns in the order in which 4 threads a row have them as operands."""
    split = tl.reshape(block, (ROWS, 4, BLOCK_K // 8, 2))
    return tl.reshape(tl.permute(split, (0, 2, 1, 3)), (ROWS, BLOCK_K))


@triton.jit
def _split_rows(products, COLUMNS: tl.constexpr):
    """Return the upper and the lower half of `[2 * TOKENS, COLUMNS]`."""
    return tl.split(tl.permute(tl.reshape(products, (2, TOKENS, COLUMNS)), (1, 2, 0)))


@triton.jit
def compare(tokens, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the products k.k, q.k and q.q of tokens with each other, fp32 `[TOKENS, TOKENS]` each."""
    gram = tl.zeros((2 * TOKENS, 2 * TOKENS), tl.float32)
    for j in tl.static_range(BLOCKS):
        both = _reorder(tokens[j], 2 * TOKENS, BLOCK_K)
        gram = tl.dot(both, tl.trans(both), gram)
    left, right = tl.split(tl.permute(tl.reshape(gram, (2 * TOKENS, 2, TOKENS)), (0, 2, 1)))
    kk, qk = _split_rows(left, TOKENS)
    _, qq = _split_rows(right, TOKENS)
    return kk, qk, qq


@triton.jit
def compare_queries(queries, keys, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the products q.k of tokens with each other, fp32 `[TOKENS, TOKENS]`; `queries` are there twice."""
    products = tl.zeros((2 * TOKENS, TOKENS), tl.float32)
    for j in tl.static_range(BLOCKS):
        left, right = _reorder(queries[j], 2 * TOKENS, BLOCK_K), _reorder(keys[j], TOKENS, BLOCK_K)
        products = tl.dot(left, tl.trans(right), products)
    once, _ = _split_rows(products, TOKENS)
    return once


@triton.jit
def remain(g):
    """Return what TOKENS tokens, of log decays g, leave of the state before them, and of each of them."""
    o_t = tl.arange(0, TOKENS)
    later = tl.where(o_t[None, :] > o_t[:, None], g[None, :], 0.0)
    return tl.exp(tl.sum(g)), tl.exp(tl.sum(later, axis=1))


@triton.jit
def decay_between(g):
    """Return what TOKENS tokens, of log decays g, leave of the state before them, and of each other.

    The first t tokens leave `[t]` of the state; those from j + 1 to t leave `[t, j]` of token j, which is 1 from j = t
    on. Products over 1, 2, 4 and 8 rows: a difference of prefix sums would cancel behind a strong gate. Not a scan of
    columns: where threads hold the same one twice, as a warp's do of so few, Triton 3.6 and 3.7 take what is carried
    from the wrong one.
    """
    o_t = tl.arange(0, TOKENS)
    o_row = tl.broadcast_to(o_t[:, None], (TOKENS, TOKENS))
    decay = tl.exp(g)
    between = tl.where(o_row > o_t[None, :], decay[:, None], 1.0)
    for level in tl.static_range(3):
        earlier = tl.gather(between, tl.maximum(o_row - (1 << level), 0), 0)
        between *= tl.where(o_row >= 1 << level, earlier, 1.0)
    return tl.cumprod(decay, axis=0), between


@triton.jit
def fold_token(tile, left, t, updates, key, PARTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the tile plus u k^T of token t, as far as it is left, with the u of every part in `updates`."""
    factor = tl.sum(tl.where(tl.arange(0, TOKENS) == t, left, 0.0))
    return add_outer(tile, scale(updates, factor, PARTS), key, PARTS, BLOCKS)


@triton.jit
def load_keys(pointer, mask, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return K values at `pointer` as a tuple of `[1, BLOCK_K]`, as they come; anything where `mask` is not set."""
    keys = ()
    for j in tl.static_range(K // BLOCK_K):
        keys = keys + (tl.load(pointer + j * BLOCK_K + tl.arange(0, BLOCK_K), mask=mask)[None, :],)
    return keys


@triton.jit
def load_records(
    pointer,
    first,
    count,
    i_h,
    i_hv,
    o_v,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    NUM: tl.constexpr,
):
    """Return the updates and the keys `[K]` of NUM records of one head from `first` on; anything from `count` on.

    A thread has a few channels of a key, which takes few registers while it waits: `hand_out` gives rows theirs.
    """
    updates, keys = (), ()
    for j in tl.static_range(NUM):
        p_record = pointer + (first + j) * (H * K + HV * V + HV)
        updates = updates + (load_values(p_record + H * K + i_hv * V, first + j < count, o_v, V, PARTS, SUB),)
        keys = keys + (tl.load(p_record + i_h * K + tl.arange(0, K), mask=first + j < count),)
    return updates, keys


@triton.jit
def load_rows(pointer, n, stride, COUNT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the K values of TOKENS tokens from `pointer` on as a tuple of `[COUNT, BLOCK_K]`, as they come.

    Zero from token n on. Of a COUNT above TOKENS, the rest is the same tokens again.
    """
    o_t = (tl.arange(0, COUNT) % TOKENS)[:, None]
    o_k = tl.arange(0, BLOCK_K)[None, :]
    tokens = ()
    for j in tl.static_range(K // BLOCK_K):
        tokens = tokens + (tl.load(pointer + o_t * stride + j * BLOCK_K + o_k, mask=o_t < n, other=0.0),)
    return tokens


@triton.jit
def load_tokens(p_k, p_q, n, k_stride, q_stride, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the keys at p_k of a row's tokens, then their queries, as a tuple of `[2 * TOKENS, BLOCK_K]`.

    As they come; zero from token n on.
    """
    o_x = tl.arange(0, 2 * TOKENS)[:, None]
    o_k = tl.arange(0, BLOCK_K)[None, :]
    is_key = o_x < TOKENS
    p_x = tl.where(is_key, p_k, p_q) + (o_x % TOKENS) * tl.where(is_key, k_stride, q_stride)
    tokens = ()
    for j in tl.static_range(K // BLOCK_K):
        tokens = tokens + (tl.load(p_x + j * BLOCK_K + o_k, mask=o_x % TOKENS < n, other=0.0),)
    return tokens


@triton.jit
def _split_bits(values):
    """Return the bits of fp32 that TF32 has, and the rest."""
    high = (values.to(tl.int32, bitcast=True) & TF32_BITS).to(tl.float32, bitcast=True)
    return high, values - high


@triton.jit
def store_pairs(pointer, key, query, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Write a token's key and query `[K]` to 2 K values at `pointer`, as `load_pairs` takes them.

    Four at a time are what a thread of a matrix instruction has: two channels that are neighbours, of both. First those
    of the channels 0 and 1 of every four, then those of 2 and 3, so that a thread here has its own four together too.
    """
    apart = tl.permute(tl.reshape(tl.join(key, query), (K // 4, 2, 2, 2)), (1, 0, 2, 3))
    o_x = tl.arange(0, K // 2)[:, None]
    first = o_x * 4 % K
    o_four = o_x * 4 // K * (K // 16) + first // BLOCK_K * (BLOCK_K // 16) + first % (BLOCK_K // 4) // 4
    o_thread = first % BLOCK_K // (BLOCK_K // 4)
    place = o_four * 16 + o_thread * 4 + tl.arange(0, 4)[None, :]
    tl.store(pointer + place, tl.reshape(apart, (K // 2, 4)))


@triton.jit
def load_pairs(pointer, n, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the keys and queries of TOKENS tokens that `store_pairs` wrote from `pointer` on, as operands.

    A tuple of `[2 * TOKENS, BLOCK_K]`, the keys first; zero from token n on.
    """
    loaded = load_rows(pointer, n, 2 * K, TOKENS, 2 * K, 16)
    FOURS: tl.constexpr = BLOCK_K // 16
    pairs = ()
    for j in tl.static_range(K // BLOCK_K):
        if FOURS == 1:
            block = tl.join(loaded[j], loaded[K // 16 + j])
        else:
            left = tl.join(loaded[2 * j], loaded[2 * j + 1])
            block = tl.join(left, tl.join(loaded[K // 16 + 2 * j], loaded[K // 16 + 2 * j + 1]))
        apart = tl.permute(tl.reshape(block, (TOKENS, 4, 2, 2, FOURS, 2)), (3, 0, 4, 2, 1, 5))
        pairs = pairs + (tl.reshape(apart, (2 * TOKENS, BLOCK_K)),)
    return pairs


@triton.jit
def _order_pairs(block, SUB: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return `[SUB, BLOCK_K]` of a tile with its columns in the order of `load_pairs`."""
    apart = tl.permute(tl.reshape(block, (SUB, 4, BLOCK_K // 16, 2, 2)), (0, 2, 4, 1, 3))
    return tl.reshape(apart, (SUB, BLOCK_K))


@triton.jit
def order_tokens(tokens, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr):
    """Return 2 * TOKENS rows of 16 bits, as `load_tokens` and `load_rows` load them, as operands like `load_pairs`'."""
    pairs = ()
    for j in tl.static_range(BLOCKS):
        pairs = pairs + (_order_pairs(tokens[j], 2 * TOKENS, BLOCK_K).to(tl.float32),)
    return pairs


@triton.jit
def multiply_pairs(
    tile,
    pairs,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXACT: tl.constexpr = False,
):
    """Return the products of the keys and every part's rows, then those of the queries, tuples of `[TOKENS, SUB]`.

    Exact to about 2^-20: both sides are sums, whose rests don't meet; EXACT: keys and queries were of 16 bits, and have
    none. The state is the right operand, of which a thread gives an instruction two neighbours of a row, as they came:
    for a left one it would have to gather four of two rows.
    """
    products = ()
    for _ in tl.static_range(PARTS):
        products = products + (tl.zeros((2 * TOKENS, SUB), tl.float32),)
    for j in tl.static_range(BLOCKS):
        if EXACT:
            left_high = pairs[j]
        else:
            left_high, left_low = _split_bits(pairs[j])
        more = ()
        for r in tl.static_range(PARTS):
            right_high, right_low = _split_bits(tl.trans(_order_pairs(tile[r * BLOCKS + j], SUB, BLOCK_K)))
            total = tl.dot(left_high, right_high, products[r], input_precision="tf32")
            if not EXACT:
                total = tl.dot(left_low, right_high, total, input_precision="tf32")
            more = more + (tl.dot(left_high, right_low, total, input_precision="tf32"),)
        products = more
    of_keys, of_queries = (), ()
    for r in tl.static_range(PARTS):
        upper, lower = _split_rows(products[r], SUB)
        of_keys, of_queries = of_keys + (upper,), of_queries + (lower,)
    return of_keys, of_queries


@triton.jit
def take_token(values, t, COLUMNS: tl.constexpr):
    """Return row t of `[TOKENS, COLUMNS]`, as `[1, COLUMNS]`; what is not finite in the others does not reach it."""
    return tl.gather(values, tl.zeros((1, COLUMNS), tl.int32) + t, 0)


@triton.jit
def take_weights(square, t):
    """Return column t of `[TOKENS, TOKENS]`, as `[TOKENS, 1]`: what token t is to each token."""
    return tl.sum(tl.where(tl.arange(0, TOKENS)[None, :] == t, square, 0.0), axis=1, keep_dims=True)


@triton.jit
def add_tokens(updates, outputs, to_updates, to_outputs, n, PARTS: tl.constexpr, SUB: tl.constexpr):
    """Return `updates` and `outputs`, `[TOKENS, SUB]` of each part, with what n tokens add to those from them on.

    Token j adds its update times [t, j] of `to_updates` and `to_outputs` to row t: one after the other, since row j is
    its update as soon as what the tokens before it add is in it.
    """
    o_t = tl.arange(0, TOKENS)[:, None]
    for t in range(0, n):
        add_u, add_o = take_weights(to_updates, t), take_weights(to_outputs, t)
        new_updates, new_outputs = (), ()
        for r in tl.static_range(PARTS):
            u = take_token(updates[r], t, SUB)
            # Not a sum with zeros: of a token that is not finite the tokens before it know nothing.
            new_updates = new_updates + (tl.where(o_t > t, updates[r] + u * add_u, updates[r]),)
            new_outputs = new_outputs + (tl.where(o_t >= t, outputs[r] + u * add_o, outputs[r]),)
        updates, outputs = new_updates, new_outputs
    return updates, outputs
