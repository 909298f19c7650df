"""The short convolution family: what a checkpoint holds for such a mixer, and its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows, causal_conv1d
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.layers.projection import load_projection
from deltaline_server.layers.shapes import ShortConvShape
from deltaline_server.layers.state_pool import LayerState

NAME = "conv."


class ShortConv:
    """A gated short convolution, one rank's share of its channels: project, gate, convolve, gate, project back.

    The rows of in_proj are B | C | x. conv `[W, D]` and its bias, None where the checkpoint has none, have the model's
    dtype.
    """

    def __init__(self, family: ShortConvFamily, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> None:
        """Load it. Raises ModelError if its channels can't be shared out."""
        shape, channels = family.shape, (family.shape.conv_channels,)
        self._share = shape.shard(reader.placement.world_size).conv_channels
        self.in_proj = load_projection(reader, Packed.IN_PROJ, adapters, has_bias=shape.has_bias)
        self.conv = reader.sections(NAME + "conv.weight", channels).squeeze(1).t().contiguous()
        self.conv_bias = reader.sections(NAME + "conv.bias", channels) if shape.has_bias else None
        self.out_proj = load_projection(reader, Packed.OUT_PROJ, adapters, has_bias=shape.has_bias)

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`, out_proj(C * conv(B * x)); mutates the conv lines of `state`.

        As Lfm2ShortConv of transformers computes it, each product rounded to the model's dtype.
        """
        B, C, x = self.in_proj(hidden, tiles).split(self._share, dim=-1)
        y = causal_conv1d(B * x, self.conv, self.conv_bias, state.conv, rows, activation=None)
        return self.out_proj(y.mul_(C), tiles)


@dataclass(frozen=True)
class ShortConvFamily:
    """The short convolutions of a model: one shape, the whole layer's."""

    shape: ShortConvShape
    hidden_size: int

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of a mixer. The rows of in_proj are B | C | x."""
        hidden, channels = self.hidden_size, self.shape.conv_channels
        return (
            Module(NAME + "in_proj", Packed.IN_PROJ, 3 * channels, hidden, (channels,) * 3),
            Module(NAME + "out_proj", Packed.OUT_PROJ, hidden, channels, (hidden,), shares_columns=True),
        )

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a mixer's other tensors, as they are stored."""
        shape = self.shape
        tensors: dict[str, tuple[int, ...]] = {NAME + "conv.weight": (shape.conv_channels, 1, shape.conv_width)}
        if shape.has_bias:
            tensors[NAME + "conv.bias"] = (shape.conv_channels,)
            tensors |= {f"{module.name}.bias": (module.rows,) for module in self.modules}
        return tensors

    def mixer(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> ShortConv:
        """Load a mixer with the device's memory of these adapters."""
        return ShortConv(self, reader, adapters)
