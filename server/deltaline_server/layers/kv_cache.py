"""Keys and values of attention layers, in pages: how many there can be, and the tensors that hold them.

A page of a sequence is the same number in every layer, so that one table serves all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.shapes import PagedShape

# Tokens of a sequence for which there are pages, on average, where --state-bytes sets no limit.
USUAL_TOKENS = 2048
MAX_PAGE_SIZE = 4096
# Pages that a GPU copies at once, in all layers, by way of as many beside the pool.
COPIES = 8


@dataclass(frozen=True)
class KvState:
    """Keys and values of one layer, and the table of all: what an attention mixer mutates and reads.

    k_pages, v_pages `[pages, page_size, HKV, D]` in the model's dtype; page 0 belongs to no sequence. Of latents both
    are the same memory. page_table int32 `[L, max_pages]`: the pages of each line; what is behind a line's last token
    means nothing.
    """

    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor


@dataclass(frozen=True)
class KvPlan:
    """Sizes of the cache, in Python integers.

    num_pages: page 0 not counted. page_bytes: of one page in all layers. max_context: most tokens of a sequence.
    """

    page_size: int
    num_pages: int
    page_bytes: int
    max_context: int

    @property
    def max_pages(self) -> int:
        """Most pages of a sequence."""
        return -(-self.max_context // self.page_size)

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages, page 0 among them."""
        return (self.num_pages + 1) * self.page_bytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of what pages are copied through."""
        return COPIES * self.page_bytes


def check_page_size(page_size: int) -> None:
    """Raise ModelError where the kernels don't take a page's size."""
    if not 16 <= page_size <= MAX_PAGE_SIZE or page_size.bit_count() != 1:
        raise ModelError(f"--page-size: expected a power of two in 16..{MAX_PAGE_SIZE}, got {page_size}")


def plan_cache(
    shapes: Sequence[PagedShape], num_lines: int, page_size: int, room_bytes: int | None, dtype: torch.dtype
) -> KvPlan:
    """Say how many pages there are for these layers, 0 or fewer where the room is too small; allocate nothing.

    room_bytes: what is left for them and for the table; None for no limit: then pages are for USUAL_TOKENS tokens of
    every line, and for one sequence of the most tokens that there can be.
    """
    page_bytes = page_size * sum(map(kept_values, shapes)) * dtype.itemsize
    longest = shapes[0].max_positions
    # As if sequences shared no pages; the last page of each is partly empty.
    usual, most = (-(-tokens // page_size) for tokens in (min(longest, USUAL_TOKENS), longest))
    if room_bytes is None:
        num_pages = max(most, num_lines * usual)
    else:
        # A column of the table for each page that a sequence may have: for fewer than `most` it is narrower.
        room_bytes -= page_bytes  # page 0
        column_bytes = (num_lines + 1) * torch.int32.itemsize
        num_pages = max(
            (room_bytes - most * column_bytes) // page_bytes, min(most, room_bytes // (page_bytes + column_bytes))
        )
    return KvPlan(page_size, num_pages, page_bytes, min(longest, num_pages * page_size))


def allocate_cache(
    shapes: Sequence[PagedShape], plan: KvPlan, num_lines: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[KvState], list[Tensor]]:
    """Allocate the pages of each layer, and one table for all.

    Beside the layers' states, the tensors `[2 * layers, pages, page_size, HKV, D]`, of latents `[layers, ..]`, in which
    the pages of layers that are alike lie together, so that a page is copied in all of them at once.
    """
    table = torch.zeros(num_lines + 1, plan.max_pages, dtype=torch.int32, device=device)
    sizes = [(plan.num_pages + 1, plan.page_size, shape.num_kv_heads, shape.head_dim) for shape in shapes]
    counts = Counter[tuple[int, ...]]()
    for size, shape in zip(sizes, shapes, strict=True):
        counts[size] += shape.page_parts
    blocks = {size: torch.zeros(count, *size, dtype=dtype, device=device) for size, count in counts.items()}
    rest = {size: iter(block.unbind()) for size, block in blocks.items()}
    states = []
    for size, shape in zip(sizes, shapes, strict=True):
        parts = [next(rest[size]) for _ in range(shape.page_parts)]
        states.append(KvState(parts[0], parts[-1], table))
    return states, list(blocks.values())


def kept_values(shape: PagedShape) -> int:
    """Values that a token is kept as."""
    return shape.page_parts * shape.num_kv_heads * shape.head_dim
