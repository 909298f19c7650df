"""The attention family: what a checkpoint holds for such a mixer, and its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltaline_kernels import (
    AdapterTiles,
    LoraWeights,
    Modifiers,
    Rows,
    find_modifier,
    flex_decode,
    rms_norm,
    rotate_and_store,
)
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Module, Packed, without_adapters
from deltaline_server.layers.kv_cache import KvState
from deltaline_server.layers.mixers.rotary import rotary_table
from deltaline_server.layers.projection import load_projection, scaled
from deltaline_server.layers.shapes import AttentionShape, QkNorm


class Attention:
    """An attention mixer, one rank's share of its heads: project, norm and rotate, store keys and values, attend, gate,
    project back.

    Of fewer key heads than ranks, several ranks have the same one. The rows of in_proj are q, with a gate q and gate
    head by head, then k | v. q_norm, k_norm `[D]`, or `[HQ * D]` and `[HKV * D]`, are fp32, None where there are none;
    the others have the model's dtype.
    """

    def __init__(
        self, family: AttentionFamily, reader: LayerReader, adapters: Mapping[Packed, LoraWeights], rotary: Tensor
    ) -> None:
        """Load it. rotary: as `rotary_table` gives it. Raises ModelError if its heads can't be shared out."""
        shape = family.shape.shard(reader.placement.world_size)
        in_proj, out_proj = family.packed
        self._in_proj = load_projection(reader, in_proj, adapters, has_bias=shape.has_bias)
        self._q_norm, self._k_norm = (
            None if shape.qk_norm is QkNorm.NONE else family.norm_offset + reader.vector(family.name + name)
            for name in family.norms
        )
        self._out_proj = load_projection(reader, out_proj, adapters, has_bias=shape.has_bias)
        self._rotary, self._eps = rotary, family.eps
        self._modifiers = Modifiers(mask=find_modifier("causal")(), device=rotary.device)
        self._shape = shape
        self._heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        self._sections = (family.query_rows(shape), shape.key_channels, shape.key_channels)

    def forward(self, hidden: Tensor, rows: Rows, state: KvState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the pages of the write lines of `state`."""
        shape, gate = self._shape, None
        hidden = scaled(hidden, shape.input_scale)
        q, k, v = self._in_proj(hidden, tiles).split(self._sections, dim=-1)
        norms = self._q_norm, self._k_norm
        if shape.qk_norm is QkNorm.WHOLE:
            assert norms[0] is not None and norms[1] is not None
            q, k = rms_norm(q, norms[0], self._eps), rms_norm(k, norms[1], self._eps)
            norms = None, None
        q, k, v = (part.unflatten(-1, (heads, -1)) for part, heads in zip((q, k, v), self._heads, strict=True))
        if shape.is_gated:
            q, gate = q.chunk(2, dim=-1)
        pages = state.k_pages, state.v_pages, state.page_table
        q = rotate_and_store(q, k, v, *norms, self._eps, self._rotary, *pages, rows)
        o = flex_decode(q, *pages, rows, modifiers=self._modifiers, scale=shape.scale, gate=gate)
        assert isinstance(o, Tensor)
        return scaled(self._out_proj(o.flatten(1), tiles), shape.output_scale)


@dataclass(frozen=True)
class AttentionFamily:
    """The attention mixers of a model: one shape, the whole layer's.

    name: what stands before the names of tensors. norm_offset: what is added to the weights of norms. packed: what the
    served projections are called, which two mixers of a layer may not share. input_size: channels of the input, None
    for hidden_size. takes_adapters: whether adapters may change its modules. out: the module that projects back. norms:
    the weights of those of queries and keys.
    """

    shape: AttentionShape
    hidden_size: int
    eps: float
    name: str
    norm_offset: int
    packed: tuple[Packed, Packed] = (Packed.IN_PROJ, Packed.OUT_PROJ)
    input_size: int | None = None
    takes_adapters: bool = True
    out: str = "o_proj"
    norms: tuple[str, str] = ("q_norm.weight", "k_norm.weight")
    _rotary: dict[torch.device, Tensor] = field(default_factory=dict)
    """The table of each device, which the layers share."""

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of a mixer, those of in_proj in the order of its rows."""
        shape, hidden, name = self.shape, self.hidden_size, self.name
        queries, keys, kv_heads = self.query_rows(shape), shape.key_channels, (shape.num_kv_heads,)
        in_proj, out_proj = self.packed
        inputs = self.input_size or hidden
        modules = (
            Module(name + "q_proj", in_proj, queries, inputs, (queries,)),
            Module(name + "k_proj", in_proj, keys, inputs, (keys,), heads=kv_heads),
            Module(name + "v_proj", in_proj, keys, inputs, (keys,), heads=kv_heads),
            Module(name + self.out, out_proj, hidden, shape.query_channels, (hidden,), shares_columns=True),
        )
        return modules if self.takes_adapters else without_adapters(modules)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a mixer's other tensors, as they are stored."""
        shape, tensors = self.shape, dict[str, tuple[int, ...]]()
        if shape.qk_norm is not QkNorm.NONE:
            is_whole = shape.qk_norm is QkNorm.WHOLE
            q_norm, k_norm = (self.name + norm for norm in self.norms)
            tensors[q_norm] = (shape.query_channels if is_whole else shape.head_dim,)
            tensors[k_norm] = (shape.key_channels if is_whole else shape.head_dim,)
        if shape.has_bias:
            tensors |= {f"{module.name}.bias": (module.rows,) for module in self.modules}
        return tensors

    @staticmethod
    def query_rows(shape: AttentionShape) -> int:
        """Rows of in_proj that are queries, and their gates where there are any."""
        return shape.query_channels * (2 if shape.is_gated else 1)

    def mixer(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> Attention:
        """Load a mixer with the device's memory of these adapters."""
        if reader.placement.device not in self._rotary:
            self._rotary[reader.placement.device] = rotary_table(self.shape).to(reader.placement.device)
        return Attention(self, reader, adapters, self._rotary[reader.placement.device])
