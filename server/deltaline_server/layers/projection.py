"""A projection: the product with a weight matrix, in the form that is fastest on its device, and what adapters add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, add_lora, linear, multiply_fp8
from deltaline_server.checkpoints.fp8.held import Fp8Weight
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Packed
from deltaline_server.ranks.ways import Ranks

# oneDNN lays a weight out for products of so many rows; those of more take no longer with it.
FEW_ROWS = 16


class Projection:
    """x @ weight.T for x `[T, in]` and a weight `[out, in]`, the adapters of the tokens that have one, and a bias.

    The weight's rows are in one piece or in several; a piece may stay in FP8. Where ranks share its columns it is the
    sum of their products, each with what adapters add to it; without `ranks`, this rank's summand.

    On the CPU in fp32 a weight that is not in FP8 is laid out once for oneDNN's products of few rows, which are faster
    than those of the BLAS behind `linear`. The operation is the one that torch.compile calls for packed weights: x and
    the result are plain tensors, which torch.nn.functional.linear would copy.
    """

    def __init__(
        self,
        weights: Sequence[Tensor | Fp8Weight],
        adapters: LoraWeights | None = None,
        bias: Tensor | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """weights: the pieces. adapters: the device's memory of them, None where no batch has any. bias: `[out]`, None
        for none. ranks: what sums over them."""
        self.weights = [one if isinstance(one, Fp8Weight) else _laid_out(one) for one in weights]
        self._sizes = [len(one.words if isinstance(one, Fp8Weight) else one) for one in weights]
        first = self.weights[0]
        self._whole = first if len(weights) == 1 and isinstance(first, Tensor) else None
        self._adapters = adapters
        self.bias, self._ranks = bias, ranks

    def __call__(self, x: Tensor, tiles: AdapterTiles | None = None) -> Tensor:
        """Project x `[T, in]` to `[T, out]`; tiles: the tokens that have adapters, None where none has."""
        y: Tensor
        if self._whole is None:
            y = self._multiply_pieces(x)
        elif self._whole.is_mkldnn:
            y = torch.ops.mkldnn._linear_pointwise(x, self._whole, None, "none", [], "")
        else:
            y = linear(x, self._whole)
        if tiles is not None:
            assert self._adapters is not None
            add_lora(x, y, self._adapters, tiles)
        # Behind the adapters, as DoRA scales what came before; always, so that a row's bits do not depend on others.
        y = y if self.bias is None else y.add_(self.bias)
        return y if self._ranks is None else self._ranks.sum(y)

    def _multiply_pieces(self, x: Tensor) -> Tensor:
        """Return x @ weight.T, its columns one piece after the other."""
        y = x.new_empty(x.shape[0], sum(self._sizes))
        for weight, part in zip(self.weights, y.split(self._sizes, dim=1), strict=True):
            if isinstance(weight, Fp8Weight):
                multiply_fp8(x, weight.words, weight.scales, part)
            elif weight.is_mkldnn:
                part.copy_(torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
            else:
                torch.mm(x, weight.t(), out=part)
        return y


def _laid_out(weight: Tensor) -> Tensor:
    """Return a weight in the form in which it is multiplied."""
    is_packed = (
        weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS) if is_packed else weight
    return laid_out


def scaled(x: Tensor, scale: float) -> Tensor:
    """x times a model's constant, in its dtype; x itself where that is 1."""
    return x if scale == 1.0 else x * scale


def load_projection(
    reader: LayerReader, packed: Packed, adapters: Mapping[Packed, LoraWeights], *, has_bias: bool = False
) -> Projection:
    """Load a projection of the reader's layer; of its bias, see LayerReader.bias."""
    bias = reader.bias(packed) if has_bias else None
    return Projection(reader.projection(packed), adapters.get(packed), bias, reader.ranks(packed))
