"""Builds the tiles of a batch on the device: a stable counting sort of tokens by adapter, in one launch.

A program per slot counts the tokens of every slot, hence knows where its own tiles begin, and lists its own tokens. One
more marks the tiles that are left over.
"""

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK_T = 1024


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["num_tokens", "num_slots", "num_tiles"],
    do_not_specialize_on_alignment=["token_slots", "tile_slots", "tile_tokens"],
)
def _group(
    token_slots,
    tile_slots,
    tile_tokens,
    num_tokens,
    num_slots,
    num_tiles,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    i_slot = tl.program_id(0)
    o_t = tl.arange(0, BLOCK_T)
    o_l = tl.arange(0, BLOCK_L)
    counts = tl.zeros((BLOCK_L,), tl.int32)
    for begin in range(0, num_tokens, BLOCK_T):
        slots = tl.load(token_slots + begin + o_t, mask=begin + o_t < num_tokens, other=-1)
        is_adapter = (slots >= 0) & (slots < num_slots)
        counts += tl.histogram(tl.where(is_adapter, slots, 0), BLOCK_L, mask=is_adapter)
    tiles = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(o_l < i_slot, tiles, 0))
    count = tl.sum(tl.where(o_l == i_slot, counts, 0))
    if i_slot == num_slots:
        for begin in range(first, num_tiles, BLOCK_L):
            tl.store(tile_slots + begin + o_l, -1, mask=begin + o_l < num_tiles)
    elif count > 0:
        num_own = (count + ROWS - 1) // ROWS
        for begin in range(0, num_own, BLOCK_L):
            tl.store(tile_slots + first + begin + o_l, i_slot, mask=begin + o_l < num_own)
        own = tile_tokens + first.to(tl.int64) * ROWS
        seen = 0
        for begin in range(0, num_tokens, BLOCK_T):
            mine = tl.load(token_slots + begin + o_t, mask=begin + o_t < num_tokens, other=-1) == i_slot
            ones = mine.to(tl.int32)
            tl.store(own + seen + tl.cumsum(ones, axis=0) - 1, begin + o_t, mask=mine)
            seen += tl.sum(ones)
        rest = count + tl.arange(0, ROWS)
        tl.store(own + rest, -1, mask=rest < num_own * ROWS)


def group_tokens_triton(token_slots: Tensor, num_slots: int, tile_slots: Tensor, tile_tokens: Tensor) -> None:
    """Write `tile_slots` `[tiles]` and `tile_tokens` `[tiles, rows]`; arguments are validated by `group_tokens`."""
    num_tokens = token_slots.shape[0]
    num_tiles, rows = tile_tokens.shape
    _group[(num_slots + 1,)](
        token_slots,
        tile_slots,
        tile_tokens,
        num_tokens,
        num_slots,
        num_tiles,
        ROWS=rows,
        BLOCK_T=min(MAX_BLOCK_T, max(16, triton.next_power_of_2(num_tokens))),
        BLOCK_L=max(16, triton.next_power_of_2(num_slots)),
        num_warps=4,
        num_stages=1,
    )
