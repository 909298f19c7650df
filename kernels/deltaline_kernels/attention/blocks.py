"""Lists of the blocks of keys that queries see, as PyTorch's BlockMask has them, in one tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.attention.plan import Tile


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Of each line, head and block of queries a list of blocks that the mask cuts, and one of those it leaves whole.

    Args:
        table: `[B, 1 + H * Q * (2 + C1 + C2)]` int32: the most blocks of any list of the line; then, of each head and
            block of queries, the lengths of its lists and the lists themselves.
        num_heads: 1 where all heads have the same lists.
        num_queries: blocks of queries; those behind have the lists of the last.
        columns: room of the two lists.
        block: queries and keys of a block. Queries are counted from the row's first token.
    """

    table: Tensor
    num_heads: int
    num_queries: int
    columns: tuple[int, int]
    block: tuple[int, int]

    @classmethod
    def from_mask(cls, mask: Any) -> BlockLists:
        """Return the lists of a BlockMask, on its device.

        Raises:
            ValueError: blocks of keys that are not a power of two of at least 16.
        """
        block_q, block_kv = mask.BLOCK_SIZE
        if block_kv < 16 or block_kv & (block_kv - 1):
            raise ValueError(f"block_mask: expected blocks of 16, 32, 64 .. keys, got {block_kv}")
        counts, indices = [mask.kv_num_blocks], [mask.kv_indices]
        if mask.full_kv_num_blocks is not None:
            counts.append(mask.full_kv_num_blocks)
            indices.append(mask.full_kv_indices)
        # What a count says beyond the room of its list would be read behind it.
        counts = [count.clamp(0, index.shape[-1]).to(torch.int32) for count, index in zip(counts, indices, strict=True)]
        if len(counts) == 1:
            counts.append(torch.zeros_like(counts[0]))
        _, num_heads, num_queries = counts[0].shape
        columns = [index.shape[-1] for index in indices]
        lists = torch.cat([torch.stack(counts, -1), *(index.to(torch.int32) for index in indices)], -1)
        most = (counts[0] + counts[1]).flatten(1).amax(1, keepdim=True)
        table = torch.cat([most, lists.flatten(1)], 1).contiguous()
        return cls(table, num_heads, num_queries, (columns[0], sum(columns[1:])), (block_q, block_kv))

    @property
    def num_columns(self) -> int:
        return sum(self.columns)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lines, values of a line, heads, blocks of queries, columns of the lists, queries and keys of a block."""
        return (*self.table.shape, self.num_heads, self.num_queries, *self.columns, *self.block)

    def check(self, num_heads: int, num_lines: int, device: torch.device) -> None:
        """Raise ValueError unless the lists are on `device` and for so many heads and lines, or for all."""
        if self.table.device != device:
            raise ValueError(f"blocks: expected device {device}, got {self.table.device}")
        for name, got, wanted in (("heads", self.num_heads, num_heads), ("lines", self.table.shape[0], num_lines)):
            if got not in (1, wanted):
                raise ValueError(f"blocks: expected lists of 1 or {wanted} {name}, got {got}")

    def kinds(self, line: int) -> Tensor:
        """Return `[H, Q, KV]` of a line on the CPU: 0 for a block in no list, 1 for a cut one, 2 for a whole one."""
        lists = self.table[line if self.table.shape[0] > 1 else 0, 1:].view(self.num_heads, self.num_queries, -1)
        numbers = lists[..., 2:].long()
        found = torch.zeros(self.num_heads, self.num_queries, int(numbers.amax()) + 1, dtype=torch.int8)
        first = 0
        for kind, columns in enumerate(self.columns, start=1):
            for head, i_q in torch.cartesian_prod(
                torch.arange(self.num_heads), torch.arange(self.num_queries)
            ).tolist():
                count = int(lists[head, i_q, kind - 1])
                found[head, i_q, numbers[head, i_q, first : first + count]] = kind
            first += columns
        return found

    def expand(self, line: int, tokens: Tensor, kv: Tensor) -> Tensor:
        """Return of which kind the block of each query and key is, `[H, tokens, keys]`, as `kinds` has it."""
        kinds = self.kinds(line)
        i_q = (tokens // self.block[0]).clamp(max=self.num_queries - 1)
        i_kv = kv // self.block[1]
        found = kinds[:, i_q[:, None], i_kv.clamp(max=kinds.shape[2] - 1)]
        return torch.where(i_kv < kinds.shape[2], found, 0)

    def fit(self, tile: Tile) -> Tile:
        """Return a tile of queries of one block and of keys of one block; a split is as many entries of the lists."""
        block_q, block_kv = self.block
        split = max(1, tile.split // block_kv) if tile.split else 0
        return replace(tile, tokens=min(tile.tokens, block_q & -block_q), keys=min(tile.keys, block_kv), split=split)
