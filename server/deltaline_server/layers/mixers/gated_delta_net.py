"""The Gated DeltaNet family: what a checkpoint holds for such a mixer, and its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows, causal_conv1d, gated_delta, gated_rms_norm
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.layers.projection import load_projection
from deltaline_server.layers.shapes import GatedDeltaNetShape
from deltaline_server.layers.state_pool import LayerState

NAME = "linear_attn."


class DeltaLayout(StrEnum):
    """How the input projections of a mixer are stored."""

    TOGETHER = "together"
    """q, k and v as one, z, b and a."""
    INTERLEAVED = "interleaved"
    """qkvz and ba, each by key head."""
    APART = "apart"
    """q, k, v, z, b and a."""


class GatedDeltaNet:
    """A Gated DeltaNet mixer, one rank's share of its heads: project, convolve, run the gated delta rule, norm and
    gate, project back.

    The rows of in_proj are q | k | v | z | b | a. conv `[W, D]`.
    A_log, dt_bias `[HV]` and norm `[V]` are fp32; the others have the model's dtype.
    """

    def __init__(
        self, family: GatedDeltaNetFamily, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]
    ) -> None:
        """Load it. Raises ModelError if its heads can't be shared out."""
        whole, self._eps = family.shape, family.eps
        self._shape = shape = whole.shard(reader.placement.world_size)
        self._sections = (shape.conv_channels, shape.value_channels, shape.num_value_heads, shape.num_value_heads)
        self.in_proj = load_projection(reader, Packed.IN_PROJ, adapters)
        channels = (whole.key_channels, whole.key_channels, whole.value_channels)
        self.conv = reader.sections(NAME + "conv1d.weight", channels).squeeze(1).t().contiguous()
        self.A_log, self.dt_bias = (reader.share(NAME + name, whole.num_value_heads) for name in ("A_log", "dt_bias"))
        self.norm = reader.vector(NAME + family.norm)
        self.out_proj = load_projection(reader, Packed.OUT_PROJ, adapters)

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        shape = self._shape
        qkv, z, b, a = self.in_proj(hidden, tiles).split(self._sections, dim=-1)
        qkv = causal_conv1d(qkv, self.conv, None, state.conv, rows)
        if shape.doubles_updates:  # so the kernels are given decays and strengths themselves
            a, b = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias), 2.0 * b.float().sigmoid()
        o = gated_delta(
            qkv,
            a,
            b,
            None if shape.doubles_updates else self.A_log,
            None if shape.doubles_updates else self.dt_bias,
            state.recurrent,
            state.drafts,
            rows,
            num_key_heads=shape.num_key_heads,
        )
        z = z.unflatten(-1, (shape.num_value_heads, shape.value_dim))
        return self.out_proj(gated_rms_norm(o, z, self.norm, self._eps), tiles)


@dataclass(frozen=True)
class GatedDeltaNetFamily:
    """The Gated DeltaNet mixers of a model: one shape, the whole layer's.

    eps: of the gated norm.
    """

    shape: GatedDeltaNetShape
    hidden_size: int
    eps: float
    layout: DeltaLayout

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of a mixer. The rows of in_proj are q | k | v | z | b | a."""
        shape, hidden = self.shape, self.hidden_size
        keys, values, heads = shape.key_channels, shape.value_channels, shape.num_value_heads
        out_name = "o_proj" if self.layout is DeltaLayout.APART else "out_proj"
        out_proj = Module(NAME + out_name, Packed.OUT_PROJ, hidden, values, (hidden,), shares_columns=True)
        if self.layout is DeltaLayout.APART:
            rows = {"q": keys, "k": keys, "v": values, "g": values, "b": heads, "a": heads}
            inputs = (Module(f"{NAME}{part}_proj", Packed.IN_PROJ, n, hidden, (n,)) for part, n in rows.items())
            return *inputs, out_proj
        if self.layout is DeltaLayout.TOGETHER:
            return (
                Module(NAME + "in_proj_qkv", Packed.IN_PROJ, 2 * keys + values, hidden, (keys, keys, values)),
                Module(NAME + "in_proj_z", Packed.IN_PROJ, values, hidden, (values,)),
                Module(NAME + "in_proj_b", Packed.IN_PROJ, heads, hidden, (heads,)),
                Module(NAME + "in_proj_a", Packed.IN_PROJ, heads, hidden, (heads,)),
                out_proj,
            )
        # For each key head its q | k | v | z, and its b | a.
        group = shape.num_value_heads // shape.num_key_heads
        group_values = group * shape.value_dim
        qkvz = (shape.key_dim, shape.key_dim, group_values, group_values)
        ba = (group, group)
        groups = shape.num_key_heads
        return (
            Module(NAME + "in_proj_qkvz", Packed.IN_PROJ, groups * sum(qkvz), hidden, qkvz, groups),
            Module(NAME + "in_proj_ba", Packed.IN_PROJ, groups * sum(ba), hidden, ba, groups),
            out_proj,
        )

    @property
    def norm(self) -> str:
        """The name of the gated norm's weight in the mixer."""
        return "o_norm.weight" if self.layout is DeltaLayout.APART else "norm.weight"

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a mixer's other tensors, as they are stored."""
        shape = self.shape
        return {
            NAME + "conv1d.weight": (shape.conv_channels, 1, shape.conv_width),
            NAME + "A_log": (shape.num_value_heads,),
            NAME + "dt_bias": (shape.num_value_heads,),
            NAME + self.norm: (shape.value_dim,),
        }

    def mixer(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> GatedDeltaNet:
        """Load a mixer with the device's memory of these adapters."""
        return GatedDeltaNet(self, reader, adapters)
