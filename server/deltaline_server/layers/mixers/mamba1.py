"""The Mamba-1 family: what a checkpoint holds for such a mixer, and its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows, causal_conv1d, mamba1, rms_norm
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.layers.projection import Projection, load_projection
from deltaline_server.layers.shapes import Mamba1Shape
from deltaline_server.layers.state_pool import LayerState

# Of the norms, where they have weights: in the order of the second projection's parts.
NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class Mamba1:
    """A Mamba-1 mixer, one rank's share of its channels: project, convolve, project to time steps, B and C, run the
    recurrence with its gate, project back.

    The rows of in_proj are x | z, those of x_proj dt | B | C, whose sums over all channels every rank has. conv
    `[W, D]` and its bias, None where the checkpoint has none, have the model's dtype. A_log `[D, S]`, D, dt_bias `[D]`
    and the norms are fp32.
    """

    def __init__(self, family: Mamba1Family, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> None:
        """Load it. Raises ModelError if its channels can't be shared out."""
        whole, name, place = family.shape, family.name, reader.placement
        channels = whole.value_channels
        self._shape = whole.shard(place.world_size)
        self.in_proj = load_projection(reader, Packed.IN_PROJ, adapters, has_bias=whole.has_bias)
        self.conv = reader.sections(name + "conv1d.weight", (channels,)).squeeze(1).t().contiguous()
        self.conv_bias = reader.sections(name + "conv1d.bias", (channels,)) if whole.has_conv_bias else None
        packed = Packed.STEP_AND_KEYS
        # Summed where it is, whatever becomes of the layer's last projection.
        self.x_proj = Projection(reader.projection(packed), adapters.get(packed), ranks=place.ranks)
        self.norms: list[Tensor] = []
        if whole.norm_eps:
            sizes = zip(NORMS, whole.projected, strict=True)
            self.norms = [
                reader.vector(f"{name}{norm}.weight")
                if whole.has_norm_weights
                else torch.ones(size, device=place.device)
                for norm, size in sizes
            ]
        self.dt_proj = load_projection(reader, Packed.STEP, adapters)
        self.A_log, self.D, self.dt_bias = (
            reader.share(name + weight, channels) for weight in ("A_log", "D", "dt_proj.bias")
        )
        self.out_proj = load_projection(reader, Packed.OUT_PROJ, adapters, has_bias=whole.has_bias)

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        shape = self._shape
        x, z = self.in_proj(hidden, tiles).split(shape.value_channels, dim=-1)
        x = causal_conv1d(x, self.conv, self.conv_bias, state.conv, rows)
        step, keys = self.x_proj(x, tiles).split((shape.step_rank, 2 * shape.key_dim), dim=-1)
        if self.norms:
            parts = (step, *keys.split(shape.key_dim, dim=-1))
            step, B, C = (
                rms_norm(part, weight, shape.norm_eps) for part, weight in zip(parts, self.norms, strict=True)
            )
            keys = torch.cat((B, C), dim=-1)
        dt = self.dt_proj(step, tiles)
        lines = state.recurrent.flatten(1, 2)
        y = mamba1(x, dt, keys, z, self.A_log, self.D, self.dt_bias, lines, state.drafts, rows)
        return self.out_proj(y, tiles)


@dataclass(frozen=True)
class Mamba1Family:
    """The Mamba-1 mixers of a model: one shape, the whole layer's. name: what stands before the names of tensors."""

    shape: Mamba1Shape
    hidden_size: int
    name: str

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of a mixer. The rows of in_proj are x | z, those of x_proj dt | B | C."""
        shape, hidden, name = self.shape, self.hidden_size, self.name
        channels, parts = shape.value_channels, shape.projected
        return (
            Module(name + "in_proj", Packed.IN_PROJ, 2 * channels, hidden, (channels,) * 2),
            Module(name + "x_proj", Packed.STEP_AND_KEYS, sum(parts), channels, parts, shares_columns=True),
            Module(name + "dt_proj", Packed.STEP, channels, shape.step_rank, (channels,)),
            Module(name + "out_proj", Packed.OUT_PROJ, hidden, channels, (hidden,), shares_columns=True),
        )

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a mixer's other tensors, as they are stored."""
        shape, name = self.shape, self.name
        channels = shape.value_channels
        tensors: dict[str, tuple[int, ...]] = {
            name + "conv1d.weight": (channels, 1, shape.conv_width),
            name + "A_log": (channels, shape.key_dim),
            name + "D": (channels,),
            name + "dt_proj.bias": (channels,),
        }
        if shape.has_conv_bias:
            tensors[name + "conv1d.bias"] = (channels,)
        if shape.has_norm_weights:
            tensors |= {f"{name}{norm}.weight": (size,) for norm, size in zip(NORMS, shape.projected, strict=True)}
        if shape.has_bias:
            tensors |= {name + "in_proj.bias": (2 * channels,), name + "out_proj.bias": (self.hidden_size,)}
        return tensors

    def mixer(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> Mamba1:
        """Load a mixer with the device's memory of these adapters."""
        return Mamba1(self, reader, adapters)
