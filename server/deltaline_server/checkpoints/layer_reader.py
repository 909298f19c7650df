"""The tensors of one layer, read for one rank: its rows and columns, in the order in which they are served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deltaline_kernels import FP8_BLOCK, pack_fp8
from deltaline_server.checkpoints.checkpoint import StoredFp8, TensorSource
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.fp8.held import Blocks, Fp8Weight, served_blocks
from deltaline_server.checkpoints.modules import ALL, Module, Packed, Placement, whole_sections
from deltaline_server.ranks.ways import Ranks


@dataclass(frozen=True)
class Piece:
    """Rows of a served projection that are multiplied at once: their number, their columns, and the modules that they
    are of. blocks: of each module that stays in FP8, None of the others; all of a piece do, or none."""

    rows: int
    columns: int
    modules: tuple[Module, ...]
    blocks: tuple[Blocks | None, ...]

    @property
    def in_fp8(self) -> bool:
        return self.blocks[0] is not None

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weight, of a piece that is not in FP8 in this dtype."""
        if not self.in_fp8:
            return self.rows * self.columns * dtype.itemsize
        blocks = -(-self.columns // FP8_BLOCK)
        scales = -(-self.rows // FP8_BLOCK) * blocks
        # Rows are packed in whole blocks.
        return self.rows * blocks * FP8_BLOCK + scales * torch.float32.itemsize


class LayerReader:
    """Reads tensors of the layer whose names begin with `prefix`; what is loaded shares no memory with a file."""

    def __init__(self, source: TensorSource, prefix: str, modules: Sequence[Module], placement: Placement) -> None:
        """modules: the served ones, those of one projection in the order of its rows."""
        self._source, self._prefix, self._modules, self.placement = source, prefix, modules, placement

    def is_stored(self, name: str) -> bool:
        """Whether the layer has such a tensor."""
        return self._prefix + name in self._source.names

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Read a part of a tensor, as its file has it; it may share memory with the file."""
        return self._source.read(self._prefix + name, rows, columns)

    def fp8(self, name: str) -> StoredFp8 | None:
        """A tensor in e4m3 as it is stored, None where it is not or is not read so."""
        return self._source.info(self._prefix + name).fp8

    def read_fp8(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read the bytes of a part of a tensor that is in e4m3, uint8; it may share memory with the file."""
        fp8 = self.fp8(name)
        assert fp8 is not None
        return fp8.read(rows, columns)

    def pieces(self, packed: Packed) -> list[Piece]:
        """Tell what a served projection is made of: its modules, those that are multiplied at once together.

        Modules that stay in FP8 go on to one whose rows end within a block, the others as far as they go.
        """
        found, is_open = list[Piece](), False
        for module in self._modules:
            if module.packed is not packed:
                continue
            fp8, blocks = self.fp8(f"{module.name}.weight"), None
            if fp8 is not None and not packed.is_taken_apart:
                blocks = served_blocks(module, fp8.block, self.placement)
            rows, columns = module.served_shape(self.placement.world_size)
            if is_open and found[-1].in_fp8 == (blocks is not None):
                last = found.pop()
                found.append(Piece(last.rows + rows, columns, (*last.modules, module), (*last.blocks, blocks)))
            else:
                found.append(Piece(rows, columns, (module,), (blocks,)))
            is_open = blocks is None or rows % FP8_BLOCK == 0
        return found

    def projection(self, packed: Packed) -> list[Tensor | Fp8Weight]:
        """Load the modules of a served projection `[out, in]`, their rows one after the other, in its pieces: those
        that are not in FP8 in the model's dtype."""
        return [self._fp8(piece) if piece.in_fp8 else self._plain(piece) for piece in self.pieces(packed)]

    def bias(self, packed: Packed) -> Tensor | None:
        """Load the biases of a served projection `[out]`, in the model's dtype.

        None on all ranks but the first where the ranks' outputs are summed.
        """
        place = self.placement
        parts = []
        for module in self._modules:
            if module.packed is packed:
                if module.shares_columns and place.rank > 0:
                    return None
                parts.append(module.order(partial(self.read, f"{module.name}.bias"), place))
        return self._put(torch.cat(parts))

    def ranks(self, packed: Packed) -> Ranks | None:
        """Return what sums the outputs of a served projection; None where no rank has but a summand of them."""
        is_summand = any(module.shares_columns for module in self._modules if module.packed is packed)
        return self.placement.summing if is_summand else None

    def weight(self, module: Module) -> Tensor:
        """Read a module's weight, this rank's rows in the served order and all columns, as its file has it."""
        return module.order(partial(self.read, f"{module.name}.weight"), self.placement)

    def sections(self, name: str, sections: Sequence[int], heads: Sequence[int] = ()) -> Tensor:
        """Load this rank's share of sections that are stored one after the other, in the model's dtype.

        heads: as Module has them.
        """
        return self._put(whole_sections(sections, partial(self.read, name), self.placement, heads))

    def share(self, name: str, size: int) -> Tensor:
        """Load this rank's share of a vector `[size]`, fp32."""
        return self._put(self.read(name, self.placement.share(size)), torch.float32)

    def vector(self, name: str) -> Tensor:
        """Load a whole vector, fp32."""
        return self._put(self.read(name), torch.float32)

    def _plain(self, piece: Piece) -> Tensor:
        """Load a piece in the model's dtype."""
        place, parts = self.placement, []
        for module in piece.modules:
            read = partial(self.read, f"{module.name}.weight", columns=module.columns_of(place))
            parts.append(module.order(read, place))
        return self._put(torch.cat(parts))

    def _fp8(self, piece: Piece) -> Fp8Weight:
        """Load a piece that stays in FP8."""
        place, values, scales = self.placement, list[Tensor](), list[Tensor]()
        for module, blocks in zip(piece.modules, piece.blocks, strict=True):
            fp8 = self.fp8(f"{module.name}.weight")
            assert fp8 is not None and blocks is not None
            scales.append(blocks.of(fp8.read_scales()))
            values.append(module.order(partial(fp8.read, columns=module.columns_of(place)), place))
        whole = self._put(torch.cat(values), torch.uint8)
        try:
            words = pack_fp8(whole.view(torch.float8_e4m3fn))
        except ValueError as error:
            bad = next(i for i, part in enumerate(values) if bool((part & 0x7F == 0x7F).any()))
            raise ModelError(f"{self._prefix}{piece.modules[bad].name}.{error}") from error
        return Fp8Weight(words, self._put(torch.cat(scales), torch.float32))

    def _put(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor on the device, contiguous, in `dtype` or the model's, sharing no memory with a file."""
        place = self.placement
        return tensor.to(place.device, dtype or place.dtype, copy=True).contiguous()
