"""The Mamba2 family: what a checkpoint holds for such a mixer, and its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows, causal_conv1d, gated_rms_norm, mamba2
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.layers.projection import load_projection, scaled
from deltaline_server.layers.shapes import Mamba2Shape
from deltaline_server.layers.state_pool import LayerState
from deltaline_server.ranks.ways import Ranks, added


class Mamba2:
    """A Mamba2 mixer, one rank's share of its heads: project, convolve, run the recurrence, gate and norm, project
    back.

    Of fewer groups than ranks several have the same one. The rows of in_proj are z | x | B | C | dt. conv `[W, D]`.
    A_log, D, dt_bias `[H]`, norm `[norm groups, channels of one]` and the scales of in_proj's rows are fp32; the others
    have the model's dtype. Biases, norm and scales are None where the checkpoint has none.
    """

    def __init__(self, family: Mamba2Family, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> None:
        """Load it. Raises ModelError if its heads can't be shared out."""
        whole, self._eps = family.shape, family.eps
        channels = (whole.value_channels, whole.key_channels, whole.key_channels)
        heads = (whole.num_value_heads, whole.num_key_heads, whole.num_key_heads)
        place = reader.placement
        self._shape = shape = whole.shard(place.world_size)
        self._sections = (shape.value_channels, shape.conv_channels, shape.num_value_heads)
        has_bias, has_out_bias = shape.biases
        self.in_proj = load_projection(reader, Packed.IN_PROJ, adapters, has_bias=has_bias)
        self._scales = None if shape.section_scales is None else _row_scales(shape, place.device)
        self.conv = reader.sections(family.name + "conv1d.weight", channels, heads).squeeze(1).t().contiguous()
        self.conv_bias = reader.sections(family.name + "conv1d.bias", channels, heads) if shape.has_conv_bias else None
        self.A_log, self.D, self.dt_bias = (
            reader.share(f"{family.name}{name}", whole.num_value_heads) for name in ("A_log", "D", "dt_bias")
        )
        self.norm: Tensor | None = None
        if shape.norm_groups:
            self.norm = reader.share(family.name + "norm.weight", whole.value_channels).view(shape.norm_groups, -1)
        # Ranks that have a part of one group of the norm, where there are several.
        self._ranks, self._norm_ranks = place.ranks, max(place.world_size // max(whole.norm_groups, 1), 1)
        self.out_proj = load_projection(reader, Packed.OUT_PROJ, adapters, has_bias=has_out_bias)

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        shape = self._shape
        projected = self.in_proj(scaled(hidden, shape.input_scale), tiles)
        if self._scales is not None:
            projected.mul_(self._scales)
        z, xBC, dt = projected.split(self._sections, dim=-1)
        xBC = causal_conv1d(xBC, self.conv, self.conv_bias, state.conv, rows)
        y = mamba2(
            xBC,
            dt,
            self.A_log,
            self.D,
            self.dt_bias,
            state.recurrent,
            state.drafts,
            rows,
            num_groups=shape.num_key_heads,
            dt_limit=shape.dt_limit,
        )
        return scaled(self.out_proj(self._gated(y.flatten(1), z), tiles), shape.output_scale)

    def _gated(self, y: Tensor, z: Tensor) -> Tensor:
        """Gate y `[T, D]` by silu(z), and norm it."""
        if self.norm is None:
            return F.silu(z).mul_(y)
        y, z = (part.unflatten(-1, self.norm.shape) for part in (y, z))
        gate_first = not self._shape.norms_first
        if self._norm_ranks == 1:
            return gated_rms_norm(y, z, self.norm, self._eps, gate_first=gate_first)
        assert self._ranks is not None
        return spread_norm(y, z, self.norm, self._eps, self._ranks, self._norm_ranks, gate_first=gate_first)


def spread_norm(
    y: Tensor, z: Tensor, weight: Tensor, eps: float, ranks: Ranks, parts: int, *, gate_first: bool = True
) -> Tensor:
    """Gate and norm y `[T, 1, D]` as gated_rms_norm does, to `[T, D]`.

    parts: ranks that have D channels each of one group of the norm.
    """
    gate, own = F.silu(z.float()), y.float()
    if gate_first:
        own, gate = own * gate, torch.ones_like(gate)
    squares = ranks.gather(own.square().sum(-1, keepdim=True))
    first = ranks.rank // parts * parts
    mean = added(squares[first : first + parts]) / (parts * weight.shape[-1])
    return (own * torch.rsqrt(mean + eps) * weight * gate).to(y.dtype).flatten(1)


def _row_scales(shape: Mamba2Shape, device: torch.device) -> Tensor:
    """What the rows of in_proj are multiplied by, fp32."""
    assert shape.section_scales is not None
    parts = (torch.full((count,), scale) for count, scale in zip(shape.projected, shape.section_scales, strict=True))
    return torch.cat(list(parts)).to(device)


@dataclass(frozen=True)
class Mamba2Family:
    """The Mamba2 mixers of a model: one shape, the whole layer's. name: what stands before the names of tensors."""

    shape: Mamba2Shape
    hidden_size: int
    eps: float
    name: str

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of a mixer. The rows of in_proj are z | x | B | C | dt."""
        shape, hidden, name, rows = self.shape, self.hidden_size, self.name, self.shape.projected
        heads = (shape.num_value_heads,) * 2 + (shape.num_key_heads,) * 2 + (shape.num_value_heads,)
        return (
            Module(name + "in_proj", Packed.IN_PROJ, sum(rows), hidden, rows, heads=heads),
            Module(name + "out_proj", Packed.OUT_PROJ, hidden, shape.value_channels, (hidden,), shares_columns=True),
        )

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a mixer's other tensors, as they are stored."""
        shape, name = self.shape, self.name
        tensors: dict[str, tuple[int, ...]] = {
            name + "conv1d.weight": (shape.conv_channels, 1, shape.conv_width),
            name + "A_log": (shape.num_value_heads,),
            name + "D": (shape.num_value_heads,),
            name + "dt_bias": (shape.num_value_heads,),
        }
        if shape.norm_groups:
            tensors[name + "norm.weight"] = (shape.value_channels,)
        if shape.has_conv_bias:
            tensors[name + "conv1d.bias"] = (shape.conv_channels,)
        for module, has_bias in zip(self.modules, shape.biases, strict=True):
            if has_bias:
                tensors[f"{module.name}.bias"] = (module.rows,)
        return tensors

    def mixer(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> Mamba2:
        """Load a mixer with the device's memory of these adapters."""
        return Mamba2(self, reader, adapters)
