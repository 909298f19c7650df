"""What a rank has of stored experts, and whether it stays in FP8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_server.checkpoints.fp8.held import Blocks, whole_blocks
from deltaline_server.checkpoints.layer_reader import LayerReader


@dataclass(frozen=True)
class Share:
    """A part of a stored weight that is an expert's on a rank.

    name: of the tensor, without the layer's prefix; place: of the matrix in it, None where it is no stack. rows,
    columns: of that matrix. expert: whose it is. half: which of gate and up, None for down.
    """

    name: str
    place: int | None
    rows: range
    columns: range
    expert: int
    half: int | None = None

    def read(self, read: Callable[[str, slice, slice], Tensor]) -> Tensor:
        """Read it; `read` is given a name, and rows and columns as TensorSource.read has them."""
        rows, columns = (slice(part.start, part.stop) for part in (self.rows, self.columns))
        if self.place is None:
            return read(self.name, rows, columns)
        return read(self.name, slice(self.place, self.place + 1), rows)[0][:, columns]

    def target(self, gate_up: Tensor, down: Tensor, part: Tensor, halves: int) -> Tensor:
        """Where it goes in the weights of all experts `[E, halves * rows, ...]` and `[E, ..., columns]`, or in their
        scales; part: what is to go there."""
        if self.half is None:
            return down[self.expert, :, : part.shape[1]]
        begin = self.half * (gate_up.shape[1] // halves)
        return gate_up[self.expert, begin : begin + part.shape[0]]

    def scales(self, reader: LayerReader, blocks: Blocks) -> Tensor:
        """Read the scales of its blocks, of a share that stays in FP8: fp32 `[blocks of rows, blocks of columns]`."""
        fp8 = reader.fp8(self.name)
        assert fp8 is not None
        scales = fp8.read_scales()
        return blocks.of(scales if self.place is None else scales[self.place])


def fp8_blocks(reader: LayerReader, ranks: Sequence[Sequence[Share]]) -> dict[Share, Blocks] | None:
    """Return the blocks of each of this rank's shares, which stay in FP8; ranks: the shares of all of them.

    None where they don't, on any rank: a weight is not in FP8, or a rank has parts of blocks.
    """
    own = ranks[reader.placement.rank]
    sizes = dict[str, tuple[int, int]]()
    for name in dict.fromkeys(share.name for share in own):
        fp8 = reader.fp8(name)
        if fp8 is None:
            return None
        sizes[name] = fp8.block
    found = dict[tuple[range, range, tuple[int, int]], Blocks]()
    for share in (share for shares in ranks for share in shares):
        key = share.rows, share.columns, sizes[share.name]
        if key not in found:
            rows, columns = (whole_blocks(torch.tensor(part), size) for part, size in zip(key[:2], key[2], strict=True))
            if rows is None or columns is None:
                return None
            found[key] = Blocks(rows, columns)
    return {share: found[share.rows, share.columns, sizes[share.name]] for share in own}
