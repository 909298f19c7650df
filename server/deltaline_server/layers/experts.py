"""A mixture of experts: what a checkpoint holds for it, in either of two forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels import AdapterTiles, Router, Rows, route_and_run_experts
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import ALL, MlpNames, Module, mlp_modules, whole_sections
from deltaline_server.layers.shapes import SIGMOID, ExpertsShape

SHARED_EXPERT = MlpNames("mlp.shared_expert.")


@dataclass(frozen=True)
class ExpertNames:
    """How a family stores a mixture of experts: what stands before its names, and names behind it.

    router: of the gates of all experts; score_bias: of what is added to their scores, None where nothing is. gate_up,
    down: of stacks of the experts' weights; in place of them there may be modules of each expert, those of `parts`,
    `experts.0.gate_proj` and so on. shared: of the expert that all tokens have, whole names, None where there is none;
    shared_gate: of what weighs that one, None where nothing does.
    """

    name: str = "mlp."
    router: str = "gate.weight"
    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    parts: tuple[tuple[str, ...], tuple[str, ...]] = (("gate_proj", "up_proj"), ("down_proj",))
    score_bias: str | None = None
    shared: MlpNames | None = SHARED_EXPERT
    shared_gate: str | None = "shared_expert_gate.weight"

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
    it, if one does, is the last row of the gates.
    """

    def __init__(self, reader: LayerReader, names: ExpertNames, hidden_size: int, shape: ExpertsShape) -> None:
        """Load it. Raises ModelError if it can't be shared out."""
        place = reader.placement
        self._shape = shape.shard(place.world_size)
        self._router, self._ranks = router_of(self._shape), place.summing
        count, inner = shape.num_experts + shape.num_shared, self._shape.intermediate_size
        gates = torch.cat([reader.read(gate) for gate in names.gates])
        # Sigmoids are taken of logits in fp32, as what is trained with them is.
        self._gates = gates.to(place.device, torch.float32 if shape.scoring == SIGMOID else place.dtype)
        bias = score_bias(names, shape)
        self._score_bias = None if bias is None else reader.vector(bias)
        rows = inner * len(names.parts[0])
        self._gate_up = torch.zeros(count, rows, hidden_size, dtype=place.dtype, device=place.device)
        self._down = torch.zeros(count, hidden_size, inner, dtype=place.dtype, device=place.device)
        self._load_experts(reader, names, shape)
        if names.shared is not None:
            self._load_shared(reader, mlp_modules(names.shared, hidden_size, shape.shared_size), shape)

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; it has no state. Tokens behind the rows have no experts."""
        logits = F.linear(hidden.to(self._gates.dtype), self._gates)
        told = self._score_bias, rows.query_start_loc, self._shape.activation
        y = route_and_run_experts(hidden, logits, self._router, self._gate_up, self._down, *told)
        return y if self._ranks is None else self._ranks.sum(y)

    def _load_experts(self, reader: LayerReader, names: ExpertNames, shape: ExpertsShape) -> None:
        """Load this rank's share of each; their files are read in the order in which they are stored."""
        place, inner = reader.placement, shape.intermediate_size
        columns, (gate_ups, downs) = place.share(inner), names.stacks
        if reader.is_stored(gate_ups):
            for i, expert in enumerate(self._gate_up[: shape.num_experts]):
                read = partial(_of_stack, reader, gate_ups, i)
                expert.copy_(whole_sections((inner,) * len(names.parts[0]), read, place))
            for i, expert in enumerate(self._down[: shape.num_experts]):
                expert.copy_(_of_stack(reader, downs, i, ALL)[:, columns])
            return
        for i in range(shape.num_experts):
            for part, rows in zip(names.parts[0], self._gate_up[i].chunk(len(names.parts[0])), strict=True):
                rows.copy_(reader.read(names.of_expert(i, part), columns))
            [down] = names.parts[1]
            self._down[i].copy_(reader.read(names.of_expert(i, down), ALL, columns))

    def _load_shared(self, reader: LayerReader, modules: Sequence[Module], shape: ExpertsShape) -> None:
        """Load this rank's share of the shared expert, cut into experts."""
        columns, size = reader.placement.share(shape.shared_size), self._shape.intermediate_size
        *gate_up, last = modules
        halves = torch.cat([reader.weight(module) for module in gate_up]).chunk(self._gate_up.shape[1] // size)
        for half, whole in enumerate(halves):
            for i, part in enumerate(whole.split(size), shape.num_experts):
                self._gate_up[i, half * size : half * size + len(part)] = part
        for i, part in enumerate(reader.weight(last)[:, columns].split(size, dim=1), shape.num_experts):
            self._down[i, :, : part.shape[1]] = part


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


def expert_test_sizes(shape: ExpertsShape) -> dict[str, Any]:
    """Return the arguments of the kernels' self-test for a model with such experts, beside its `hidden`."""
    return {
        "router": router_of(shape),
        "num_experts": shape.num_experts,
        "expert_dim": shape.intermediate_size,
        "expert_activation": str(shape.activation),
    }


def expert_tensors(names: ExpertNames, hidden_size: int, shape: ExpertsShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a mixture of experts, those of all experts stacked."""
    inner, (gate_ups, downs) = shape.intermediate_size, names.stacks
    shared = () if names.shared is None else mlp_modules(names.shared, hidden_size, shape.shared_size)
    bias = score_bias(names, shape)
    return {
        **({} if bias is None else {bias: (shape.num_experts,)}),
        **{gate: (rows, hidden_size) for gate, rows in zip(names.gates, (shape.num_experts, 1), strict=False)},
        gate_ups: (shape.num_experts, len(names.parts[0]) * inner, hidden_size),
        downs: (shape.num_experts, hidden_size, inner),
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


def _of_stack(reader: LayerReader, name: str, expert: int, rows: slice) -> Tensor:
    """Rows of one expert in a stack."""
    return reader.read(name, slice(expert, expert + 1), rows)[0]
