"""The Mamba2 family: what a checkpoint holds for such a mixer, its weights and its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows, causal_conv1d, gated_rms_norm, mamba2
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.layers.projection import Projection
from deltaline_server.layers.shapes import Mamba2Shape
from deltaline_server.layers.state_pool import LayerState

NAME = "mixer."


@dataclass(frozen=True)
class Mamba2Weights:
    """A Mamba2 mixer, one rank's share of its groups.

    in_proj `[2*H*P + 2*G*S + H, hidden]`: rows z | x | B | C | dt. conv `[W, D]`. out_proj `[hidden, H*P]`.
    A_log, D, dt_bias `[H]` and norm `[norm groups, channels of one]` are fp32; the others have the model's dtype.
    The biases in_bias, conv_bias `[D]` and out_bias are None where the checkpoint has none; out_bias is None on all
    ranks but the first.
    """

    in_proj: Tensor
    in_bias: Tensor | None
    conv: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Tensor
    out_bias: Tensor | None


class Mamba2:
    """A Mamba2 mixer: project, convolve, run the recurrence, gate and norm, project back.

    With shared heads its output is one rank's summand.
    """

    def __init__(
        self, shape: Mamba2Shape, weights: Mamba2Weights, eps: float, adapters: Mapping[Packed, LoraWeights]
    ) -> None:
        self._shape = shape
        self._in_proj = Projection(weights.in_proj, adapters.get(Packed.IN_PROJ), weights.in_bias)
        self._out_proj = Projection(weights.out_proj, adapters.get(Packed.OUT_PROJ), weights.out_bias)
        self._conv, self._conv_bias = weights.conv, weights.conv_bias
        self._A_log, self._D, self._dt_bias = weights.A_log, weights.D, weights.dt_bias
        self._norm, self._eps = weights.norm, eps
        self._sections = (shape.values, shape.conv_channels, shape.num_heads)

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        shape = self._shape
        z, xBC, dt = self._in_proj(hidden, tiles).split(self._sections, dim=-1)
        xBC = causal_conv1d(xBC, self._conv, self._conv_bias, state.conv, rows)
        y = mamba2(
            xBC,
            dt,
            self._A_log,
            self._D,
            self._dt_bias,
            state.recurrent,
            state.drafts,
            rows,
            num_groups=shape.num_groups,
            dt_limit=shape.dt_limit,
        )
        y, z = (part.unflatten(-1, self._norm.shape) for part in (y.flatten(1), z))
        return self._out_proj(gated_rms_norm(y, z, self._norm, self._eps, gate_first=True), tiles)


@dataclass(frozen=True)
class Mamba2Family:
    """The Mamba2 mixers of a model: one shape, the whole layer's."""

    shape: Mamba2Shape
    hidden_size: int
    eps: float

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of a mixer. The rows of in_proj are z | x | B | C | dt."""
        shape, hidden = self.shape, self.hidden_size
        rows = (shape.values, shape.values, shape.keys, shape.keys, shape.num_heads)
        return (
            Module(NAME + "in_proj", Packed.IN_PROJ, sum(rows), hidden, rows),
            Module(NAME + "out_proj", Packed.OUT_PROJ, hidden, shape.values, (hidden,), shares_columns=True),
        )

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a mixer's other tensors, as they are stored."""
        shape = self.shape
        tensors: dict[str, tuple[int, ...]] = {
            NAME + "conv1d.weight": (shape.conv_channels, 1, shape.conv_width),
            NAME + "A_log": (shape.num_heads,),
            NAME + "D": (shape.num_heads,),
            NAME + "dt_bias": (shape.num_heads,),
            NAME + "norm.weight": (shape.values,),
        }
        if shape.has_conv_bias:
            tensors[NAME + "conv1d.bias"] = (shape.conv_channels,)
        if shape.has_bias:
            tensors |= {f"{module.name}.bias": (module.rows,) for module in self.modules}
        return tensors

    def weights(self, reader: LayerReader) -> Mamba2Weights:
        """Load a mixer."""
        shape = self.shape
        channels, heads = (shape.values, shape.keys, shape.keys), shape.num_heads
        norm = reader.share(NAME + "norm.weight", shape.values)
        return Mamba2Weights(
            in_proj=reader.projection(Packed.IN_PROJ),
            in_bias=reader.bias(Packed.IN_PROJ) if shape.has_bias else None,
            conv=reader.sections(NAME + "conv1d.weight", channels).squeeze(1).t().contiguous(),
            conv_bias=reader.sections(NAME + "conv1d.bias", channels) if shape.has_conv_bias else None,
            A_log=reader.share(NAME + "A_log", heads),
            D=reader.share(NAME + "D", heads),
            dt_bias=reader.share(NAME + "dt_bias", heads),
            norm=norm.view(shape.norm_groups // reader.world_size, -1),
            out_proj=reader.projection(Packed.OUT_PROJ),
            out_bias=reader.bias(Packed.OUT_PROJ) if shape.has_bias else None,
        )

    def mixer(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> Mamba2:
        """Load a mixer with these adapters' slots."""
        shape = self.shape.shard(reader.world_size)
        return Mamba2(shape, self.weights(reader), self.eps, adapters)
