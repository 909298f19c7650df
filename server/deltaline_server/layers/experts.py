"""A mixture of experts: what a checkpoint holds for it, in either of two forms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels import AdapterTiles, Router, Rows, route_tokens, run_experts
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import ALL, whole_sections
from deltaline_server.layers.shapes import ExpertsShape

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


class Experts:
    """A router, its experts and the one that all tokens have. Ranks share the inner channels of each.

    The shared expert is the last ones of the experts, of their size, its end filled up with zeros; the gate that weighs
    it is the last row of the gates.
    """

    def __init__(self, reader: LayerReader, name: str, hidden_size: int, shape: ExpertsShape) -> None:
        """Load it. name: what stands before the names of its tensors. Raises ModelError if it can't be shared out."""
        place = reader.placement
        self._shape = shape.shard(place.world_size)
        self._router, self._ranks = router_of(self._shape), place.ranks
        count, inner = shape.num_experts + shape.num_shared, self._shape.intermediate_size
        gates = torch.cat([reader.read(f"{name}{gate}.weight") for gate in ("gate", "shared_expert_gate")])
        self._gates = gates.to(place.device, place.dtype)
        self._gate_up = torch.zeros(count, 2 * inner, hidden_size, dtype=place.dtype, device=place.device)
        self._down = torch.zeros(count, hidden_size, inner, dtype=place.dtype, device=place.device)
        self._load_experts(reader, name, shape)
        self._load_shared(reader, f"{name}shared_expert.", shape)

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; it has no state. Tokens behind the rows have no experts."""
        logits = F.linear(hidden, self._gates)
        weights, experts = route_tokens(logits, self._router, query_start_loc=rows.query_start_loc)
        y = run_experts(hidden, self._gate_up, self._down, weights, experts)
        return y if self._ranks is None else self._ranks.sum(y)

    def _load_experts(self, reader: LayerReader, name: str, shape: ExpertsShape) -> None:
        """Load this rank's share of each; their files are read in the order in which they are stored."""
        place, inner = reader.placement, shape.intermediate_size
        columns = place.share(inner)
        if reader.is_stored(name + GATE_UP):
            for i, expert in enumerate(self._gate_up[: shape.num_experts]):
                read = partial(_of_stack, reader, name + GATE_UP, i)
                expert.copy_(whole_sections((inner, inner), read, place))
            for i, expert in enumerate(self._down[: shape.num_experts]):
                expert.copy_(_of_stack(reader, name + DOWN, i, ALL)[:, columns])
            return
        for i in range(shape.num_experts):
            gate, up = self._gate_up[i].chunk(2)
            gate.copy_(reader.read(f"{name}experts.{i}.gate_proj.weight", columns))
            up.copy_(reader.read(f"{name}experts.{i}.up_proj.weight", columns))
            self._down[i].copy_(reader.read(f"{name}experts.{i}.down_proj.weight", ALL, columns))

    def _load_shared(self, reader: LayerReader, name: str, shape: ExpertsShape) -> None:
        """Load this rank's share of the shared expert, cut into experts."""
        columns, size = reader.placement.share(shape.shared_size), self._shape.intermediate_size
        parts = zip(
            reader.read(f"{name}gate_proj.weight", columns).split(size),
            reader.read(f"{name}up_proj.weight", columns).split(size),
            reader.read(f"{name}down_proj.weight", ALL, columns).split(size, dim=1),
            strict=True,
        )
        for i, (gate, up, down) in enumerate(parts, shape.num_experts):
            self._gate_up[i, : len(gate)] = gate
            self._gate_up[i, size : size + len(up)] = up
            self._down[i, :, : down.shape[1]] = down


def router_of(shape: ExpertsShape) -> Router:
    """Return how the kernels choose a token's experts; the last logit is of the shared expert's gate."""
    return Router(shape.top_k, normalize=shape.normalises, num_shared=shape.num_shared, shared_gate=True)


def expert_test_sizes(shape: ExpertsShape) -> dict[str, Any]:
    """Return the arguments of the kernels' self-test for a model with such experts, beside its `hidden`."""
    return {"router": router_of(shape), "num_experts": shape.num_experts, "expert_dim": shape.intermediate_size}


def expert_tensors(name: str, hidden_size: int, shape: ExpertsShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a mixture of experts, those of all experts stacked."""
    inner, shared = shape.intermediate_size, shape.shared_size
    return {
        f"{name}gate.weight": (shape.num_experts, hidden_size),
        f"{name}{GATE_UP}": (shape.num_experts, 2 * inner, hidden_size),
        f"{name}{DOWN}": (shape.num_experts, hidden_size, inner),
        f"{name}shared_expert.gate_proj.weight": (shared, hidden_size),
        f"{name}shared_expert.up_proj.weight": (shared, hidden_size),
        f"{name}shared_expert.down_proj.weight": (hidden_size, shared),
        f"{name}shared_expert_gate.weight": (1, hidden_size),
    }


def one_by_one(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer where its experts are stored one by one, in place of stacks."""
    single: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        stem = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        if name.endswith(GATE_UP):
            inner, width = shape[1] // 2, shape[2]
            for i in range(shape[0]):
                single |= {f"{stem}{i}.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        elif name.endswith(DOWN):
            single |= {f"{stem}{i}.down_proj.weight": shape[1:] for i in range(shape[0])}
        else:
            single[name] = shape
    return single


def _of_stack(reader: LayerReader, name: str, expert: int, rows: slice) -> Tensor:
    """Rows of one expert in a stack."""
    return reader.read(name, slice(expert, expert + 1), rows)[0]
