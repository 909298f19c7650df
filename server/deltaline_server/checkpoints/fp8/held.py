"""Weights that stay in FP8: where served ones have whole blocks of the stored ones, and so their scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltaline_kernels import FP8_BLOCK
from deltaline_server.checkpoints.modules import Module, Placement


@dataclass(frozen=True)
class Fp8Weight:
    """A weight `[out, in]` as `multiply_fp8` takes it: words of its values, and the scales of their blocks, fp32."""

    words: Tensor
    scales: Tensor


class Blocks(NamedTuple):
    """The stored block in which each served one of FP8_BLOCK rows is, and of as many columns; int64."""

    rows: Tensor
    columns: Tensor

    def of(self, scales: Tensor) -> Tensor:
        """The scales `[..., block rows, block columns]` of the served blocks, of those of the stored ones."""
        return scales[..., self.rows[:, None], self.columns]


def served_blocks(module: Module, block: tuple[int, int], placement: Placement) -> Blocks | None:
    """Return the blocks of a rank's share of a module's weight whose stored blocks are of `block` rows and columns.

    None where on some rank, not always this one, a served block has parts of several: then no rank keeps it in FP8.
    """
    found = None
    for rank in range(placement.world_size):
        place = replace(placement, rank=rank)
        rows = whole_blocks(module.order(torch.arange(module.rows).__getitem__, place), block[0])
        columns = whole_blocks(torch.arange(module.columns)[module.columns_of(place)], block[1])
        if rows is None or columns is None:
            return None
        if rank == placement.rank:
            found = Blocks(rows, columns)
    return found


def whole_blocks(stored: Tensor, size: int) -> Tensor | None:
    """Return the stored block of each FP8_BLOCK served rows or columns, in order, the last ones perhaps fewer.

    stored: the number of each in the stored weight, int64; size: of a stored block. None where some of them are of
    several blocks.
    """
    blocks = stored // size
    full = pad(blocks, (0, -len(blocks) % FP8_BLOCK), value=int(blocks[-1])).view(-1, FP8_BLOCK)
    return full[:, 0] if bool((full == full[:, :1]).all()) else None
