"""A mixture of experts: what a checkpoint holds for it, in either of two forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels import FP8_BLOCK, AdapterTiles, Router, Rows, route_and_run_experts
from deltaline_server.checkpoints.expert_shares import Share, fp8_blocks
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import (
    MlpNames,
    Module,
    Packed,
    Placement,
    mlp_modules,
    without_adapters,
)
from deltaline_server.layers.expert_shape import SIGMOID, ExpertsShape
from deltaline_server.layers.mlp import Mlp
from deltaline_server.layers.projection import Projection, load_projection

SHARED_EXPERT = MlpNames("mlp.shared_expert.")


@dataclass(frozen=True)
class ExpertNames:
    """How a family stores a mixture of experts: what stands before its names, and names behind it.

    router: of the gates of all experts; score_bias: of what is added to their scores, None where nothing is. gate_up,
    down: of stacks of the experts' weights; in place of them there may be modules of each expert, those of `parts`,
    `experts.0.gate_proj` and so on. shared: of the expert that all tokens have, whole names, None where there is none;
    shared_gate: of what weighs that one, None where nothing does. latents: of the modules that make latents of hidden
    states and project back, where experts compute on those.
    """

    name: str = "mlp."
    router: str = "gate.weight"
    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    parts: tuple[tuple[str, ...], tuple[str, ...]] = (("gate_proj", "up_proj"), ("down_proj",))
    score_bias: str | None = None
    shared: MlpNames | None = SHARED_EXPERT
    shared_gate: str | None = "shared_expert_gate.weight"
    latents: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")

    @property
    def stacks(self) -> tuple[str, str]:
        """The whole names of the stacks of gate and up, and of down."""
        return self.name + self.gate_up, self.name + self.down

    @property
    def gates(self) -> tuple[str, ...]:
        """The whole names of the gates, in the order of the router's logits."""
        shared = None if self.shared is None else self.shared_gate
        return tuple(self.name + gate for gate in (self.router, shared) if gate is not None)

    def of_expert(self, expert: int, part: str) -> str:
        """The whole name of a weight of one expert, one of `parts`."""
        return f"{self.name}experts.{expert}.{part}.weight"


EXPERTS = ExpertNames()


class Experts:
    """A router, its experts and the one that all tokens have, if there is one. Ranks share the inner channels of each.

    The shared expert is the last ones of the experts, of their size, its end filled up with zeros; the gate that weighs
    it, if one does, is the last row of the gates. Where it is apart it is an MLP beside them.
    """

    def __init__(self, reader: LayerReader, names: ExpertNames, hidden_size: int, shape: ExpertsShape) -> None:
        """Load it. Raises ModelError if it can't be shared out."""
        place = reader.placement
        self._shape = shape.shard(place.world_size)
        self._router, self._ranks = router_of(self._shape), place.summing
        gates = torch.cat([reader.read(gate) for gate in names.gates])
        # Sigmoids are taken of logits in fp32, as what is trained with them is.
        self._gates = gates.to(place.device, torch.float32 if shape.scoring == SIGMOID else place.dtype)
        bias = score_bias(names, shape)
        self._score_bias = None if bias is None else reader.vector(bias)
        self._load_weights(reader, shares_of_ranks(reader, names, shape, hidden_size), shape.latent_size or hidden_size)
        self._latents: tuple[Projection, Projection] | None = None
        self._shared: Mlp | None = None
        if shape.latent_size is not None:
            before = load_projection(reader, Packed.LATENTS_IN, {}, has_bias=shape.has_shared_bias)
            # What ranks have behind the experts are summands.
            behind = load_projection(reader, Packed.LATENTS_OUT, {}, has_bias=shape.has_shared_bias and place.rank == 0)
            self._latents = before, behind
        if names.shared is not None and shape.is_shared_apart:
            activation, has_bias = names.shared.activation, shape.has_shared_bias
            self._shared = Mlp(reader, {}, activation=activation, has_bias=has_bias, limit=shape.limit)

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; it has no state. Tokens behind the rows have no experts."""
        logits = F.linear(hidden.to(self._gates.dtype), self._gates)
        scales, starts = self._scales, rows.query_start_loc
        x = hidden if self._latents is None else self._latents[0](hidden)
        y = route_and_run_experts(
            x,
            logits,
            self._router,
            self._gate_up,
            self._down,
            self._score_bias,
            starts,
            self._shape.activation,
            scales[0],
            scales[1],
            self._shape.limit,
        )
        y = y if self._latents is None else self._latents[1](y)
        y = y if self._ranks is None else self._ranks.sum(y)
        return y if self._shared is None else y.add_(self._shared.forward(hidden, rows, state))

    def _load_weights(self, reader: LayerReader, ranks: Sequence[Sequence[Share]], width: int) -> None:
        """Load this rank's shares; their files are read in the order in which they are stored. width: of the inputs."""
        place, shape, halves = reader.placement, self._shape, self._shape.activation.is_gated + 1
        count, inner, device = shape.num_experts + shape.num_shared, shape.intermediate_size, place.device
        blocks = fp8_blocks(reader, ranks)
        dtype = place.dtype if blocks is None else torch.uint8
        gate_up = torch.zeros(count, halves * inner, width, dtype=dtype, device=device)
        down = torch.zeros(count, width, inner, dtype=dtype, device=device)
        scales: tuple[Tensor, Tensor] | None = None
        if blocks is not None:
            of_gate_up, of_down = (
                torch.ones(count, *grid, dtype=torch.float32, device=device) for grid in scale_grids(shape, width)
            )
            scales = of_gate_up, of_down
        for share in ranks[place.rank]:
            part = share.read(reader.read if blocks is None else reader.read_fp8)
            share.target(gate_up, down, part, halves).copy_(part)
            if blocks is not None and scales is not None:
                of_part = share.scales(reader, blocks[share])
                share.target(*scales, of_part, halves).copy_(of_part)
        self._scales = (None, None) if scales is None else scales
        # Bytes that are 0 are zeros in FP8, too.
        self._gate_up, self._down = (
            weights if blocks is None else weights.view(torch.float8_e4m3fn) for weights in (gate_up, down)
        )


def shares_of_ranks(
    reader: LayerReader, names: ExpertNames, shape: ExpertsShape, hidden_size: int
) -> list[list[Share]]:
    """What each rank has of the experts of the reader's layer, in the order in which files have it; shape: of all."""
    ranks = range(reader.placement.world_size)
    return [_shares(reader, replace(reader.placement, rank=rank), names, shape, hidden_size) for rank in ranks]


def _shares(
    reader: LayerReader, place: Placement, names: ExpertNames, shape: ExpertsShape, hidden_size: int
) -> list[Share]:
    """What one rank has."""
    inner, whole = shape.intermediate_size, range(shape.latent_size or hidden_size)
    own, (gate_ups, downs), (parts, [down]) = place.share(inner), names.stacks, names.parts
    columns = range(own.start, own.stop)
    made = list[Share]()
    if reader.is_stored(gate_ups):
        halves = [range(half * inner + own.start, half * inner + own.stop) for half in range(len(parts))]
        for i in range(shape.num_experts):
            made += [Share(gate_ups, i, rows, whole, i, half) for half, rows in enumerate(halves)]
        made += [Share(downs, i, whole, columns, i) for i in range(shape.num_experts)]
    else:
        for i in range(shape.num_experts):
            made += [Share(names.of_expert(i, part), None, columns, whole, i, half) for half, part in enumerate(parts)]
            made.append(Share(names.of_expert(i, down), None, whole, columns, i))
    if names.shared is not None and not shape.is_shared_apart:
        made += _shared_shares(place, mlp_modules(names.shared, hidden_size, shape.shared_size), shape)
    return made


def _shared_shares(place: Placement, modules: Sequence[Module], shape: ExpertsShape) -> list[Share]:
    """What one rank has of the shared expert, cut into experts."""
    own, size = place.share(shape.shared_size), shape.intermediate_size // place.world_size
    cuts = [range(begin, min(begin + size, own.stop)) for begin in range(own.start, own.stop, size)]
    *gate_up, last = modules
    halves = [
        (f"{module.name}.weight", section * shape.shared_size, module.columns)
        for module in gate_up
        for section in range(len(module.sections))
    ]
    made = [
        Share(name, None, range(first + cut.start, first + cut.stop), range(columns), expert, half)
        for half, (name, first, columns) in enumerate(halves)
        for expert, cut in enumerate(cuts, shape.num_experts)
    ]
    down = f"{last.name}.weight"
    return made + [Share(down, None, range(last.rows), cut, i) for i, cut in enumerate(cuts, shape.num_experts)]


def scale_grids(shape: ExpertsShape, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Scales of an expert's gate and up, and of down, in FP8; shape: of a rank's share; width: of the inputs."""
    inner, of_width = (-(-size // FP8_BLOCK) for size in (shape.intermediate_size, width))
    return ((shape.activation.is_gated + 1) * inner, of_width), (of_width, inner)


def score_bias(names: ExpertNames, shape: ExpertsShape) -> str | None:
    """The whole name of what is added to the experts' scores, None where nothing is."""
    return names.name + names.score_bias if names.score_bias is not None and shape.has_score_bias else None


def router_of(shape: ExpertsShape) -> Router:
    """Return how the kernels choose a token's experts; the last logit is of the shared expert's gate, if it has one."""
    return Router(
        shape.top_k,
        shape.scoring,
        normalize=shape.normalises,
        num_groups=shape.num_groups,
        top_groups=shape.top_groups,
        scale=shape.weight_scale,
        num_shared=shape.num_shared,
        shared_gate=shape.has_shared_gate,
    )


def expert_test_sizes(shape: ExpertsShape, in_fp8: Sequence[bool] = (False,)) -> dict[str, Any]:
    """Return the arguments of the kernels' self-test for a model with such experts, beside its `hidden`. in_fp8: as
    there."""
    return {
        **({} if list(in_fp8) == [False] else {"experts_in_fp8": tuple(in_fp8)}),
        "router": router_of(shape),
        "num_experts": shape.num_experts,
        "expert_dim": shape.intermediate_size,
        "expert_activation": str(shape.activation),
    }


def expert_modules(names: ExpertNames, hidden_size: int, shape: ExpertsShape) -> tuple[Module, ...]:
    """The linear modules beside the experts: what latents are made by, and the shared expert where it is apart."""
    modules: tuple[Module, ...] = ()
    if shape.latent_size is not None:
        sizes = (shape.latent_size, hidden_size), (hidden_size, shape.latent_size)
        packed = Packed.LATENTS_IN, Packed.LATENTS_OUT
        modules = tuple(
            Module(names.name + name, one, rows, columns, (rows,), is_whole=True)
            for name, one, (rows, columns) in zip(names.latents, packed, sizes, strict=True)
        )
    if names.shared is not None and shape.is_shared_apart:
        modules += mlp_modules(names.shared, hidden_size, shape.shared_size)
    return without_adapters(modules)


def expert_tensors(names: ExpertNames, hidden_size: int, shape: ExpertsShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a mixture of experts but its modules' weights; experts' are stacked."""
    inner, (gate_ups, downs) = shape.intermediate_size, names.stacks
    width, modules = shape.latent_size or hidden_size, expert_modules(names, hidden_size, shape)
    is_within = names.shared is not None and not shape.is_shared_apart
    shared = mlp_modules(names.shared, hidden_size, shape.shared_size) if names.shared and is_within else ()
    bias = score_bias(names, shape)
    return {
        **({} if bias is None else {bias: (shape.num_experts,)}),
        **{gate: (rows, hidden_size) for gate, rows in zip(names.gates, (shape.num_experts, 1), strict=False)},
        gate_ups: (shape.num_experts, len(names.parts[0]) * inner, width),
        downs: (shape.num_experts, width, inner),
        **({f"{module.name}.bias": (module.rows,) for module in modules} if shape.has_shared_bias else {}),
        **{f"{module.name}.weight": (module.rows, module.columns) for module in shared},
    }


def one_by_one(tensors: Mapping[str, tuple[int, ...]], names: ExpertNames) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer where its experts are stored one by one, in place of stacks."""
    single = dict(tensors)
    for stack, parts in zip(names.stacks, names.parts, strict=True):
        count, rows, columns = single.pop(stack, (0, 0, 0))
        for i in range(count):
            single |= {names.of_expert(i, part): (rows // len(parts), columns) for part in parts}
    return single
