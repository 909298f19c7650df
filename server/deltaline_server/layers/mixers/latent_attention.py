"""The latent attention family (MLA): what a checkpoint holds for such a mixer, and its computation.

A token is kept as one latent, of which all heads' keys and values are made by a product each. Here those products are
made with queries and outputs instead, so that attention is over the latents themselves (DeepSeek-V2, arXiv:2405.04434).
"""

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
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.layers.kv_cache import KvState
from deltaline_server.layers.latent_shape import LatentShape
from deltaline_server.layers.mixers.rotary import rotary_table
from deltaline_server.layers.projection import Projection, load_projection

NAME = "self_attn."


class HeadProjections:
    """Each head's product with a weight of its own: x @ weight.T for x `[T, HQ, in]` and weights `[HQ, out, in]`.

    On the CPU one product for each head, in which a row's bits are its own; of all heads at once they would depend on
    how many rows there are.
    """

    def __init__(self, weights: Tensor) -> None:
        is_one = weights.device.type != "cpu"
        self._whole = weights.transpose(1, 2) if is_one else None
        self._heads = [] if is_one else [Projection([one.contiguous()]) for one in weights]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the products to out `[T, HQ, out]`, a view of any strides."""
        if self._whole is not None:
            torch.bmm(x.transpose(0, 1), self._whole, out=out.transpose(0, 1))
        for i, project in enumerate(self._heads):
            out[:, i] = project(x[:, i].contiguous())


class LatentAttention:
    """A latent attention mixer, one rank's share of its heads: project, norm and store latents, attend, project back.

    Every rank has the latents of all. The rows of in_proj are q | latent | what keys have behind it, or with queries of
    a low rank those of that rank in place of q, whose norm and second projection follow. Those halves of kv_b_proj
    that make a head's keys `[HQ, K, C]` and values `[HQ, V, C]` of a latent are multiplied with its queries and with
    what attention gives, in the model's dtype; norms are fp32.
    """

    def __init__(
        self, family: LatentAttentionFamily, reader: LayerReader, adapters: Mapping[Packed, LoraWeights], rotary: Tensor
    ) -> None:
        """Load it. rotary: as `rotary_table` gives it. Raises ModelError if its heads can't be shared out."""
        shape = family.shape.shard(reader.placement.world_size)
        self._in_proj = load_projection(reader, Packed.IN_PROJ, adapters)
        self._q_norm, self._query_up = None, None
        if shape.query_rank:
            self._q_norm = reader.vector(NAME + "q_a_layernorm.weight")
            self._query_up = load_projection(reader, Packed.QUERY_UP, adapters)
        self._norm = reader.vector(NAME + "kv_a_layernorm.weight")
        halves = (shape.num_heads * shape.key_dim, shape.num_heads * shape.value_dim)
        [made] = reader.projection(Packed.LATENT_UP)
        assert isinstance(made, Tensor)
        w_k, w_v = (half.unflatten(0, (shape.num_heads, -1)) for half in made.split(halves))
        self._absorb, self._raise = HeadProjections(w_k.transpose(1, 2)), HeadProjections(w_v)
        self._out_proj = load_projection(reader, Packed.OUT_PROJ, adapters)
        self._rotary, self._eps, self._shape = rotary, family.eps, shape
        self._modifiers = Modifiers(mask=find_modifier("causal")(), device=rotary.device)
        queries = shape.query_rank or shape.query_channels
        self._sections = (queries, shape.latent_dim, shape.behind_dim)

    def forward(self, hidden: Tensor, rows: Rows, state: KvState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the pages of the write lines of `state`."""
        shape, num_tokens = self._shape, len(hidden)
        q, latent, behind = self._in_proj(hidden, tiles).split(self._sections, dim=-1)
        if self._query_up is not None:
            assert self._q_norm is not None
            q = self._query_up(rms_norm(q, self._q_norm, self._eps), tiles)
        q, q_behind = q.unflatten(-1, (shape.num_heads, -1)).split((shape.key_dim, shape.behind_dim), dim=-1)
        turned = self._store(q_behind, rms_norm(latent, self._norm, self._eps), behind, rows, state)
        # In the places in which they are wanted: q w_k per head, beside what is behind.
        queries = hidden.new_empty(num_tokens, shape.num_heads, shape.head_dim)
        absorbed, rest = queries.split((shape.latent_dim, shape.behind_dim), dim=-1)
        self._absorb(q, absorbed)
        rest.copy_(turned)
        o = flex_decode(
            queries,
            state.k_pages,
            None,
            state.page_table,
            rows,
            modifiers=self._modifiers,
            scale=shape.scale,
            value_dim=shape.latent_dim,
        )
        assert isinstance(o, Tensor)
        values = hidden.new_empty(num_tokens, shape.num_heads, shape.value_dim)
        self._raise(o, values)
        return self._out_proj(values.flatten(1), tiles)

    def _store(self, q_behind: Tensor, latent: Tensor, behind: Tensor, rows: Rows, state: KvState) -> Tensor:
        """Store latents and what is behind them; return the queries' channels behind, turned where any are.

        One launch keeps the first channels as they come and turns the last ones: of a family without channels behind,
        two of the latent by an angle of 0.
        """
        kept = self._shape.head_dim - max(2, self._shape.behind_dim)
        first, last = (latent, behind) if self._shape.behind_dim else (latent[:, :kept], latent[:, kept:])
        pages, last = (state.k_pages[..., kept:], state.k_pages[..., :kept]), last.unsqueeze(1)
        turns = self._shape.rotary_dim > 0
        turned = rotate_and_store(
            q_behind if turns else last,
            last,
            first.unsqueeze(1),
            None,
            None,
            self._eps,
            self._rotary,
            *pages,
            state.page_table,
            rows,
        )
        return turned if turns else q_behind


@dataclass(frozen=True)
class LatentAttentionFamily:
    """The latent attention mixers of a model: one shape, the whole layer's. eps: of their norms."""

    shape: LatentShape
    hidden_size: int
    eps: float
    _rotary: dict[torch.device, Tensor] = field(default_factory=dict)
    """The table of each device, which the layers share."""

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of a mixer, those of in_proj in the order of its rows."""
        shape, hidden = self.shape, self.hidden_size
        rank, queries, kept = shape.query_rank, shape.query_channels, shape.head_dim
        of_head = (shape.key_dim, shape.value_dim)
        projected, up = Module(NAME + "q_proj", Packed.IN_PROJ, queries, hidden, (queries,)), tuple[Module, ...]()
        if rank:
            projected = Module(NAME + "q_a_proj", Packed.IN_PROJ, rank, hidden, (rank,), is_whole=True)
            up = (Module(NAME + "q_b_proj", Packed.QUERY_UP, queries, rank, (queries,)),)
        return (
            projected,
            Module(NAME + "kv_a_proj_with_mqa", Packed.IN_PROJ, kept, hidden, (kept,), is_whole=True),
            *up,
            Module(
                NAME + "kv_b_proj",
                Packed.LATENT_UP,
                shape.num_heads * sum(of_head),
                shape.latent_dim,
                of_head,
                groups=shape.num_heads,
                takes_adapters=False,
            ),
            Module(
                NAME + "o_proj",
                Packed.OUT_PROJ,
                hidden,
                shape.num_heads * shape.value_dim,
                (hidden,),
                shares_columns=True,
            ),
        )

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a mixer's other tensors, as they are stored."""
        tensors: dict[str, tuple[int, ...]] = {NAME + "kv_a_layernorm.weight": (self.shape.latent_dim,)}
        if self.shape.query_rank:
            tensors[NAME + "q_a_layernorm.weight"] = (self.shape.query_rank,)
        return tensors

    def mixer(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> LatentAttention:
        """Load a mixer with the device's memory of these adapters."""
        device = reader.placement.device
        if device not in self._rotary:
            self._rotary[device] = rotary_table(self.shape).to(device)
        return LatentAttention(self, reader, adapters, self._rotary[device])
