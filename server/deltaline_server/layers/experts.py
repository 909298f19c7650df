"""A mixture of experts: what a checkpoint holds for it, in either of two forms, and its computation on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels import AdapterTiles, Rows
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import ALL, whole_sections
from deltaline_server.layers.shapes import ExpertsShape

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
# Tokens of a product with one expert's weights: always as many, so that a row's bits do not depend on how many come.
BLOCK_TOKENS = 16


class Experts:
    """A router, its experts and the one that all tokens have. With shared columns its output is one rank's summand.

    The shared expert is the last ones of the experts, of their size, its end filled up with zeros; the gate that weighs
    it is the last row of the router.
    """

    def __init__(self, reader: LayerReader, name: str, hidden_size: int, shape: ExpertsShape) -> None:
        """Load it. name: what stands before the names of its tensors. Raises ModelError if it can't be shared out."""
        place = reader.placement
        self._shape = shape.shard(place.world_size)
        count, inner = shape.num_experts + shape.num_shared, self._shape.intermediate_size
        router = torch.cat([reader.read(f"{name}{gate}.weight") for gate in ("gate", "shared_expert_gate")])
        self._router = router.to(place.device, place.dtype)
        self._gate_up = torch.zeros(count, 2 * inner, hidden_size, dtype=place.dtype, device=place.device)
        self._down = torch.zeros(count, hidden_size, inner, dtype=place.dtype, device=place.device)
        self._load_experts(reader, name, shape)
        self._load_shared(reader, f"{name}shared_expert.", shape)

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; it has no state."""
        weights, experts = route_tokens(F.linear(hidden, self._router), self._shape)
        return run_experts(hidden, self._gate_up, self._down, weights, experts)

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


def route_tokens(logits: Tensor, shape: ExpertsShape) -> tuple[Tensor, Tensor]:
    """Return the weights `[T, C]` fp32 and the experts `[T, C]` int64 of each token, C = top_k + num_shared.

    Those of the router come first, in falling order, of equal ones the lowest; then the shared ones.
    logits: `[T, num_experts + 1]`, the last one of the shared expert's gate.
    """
    scores = logits[:, :-1].float().softmax(-1)
    order = scores.sort(dim=-1, descending=True, stable=True)
    weights, experts = order.values[:, : shape.top_k], order.indices[:, : shape.top_k]
    if shape.normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    shared = torch.arange(shape.num_experts, shape.num_experts + shape.num_shared, device=logits.device)
    shared_weights = logits[:, -1:].float().sigmoid().expand(-1, shape.num_shared)
    return torch.cat((weights, shared_weights), -1), torch.cat((experts, shared.expand(len(logits), -1)), -1)


def run_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Return `[T, H]` in x.dtype: the weighted sum over each token's experts, in the order of their numbers.

    x `[T, H]`; gate_up `[E, 2 I, H]`, gate above up, and down `[E, H, I]`; weights and experts `[T, C]` as route_tokens
    gives them. Products and sums are fp32.
    """
    choices, flat_weights = experts.shape[1], weights.flatten()
    made = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    order, counts = experts.flatten().argsort(stable=True), experts.flatten().bincount(minlength=len(down))
    for expert, pairs in enumerate(order.split(counts.tolist())):
        if not len(pairs):
            continue
        first, second = gate_up[expert].float(), down[expert].float()
        for block in pairs.split(BLOCK_TOKENS):
            tokens = block // choices
            inputs = F.pad(x[tokens].float(), (0, 0, 0, BLOCK_TOKENS - len(block)))
            gate, up = F.linear(inputs, first).chunk(2, dim=-1)
            outputs = F.linear(F.silu(gate) * up, second)[: len(block)]
            made.index_add_(0, tokens, outputs * flat_weights[block, None])  # a token has an expert once
    return made.to(x.dtype)


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
