"""Where the keys of a tile are, in Triton: in pages, or together."""

import triton
import triton.language as tl


@triton.jit
def load_pages(page_table, b, start, last, o_n, PAGE: tl.constexpr, DENSE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page of the tile of keys from `start` on, or those of its keys; none is looked up behind `last`."""
    if DENSE:
        return b
    elif PAGE >= BLOCK_N:
        return tl.load(page_table + start // PAGE)
    else:
        return tl.load(page_table + tl.minimum(start + o_n, last) // PAGE)


@triton.jit
def key_offsets(
    pages,
    start,
    o_n,
    i_head,
    page_keys,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    DENSE: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return where the keys of a tile begin, `[BLOCK_N]` or one number and what is to be added for each key."""
    KEY: tl.constexpr = D if HEADS_FIRST else H * D
    if DENSE:
        keys = page_keys.to(tl.int64)
        head = i_head * keys * D if HEADS_FIRST else i_head * D
        return pages.to(tl.int64) * keys * (H * D) + head + start.to(tl.int64) * KEY + o_n * KEY
    elif PAGE >= BLOCK_N:
        return pages.to(tl.int64) * (PAGE * H * D) + start % PAGE * KEY + i_head * D + o_n * KEY
    else:
        return pages.to(tl.int64) * (PAGE * H * D) + (start + o_n) % PAGE * KEY + i_head * D
