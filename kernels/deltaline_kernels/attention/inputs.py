"""What an attention is given: its queries and what modifies them, and where its keys are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deltaline_kernels.attention.blocks import BlockLists
from deltaline_kernels.attention.modifiers.packed import Modifiers
from deltaline_kernels.attention.modifiers.shipped import causal
from deltaline_kernels.attention.plan import AttentionHeads


@dataclass(frozen=True, eq=False)
class Queries:
    """Packed queries, checked by the caller.

    Args:
        q: `[T, HQ, D]`, any strides of tokens and heads.
        sinks: `[HQ]` fp32 or None. gate: `[T, HQ, DV]`, any strides of tokens and heads, or None.
        blocks: lists of the blocks of keys that are looked at, or None for all keys that the mask may leave.
    """

    q: Tensor
    heads: AttentionHeads
    modifiers: Modifiers
    sinks: Tensor | None = None
    gate: Tensor | None = None
    blocks: BlockLists | None = None

    @property
    def is_only_causal(self) -> bool:
        """Whether a causal mask is all that modifies, and all keys that it leaves are looked at."""
        modifiers = self.modifiers
        masks = [[leaf.part.modifier for leaf in clause] for clause in modifiers.clauses]
        return self.blocks is None and not modifiers.scores and masks == [[causal]]


@dataclass(frozen=True)
class Keys:
    """Where keys and values are.

    Args:
        k, v: `[pages, page_size, HKV, D]` and `[.., DV]`, v None where values are the first channels of keys; or,
            without a page table, of each line a tensor of `page_size` keys, `[L, page_size, HKV, D]`, or
            `[L, HKV, page_size, D]` with heads_first.
        page_table: `[L, max_pages]` int32, or None (not on the CPU).
        capacity: most keys of a row.
        shared: all lines have the keys of line 0 (without a page table).
    """

    k: Tensor
    v: Tensor | None
    page_table: Tensor | None
    page_size: int
    capacity: int
    heads_first: bool = False
    shared: bool = False

    @property
    def has_tiles(self) -> bool:
        """Whether the copy engine takes tiles of them: there is a page, and all begins at multiples of 16 bytes."""
        first = [tensor.data_ptr() for tensor in (self.k, self.v) if tensor is not None]
        return self.k.shape[0] > 0 and all(pointer % 16 == 0 for pointer in first)
