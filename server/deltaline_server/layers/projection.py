"""A projection: the product with a weight matrix, in the form that is fastest on its device, and what adapters add."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, add_lora
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Packed
from deltaline_server.ranks.ways import Ranks

# oneDNN lays a weight out for products of so many rows; those of more take no longer with it.
FEW_ROWS = 16


class Projection:
    """x @ weight.T for x `[T, in]` and a weight `[out, in]`, the adapters of the tokens that have one, and a bias.

    Where ranks share its columns it is the sum of their products, each with what adapters add to it; without `ranks`,
    this rank's summand.

    On the CPU in fp32 the weight is laid out once for oneDNN's products of few rows, which are faster than those of the
    BLAS behind torch.nn.functional.linear; elsewhere that function is used as it is. The operation is the one that
    torch.compile calls for packed weights: x and the result are plain tensors, which F.linear would copy.
    """

    def __init__(
        self,
        weight: Tensor,
        adapters: LoraWeights | None = None,
        bias: Tensor | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """adapters: the device's memory of them, None where no batch has any. bias: `[out]`, None for none. ranks: what
        sums over them."""
        is_packed = (
            weight.device.type == "cpu"
            and weight.dtype is torch.float32
            and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        )
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS) if is_packed else weight
        self._adapters = adapters
        self.bias, self._ranks = bias, ranks

    def __call__(self, x: Tensor, tiles: AdapterTiles | None = None) -> Tensor:
        """Project x `[T, in]` to `[T, out]`; tiles: the tokens that have adapters, None where none has."""
        y: Tensor
        if self.weight.is_mkldnn:
            y = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        else:
            y = F.linear(x, self.weight)
        if tiles is not None:
            assert self._adapters is not None
            add_lora(x, y, self._adapters, tiles)
        # Behind the adapters, as DoRA scales what came before; always, so that a row's bits do not depend on others.
        y = y if self.bias is None else y.add_(self.bias)
        return y if self._ranks is None else self._ranks.sum(y)


def scaled(x: Tensor, scale: float) -> Tensor:
    """x times a model's constant, in its dtype; x itself where that is 1."""
    return x if scale == 1.0 else x * scale


def load_projection(
    reader: LayerReader, packed: Packed, adapters: Mapping[Packed, LoraWeights], *, has_bias: bool = False
) -> Projection:
    """Load a projection of the reader's layer; of its bias, see LayerReader.bias."""
    bias = reader.bias(packed) if has_bias else None
    return Projection(reader.projection(packed), adapters.get(packed), bias, reader.ranks(packed))
