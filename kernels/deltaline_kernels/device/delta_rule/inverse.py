"""The inverse of I + A, A strictly lower triangular, in blocks of 16 x 16 in the registers of one warp, in Triton.

Products leave their values with the threads that the next products want them from.
"""

import triton
import triton.language as tl


@triton.jit
def _turn(x):
    """Return the transpose of x, fp16: in the registers where a product wants its right operand."""
    return tl.trans(x).to(tl.float16)


@triton.jit
def places(BLOCK: tl.constexpr):
    """Return which token of its block has each row and column of a block of products.

    A product leaves columns 2t, 2t + 1, 2t + 8 and 2t + 9 with one thread: as tokens, four neighbours.
    """
    place = tl.arange(0, BLOCK)
    return (place & 6) * 2 + (place & 8) // 4 + (place & 1)


@triton.jit
def _is_left(o_i, o_j, size: tl.constexpr):
    """Return where o_i is in the first and o_j in the second half of the same block of 2 * size."""
    return (o_i // (2 * size) == o_j // (2 * size)) & ((o_i & size) < (o_j & size))


@triton.jit
def _eliminate(inverse, transpose, turned, below):
    """Return minus the inverse of I + A on diagonal blocks of twice the size, given that on blocks, and transposes.

    A block is [[X, 0], [N, Y]]; its inverse has -Y^-1 N X^-1 below the inverses of X and Y; `below` says where N^T lies
    in `turned`. No value exceeds 1, since each is a product of contractions: fp16 holds them as well as TF32 does.
    """
    known = tl.dot(transpose.to(tl.float16), _turn(tl.where(below, turned, 0.0)))
    left = inverse.to(tl.float16)
    return (
        tl.dot(left, _turn(known), acc=inverse),
        tl.dot(known.to(tl.float16), _turn(inverse), acc=transpose),
    )


@triton.jit
def _invert_block(weights, beta_i, beta_j, o_b):
    """Return -(I + A)^-1 and its transpose, A = tril(weights beta_j, -1) with symmetric weights, of the tokens o_b."""
    o_i, o_j = o_b[:, None], o_b[None, :]
    identity = tl.where(o_i == o_j, -1.0, 0.0)
    inverse = tl.where(_is_left(o_j, o_i, 1), weights * beta_j, identity)
    transpose = tl.where(_is_left(o_i, o_j, 1), weights * beta_i, identity)
    turned = weights * beta_j
    inverse, transpose = _eliminate(inverse, transpose, turned, _is_left(o_j, o_i, 2))
    inverse, transpose = _eliminate(inverse, transpose, turned, _is_left(o_j, o_i, 4))
    return _eliminate(inverse, transpose, turned, _is_left(o_j, o_i, 8))


@triton.jit
def store_block(p_transform, block, o_b, i: tl.constexpr, j: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Write block `[BLOCK, BLOCK]` to block (i, j) of the matrix at p_transform `[SIZE, SIZE]`, tokens in order."""
    fours = tl.permute(tl.reshape(block.to(p_transform.dtype.element_ty), (BLOCK, 2, 4, 2)), (2, 0, 1, 3))
    o_j = tl.arange(0, 4)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    p_block = p_transform + (i * BLOCK + o_b[None, :, None]) * SIZE + j * BLOCK + o_j
    tl.store(p_block, tl.reshape(fours, (4, BLOCK, 4)))


@triton.jit
def invert(p_transform, products, o_b, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Write T to p_transform `[SIZE, SIZE]`, of the products of keys in blocks: those of the lower half, row by row.

    Z_ii = -(I + A_ii)^-1;  Z_ij = Z_ii sum(j <= k < i) A_ik Z_kj;  T_ij = -beta Z_ij. What a product takes from the
    right is kept as its transpose: nothing is exchanged between threads. G and beta, fp32, are in the right half of the
    matrix's first rows, 16 tokens a row: behind them lie only zeros, which the caller writes.
    """
    SIZE: tl.constexpr = BLOCKS * BLOCK
    p_g = p_transform.to(tl.pointer_type(tl.float32)) + SIZE // 4
    p_beta = p_g + BLOCKS * (SIZE // 2)
    known_blocks, fades = (), ()  # Z^T of the blocks above;  exp(G - G_j) beta_j of their columns, G just above
    dtype: tl.constexpr = products[0].dtype
    above = 0.0
    for i in tl.static_range(BLOCKS):
        p_i = p_g + i * (SIZE // 2)
        g_i, g_j = tl.load(p_i + o_b)[:, None], tl.load(p_i + o_b)[None, :]
        last = tl.load(p_i + BLOCK - 1)
        beta_i = tl.load(p_beta + i * (SIZE // 2) + o_b)[:, None]
        beta_j = tl.load(p_beta + i * (SIZE // 2) + o_b)[None, :]
        weights = products[i * (i + 1) // 2 + i].to(tl.float32) * tl.exp2(-tl.abs(g_i - g_j))
        inverse, transpose = _invert_block(weights, beta_i, beta_j, o_b)
        right = _turn(inverse)
        inverse *= -beta_i
        store_block(p_transform, inverse, o_b, i, i, BLOCK, SIZE)
        left = inverse.to(tl.float16)
        turned, faded = (), ()
        for j in tl.static_range(i):
            coupling = products[i * (i + 1) // 2 + j] * tl.exp2(g_i - above).to(dtype)
            turned = turned + (_turn((coupling * fades[j]).to(tl.float32)),)
            faded = faded + (fades[j] * tl.exp2(last - above).to(dtype),)
        fades = faded + ((tl.exp2(last - g_j) * beta_j).to(dtype),)
        above = last
        row = ()
        for j in tl.static_range(i):
            known = tl.dot(known_blocks[j * (j + 1) // 2 + j], turned[j])
            for k in tl.static_range(j + 1, i):
                known = tl.dot(known_blocks[k * (k + 1) // 2 + j], turned[k], acc=known)
            store_block(p_transform, tl.dot(left, _turn(known)), o_b, i, j, BLOCK, SIZE)
            row = row + (tl.dot(known.to(tl.float16), right).to(tl.float16),)
        known_blocks = known_blocks + row + (transpose.to(tl.float16),)
