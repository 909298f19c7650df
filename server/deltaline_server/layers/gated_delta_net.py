"""The Gated DeltaNet family: what a checkpoint holds for such a mixer, its weights and its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows, causal_conv1d, gated_delta, gated_rms_norm
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.layers.projection import Projection
from deltaline_server.layers.shapes import GatedDeltaNetShape
from deltaline_server.layers.state_pool import LayerState

NAME = "linear_attn."


@dataclass(frozen=True)
class GatedDeltaNetWeights:
    """A Gated DeltaNet mixer, one rank's share of its heads.

    in_proj `[2*H*K + 2*HV*V + 2*HV, hidden]`: rows q | k | v | z | b | a. conv `[W, D]`. out_proj `[hidden, HV*V]`.
    A_log, dt_bias `[HV]` and norm `[V]` are fp32; the others have the model's dtype.
    """

    in_proj: Tensor
    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Tensor


class GatedDeltaNet:
    """A Gated DeltaNet mixer: project, convolve, run the gated delta rule, norm and gate, project back.

    With shared heads its output is one rank's summand.
    """

    def __init__(
        self,
        shape: GatedDeltaNetShape,
        weights: GatedDeltaNetWeights,
        eps: float,
        adapters: Mapping[Packed, LoraWeights],
    ) -> None:
        self._shape = shape
        self._in_proj = Projection(weights.in_proj, adapters.get(Packed.IN_PROJ))
        self._out_proj = Projection(weights.out_proj, adapters.get(Packed.OUT_PROJ))
        self._conv, self._A_log, self._dt_bias = weights.conv, weights.A_log, weights.dt_bias
        self._norm, self._eps = weights.norm, eps
        heads = shape.num_value_heads
        self._sections = (shape.conv_channels, shape.values, heads, heads)

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        shape = self._shape
        qkv, z, b, a = self._in_proj(hidden, tiles).split(self._sections, dim=-1)
        qkv = causal_conv1d(qkv, self._conv, None, state.conv, rows)
        o = gated_delta(
            qkv,
            a,
            b,
            self._A_log,
            self._dt_bias,
            state.recurrent,
            state.drafts,
            rows,
            num_key_heads=shape.num_key_heads,
        )
        z = z.unflatten(-1, (shape.num_value_heads, shape.value_dim))
        return self._out_proj(gated_rms_norm(o, z, self._norm, self._eps), tiles)


@dataclass(frozen=True)
class GatedDeltaNetFamily:
    """The Gated DeltaNet mixers of a model: one shape, the whole layer's.

    is_interleaved: the input projections are stored as qkvz and ba, each interleaved by key head.
    """

    shape: GatedDeltaNetShape
    hidden_size: int
    eps: float
    is_interleaved: bool

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of a mixer. The rows of in_proj are q | k | v | z | b | a."""
        shape, hidden = self.shape, self.hidden_size
        keys, values, heads = shape.keys, shape.values, shape.num_value_heads
        out_proj = Module(NAME + "out_proj", Packed.OUT_PROJ, hidden, values, (hidden,), shares_columns=True)
        if not self.is_interleaved:
            return (
                Module(NAME + "in_proj_qkv", Packed.IN_PROJ, 2 * keys + values, hidden, (keys, keys, values)),
                Module(NAME + "in_proj_z", Packed.IN_PROJ, values, hidden, (values,)),
                Module(NAME + "in_proj_b", Packed.IN_PROJ, heads, hidden, (heads,)),
                Module(NAME + "in_proj_a", Packed.IN_PROJ, heads, hidden, (heads,)),
                out_proj,
            )
        # For each key head its q | k | v | z, and its b | a.
        group_values = shape.group * shape.value_dim
        qkvz = (shape.key_dim, shape.key_dim, group_values, group_values)
        ba = (shape.group, shape.group)
        groups = shape.num_key_heads
        return (
            Module(NAME + "in_proj_qkvz", Packed.IN_PROJ, groups * sum(qkvz), hidden, qkvz, groups),
            Module(NAME + "in_proj_ba", Packed.IN_PROJ, groups * sum(ba), hidden, ba, groups),
            out_proj,
        )

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a mixer's other tensors, as they are stored."""
        shape = self.shape
        return {
            NAME + "conv1d.weight": (shape.conv_channels, 1, shape.conv_width),
            NAME + "A_log": (shape.num_value_heads,),
            NAME + "dt_bias": (shape.num_value_heads,),
            NAME + "norm.weight": (shape.value_dim,),
        }

    def weights(self, reader: LayerReader) -> GatedDeltaNetWeights:
        """Load a mixer."""
        shape = self.shape
        conv = reader.sections(NAME + "conv1d.weight", (shape.keys, shape.keys, shape.values))
        return GatedDeltaNetWeights(
            in_proj=reader.projection(Packed.IN_PROJ),
            conv=conv.squeeze(1).t().contiguous(),
            A_log=reader.share(NAME + "A_log", shape.num_value_heads),
            dt_bias=reader.share(NAME + "dt_bias", shape.num_value_heads),
            norm=reader.vector(NAME + "norm.weight"),
            out_proj=reader.projection(Packed.OUT_PROJ),
        )

    def mixer(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> GatedDeltaNet:
        """Load a mixer with these adapters' slots."""
        shape = self.shape.shard(reader.world_size)
        return GatedDeltaNet(shape, self.weights(reader), self.eps, adapters)
