"""The gated attention family: what a checkpoint holds for such a mixer, and its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Modifiers, Rows, find_modifier, flex_decode, rotate_and_store
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.layers.kv_cache import KvState
from deltaline_server.layers.projection import load_projection
from deltaline_server.layers.shapes import AttentionShape

NAME = "self_attn."


class Attention:
    """A gated attention mixer, one rank's share of its heads: project, norm and rotate, store keys and values, attend,
    gate, project back.

    Of fewer key heads than ranks, several ranks have the same one. The rows of in_proj are q and gate, head by head,
    then k | v. q_norm, k_norm `[D]` are fp32, as 1 + w; the others have the model's dtype.
    """

    def __init__(
        self, family: AttentionFamily, reader: LayerReader, adapters: Mapping[Packed, LoraWeights], rotary: Tensor
    ) -> None:
        """Load it. rotary: as `rotary_table` gives it. Raises ModelError if its heads can't be shared out."""
        shape = family.shape.shard(reader.placement.world_size)
        self._in_proj = load_projection(reader, Packed.IN_PROJ, adapters, has_bias=shape.has_bias)
        self._q_norm = 1 + reader.vector(NAME + "q_norm.weight")
        self._k_norm = 1 + reader.vector(NAME + "k_norm.weight")
        self._out_proj = load_projection(reader, Packed.OUT_PROJ, adapters, has_bias=shape.has_bias)
        self._rotary, self._eps = rotary, family.eps
        self._modifiers = Modifiers(mask=find_modifier("causal")(), device=rotary.device)
        self._head_dim = shape.head_dim
        self._sections = (2 * shape.query_channels, shape.key_channels, shape.key_channels)

    def forward(self, hidden: Tensor, rows: Rows, state: KvState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the pages of the write lines of `state`."""
        q, k, v = self._in_proj(hidden, tiles).split(self._sections, dim=-1)
        q, gate = q.unflatten(-1, (-1, 2 * self._head_dim)).chunk(2, dim=-1)
        k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in (k, v))
        pages = state.k_pages, state.v_pages, state.page_table
        q = rotate_and_store(q, k, v, self._q_norm, self._k_norm, self._eps, self._rotary, *pages, rows)
        o = flex_decode(q, *pages, rows, modifiers=self._modifiers, gate=gate)
        assert isinstance(o, Tensor)
        return self._out_proj(o.flatten(1), tiles)


@dataclass(frozen=True)
class AttentionFamily:
    """The gated attention mixers of a model: one shape, the whole layer's."""

    shape: AttentionShape
    hidden_size: int
    eps: float
    _rotary: dict[torch.device, Tensor] = field(default_factory=dict)
    """The table of each device, which the layers share."""

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of a mixer. The rows of in_proj are q and gate, head by head, then k | v."""
        shape, hidden = self.shape, self.hidden_size
        kv_heads = (shape.num_kv_heads,)
        return (
            Module(NAME + "q_proj", Packed.IN_PROJ, 2 * shape.query_channels, hidden, (2 * shape.query_channels,)),
            Module(NAME + "k_proj", Packed.IN_PROJ, shape.key_channels, hidden, (shape.key_channels,), heads=kv_heads),
            Module(NAME + "v_proj", Packed.IN_PROJ, shape.key_channels, hidden, (shape.key_channels,), heads=kv_heads),
            Module(NAME + "o_proj", Packed.OUT_PROJ, hidden, shape.query_channels, (hidden,), shares_columns=True),
        )

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a mixer's other tensors, as they are stored."""
        tensors: dict[str, tuple[int, ...]] = {
            NAME + "q_norm.weight": (self.shape.head_dim,),
            NAME + "k_norm.weight": (self.shape.head_dim,),
        }
        if self.shape.has_bias:
            tensors |= {f"{module.name}.bias": (module.rows,) for module in self.modules}
        return tensors

    def mixer(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> Attention:
        """Load a mixer with the device's memory of these adapters."""
        if reader.placement.device not in self._rotary:
            self._rotary[reader.placement.device] = rotary_table(self.shape).to(reader.placement.device)
        return Attention(self, reader, adapters, self._rotary[reader.placement.device])


def rotary_table(shape: AttentionShape) -> Tensor:
    """Return what each position is rotated by, fp32 `[max_positions, R]`: cos of R/2 angles | sin of R/2 angles.

    As transformers computes them (compute_default_rope_parameters), whose wavelengths are theta ** (2 i / R).
    """
    exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32) / shape.rotary_dim
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float32), 1.0 / shape.rope_theta**exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
