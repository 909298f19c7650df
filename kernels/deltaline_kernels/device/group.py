"""Builds tiles of tokens that have the same key, on the device: a stable counting sort, in one launch.

A program per key counts the tokens of every key, hence knows where its own tiles begin, and lists its own tokens. One
more marks the tiles that are left over.
"""

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK_T = 1024


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["num_tokens", "num_keys", "num_tiles"],
    do_not_specialize_on_alignment=["keys", "tile_keys", "tile_tokens"],
)
def _group(
    keys,
    tile_keys,
    tile_tokens,
    num_tokens,
    num_keys,
    num_tiles,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    i_key = tl.program_id(0)
    o_t = tl.arange(0, BLOCK_T)
    o_l = tl.arange(0, BLOCK_L)
    counts = tl.zeros((BLOCK_L,), tl.int32)
    for begin in range(0, num_tokens, BLOCK_T):
        found = tl.load(keys + begin + o_t, mask=begin + o_t < num_tokens, other=-1)
        is_key = (found >= 0) & (found < num_keys)
        counts += tl.histogram(tl.where(is_key, found, 0), BLOCK_L, mask=is_key)
    tiles = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(o_l < i_key, tiles, 0))
    count = tl.sum(tl.where(o_l == i_key, counts, 0))
    if i_key == num_keys:
        for begin in range(first, num_tiles, BLOCK_L):
            tl.store(tile_keys + begin + o_l, -1, mask=begin + o_l < num_tiles)
    elif count > 0:
        num_own = (count + ROWS - 1) // ROWS
        for begin in range(0, num_own, BLOCK_L):
            tl.store(tile_keys + first + begin + o_l, i_key, mask=begin + o_l < num_own)
        own = tile_tokens + first.to(tl.int64) * ROWS
        seen = 0
        for begin in range(0, num_tokens, BLOCK_T):
            mine = tl.load(keys + begin + o_t, mask=begin + o_t < num_tokens, other=-1) == i_key
            ones = mine.to(tl.int32)
            tl.store(own + seen + tl.cumsum(ones, axis=0) - 1, begin + o_t, mask=mine)
            seen += tl.sum(ones)
        rest = count + tl.arange(0, ROWS)
        tl.store(own + rest, -1, mask=rest < num_own * ROWS)


def group_triton(keys: Tensor, num_keys: int, tile_keys: Tensor, tile_tokens: Tensor) -> None:
    """Write the tiles of tokens by their keys `[T]` int32; a token whose key is not in 0..num_keys-1 is in none.

    Args:
        tile_keys: `[tiles]` int32, the keys in rising order, -1 behind the last tile; see `count_tiles`.
        tile_tokens: `[tiles, rows]` int32, numbers of tokens in rising order, -1 behind the last one of a tile; not
            written where the tile has no key.
    """
    num_tokens = keys.shape[0]
    num_tiles, rows = tile_tokens.shape
    _group[(num_keys + 1,)](
        keys,
        tile_keys,
        tile_tokens,
        num_tokens,
        num_keys,
        num_tiles,
        ROWS=rows,
        BLOCK_T=min(MAX_BLOCK_T, max(16, triton.next_power_of_2(num_tokens))),
        BLOCK_L=max(16, triton.next_power_of_2(num_keys)),
        num_warps=4,
        num_stages=1,
    )
