"""The tensors of one layer, read for one rank: its rows and columns, in the order in which they are served."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import TensorSource
from deltaline_server.checkpoints.modules import ALL, Module, Packed, Placement, whole_sections
from deltaline_server.ranks.ways import Ranks


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

    def projection(self, packed: Packed) -> Tensor:
        """Load the modules of a served projection `[out, in]`, their rows one after the other, in the model's dtype."""
        place = self.placement
        parts = []
        for module in self._modules:
            if module.packed is packed:
                read = partial(self.read, f"{module.name}.weight", columns=module.columns_of(place))
                parts.append(module.order(read, place))
        return self._put(torch.cat(parts))

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

    def _put(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor on the device, contiguous, in `dtype` or the model's, sharing no memory with a file."""
        place = self.placement
        return tensor.to(place.device, dtype or place.dtype, copy=True).contiguous()
