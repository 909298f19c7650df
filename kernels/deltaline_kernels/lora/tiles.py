"""The tokens of a batch in tiles of one adapter each: what every projection of a step is told about adapters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AdapterTiles:
    """Tiles in the order of their slots; those with an adapter come first.

    Args:
        slots: `[tiles]` int32, the slot of each tile, -1 behind the last one that has tokens.
        tokens: `[tiles, rows]` int32, numbers of tokens in rising order, -1 behind the last one; unspecified where the
            tile has no slot. Tokens without an adapter are in no tile.
        num_tokens: of the batch. num_slots: that a tile may have.
    """

    slots: Tensor
    tokens: Tensor
    num_tokens: int
    num_slots: int

    @property
    def num_tiles(self) -> int:
        return self.tokens.shape[0]

    @property
    def rows(self) -> int:
        return self.tokens.shape[1]
