"""A projection: the product with a weight matrix, in the form that is fastest on its device, and what adapters add."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, add_lora
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Packed


class Projection:
    """x @ weight.T for x `[T, in]` and a weight `[out, in]`, the adapters of the tokens that have one, and a bias.

    Of a rank's share it is that rank's summand, with what adapters add to it.

    On the CPU in fp32 the weight is laid out once for oneDNN, whose products of few rows take about 0.6 of the time
    that the BLAS behind torch.nn.functional.linear takes; elsewhere that function is used as it is.
    """

    def __init__(self, weight: Tensor, adapters: LoraWeights | None = None, bias: Tensor | None = None) -> None:
        """adapters: the device's memory of them, None where no batch has any. bias: `[out]`, None for none."""
        is_packed = (
            weight.device.type == "cpu" and weight.dtype is torch.float32 and torch.backends.mkldnn.is_available()
        )
        self.weight = weight.to_mkldnn() if is_packed else weight
        self._adapters = adapters
        self.bias = bias

    def __call__(self, x: Tensor, tiles: AdapterTiles | None = None) -> Tensor:
        """Project x `[T, in]` to `[T, out]`; tiles: the tokens that have adapters, None where none has."""
        is_packed = self.weight.is_mkldnn
        y = F.linear(x.to_mkldnn(), self.weight).to_dense() if is_packed else F.linear(x, self.weight)
        if tiles is not None:
            assert self._adapters is not None
            add_lora(x, y, self._adapters, tiles)
        # Behind the adapters, as DoRA scales what came before; always, so that a row's bits do not depend on others.
        return y if self.bias is None else y.add_(self.bias)


def load_projection(
    reader: LayerReader, packed: Packed, adapters: Mapping[Packed, LoraWeights], *, has_bias: bool = False
) -> Projection:
    """Load a projection of the reader's layer; of its bias, see LayerReader.bias."""
    bias = reader.bias(packed) if has_bias else None
    return Projection(reader.projection(packed), adapters.get(packed), bias)
