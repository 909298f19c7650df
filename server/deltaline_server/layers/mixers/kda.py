"""The KDA family (Kimi Delta Attention): what a checkpoint holds for such a mixer, and its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows, causal_conv1d, gated_rms_norm, kda
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.layers.projection import load_projection
from deltaline_server.layers.shapes import KdaShape
from deltaline_server.layers.state_pool import LayerState

NAME = "self_attn."
CONVOLUTIONS = tuple(f"{NAME}{part}_conv1d.weight" for part in "qkv")


class Kda:
    """A KDA mixer, one rank's share of its heads: project, convolve, run the delta rule, norm and gate, project back.

    The rows of in_proj are q | k | v | b | f_a | g_a; of the decays' and the output gate's low ranks f_a and g_a every
    rank has all. conv `[W, D]`. A_log `[H]`, dt_bias `[H*K]` and norm `[V]` are fp32; the others have the model's
    dtype.
    """

    def __init__(self, family: KdaFamily, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> None:
        """Load it. Raises ModelError if its heads can't be shared out."""
        whole, place, self._eps = family.shape, reader.placement, family.eps
        self._shape = shape = whole.shard(place.world_size)
        self._sections = (shape.conv_channels, shape.num_value_heads, shape.gate_rank, shape.gate_rank)
        self.in_proj = load_projection(reader, Packed.IN_PROJ, adapters)
        parts = [reader.sections(name, (whole.key_channels,)) for name in CONVOLUTIONS]
        self.conv = torch.cat(parts).squeeze(1).t().contiguous()
        self.decay_proj = load_projection(reader, Packed.DECAY, adapters)
        self.gate_proj = load_projection(reader, Packed.OUT_GATE, adapters)
        rates = reader.vector(NAME + "A_log").flatten()  # stored in as many dimensions as decays have, or in one
        self.A_log = rates[place.share(whole.num_value_heads)].contiguous()
        self.dt_bias = reader.share(NAME + "dt_bias", whole.key_channels)
        self.norm = reader.vector(NAME + "o_norm.weight")
        self.out_proj = load_projection(reader, Packed.OUT_PROJ, adapters)

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        shape = self._shape
        qkv, b, low_decay, low_gate = self.in_proj(hidden, tiles).split(self._sections, dim=-1)
        qkv = causal_conv1d(qkv, self.conv, None, state.conv, rows)
        o = kda(
            qkv,
            self.decay_proj(low_decay, tiles),
            b,
            self.A_log,
            self.dt_bias,
            state.recurrent,
            state.drafts,
            rows,
            num_key_heads=shape.num_key_heads,
            lower_bound=shape.lower_bound,
        )
        z = self.gate_proj(low_gate, tiles).unflatten(-1, (shape.num_value_heads, shape.value_dim))
        return self.out_proj(gated_rms_norm(o, z, self.norm, self._eps, activation="sigmoid"), tiles)


@dataclass(frozen=True)
class KdaFamily:
    """The KDA mixers of a model: one shape, the whole layer's.

    eps: of the gated norm. has_wide_rates: whether A_log is stored as `[1, 1, H, 1]`, else as `[H]`.
    """

    shape: KdaShape
    hidden_size: int
    eps: float
    has_wide_rates: bool = False

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of a mixer. The rows of in_proj are q | k | v | b | f_a | g_a."""
        shape, hidden = self.shape, self.hidden_size
        channels, heads, rank = shape.value_channels, shape.num_value_heads, shape.gate_rank
        rows = {"q": channels, "k": channels, "v": channels, "b": heads}
        return (
            *(Module(f"{NAME}{part}_proj", Packed.IN_PROJ, n, hidden, (n,)) for part, n in rows.items()),
            *(Module(f"{NAME}{part}_a_proj", Packed.IN_PROJ, rank, hidden, (rank,), is_whole=True) for part in "fg"),
            Module(NAME + "f_b_proj", Packed.DECAY, channels, rank, (channels,)),
            Module(NAME + "g_b_proj", Packed.OUT_GATE, channels, rank, (channels,)),
            Module(NAME + "o_proj", Packed.OUT_PROJ, hidden, channels, (hidden,), shares_columns=True),
        )

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a mixer's other tensors, as they are stored."""
        shape = self.shape
        heads = shape.num_value_heads
        return {
            **dict.fromkeys(CONVOLUTIONS, (shape.key_channels, 1, shape.conv_width)),
            NAME + "A_log": (1, 1, heads, 1) if self.has_wide_rates else (heads,),
            NAME + "dt_bias": (shape.key_channels,),
            NAME + "o_norm.weight": (shape.value_dim,),
        }

    def mixer(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> Kda:
        """Load a mixer with the device's memory of these adapters."""
        return Kda(self, reader, adapters)
