"""The tokens, experts and fp32 truth of one case of a mixture of experts. Knows no implementation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import silu

from deltaline_bench import batch


@dataclass(frozen=True)
class Shape(batch.Shape):
    """`num_tokens` tokens, each with `top_k` of `num_experts` experts and with `num_shared` more, all of `inner`.

    Args:
        groups: into which the experts fall, and how many of them a token's experts are of.
        is_sigmoid: scores are sigmoids, with a bias where experts are chosen, as in DeepSeek-V3; else a softmax.
        is_gated: the shared experts have a gate, as in Qwen.
    """

    num_tokens: int
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    num_shared: int = 1
    groups: tuple[int, int] = (1, 1)
    is_sigmoid: bool = False
    is_gated: bool = True
    scale: float = 1.0
    dtype: torch.dtype = torch.bfloat16

    @property
    def expert_values(self) -> int:
        return 3 * self.hidden * self.inner

    def words(self) -> dict[str, str]:
        return {
            "x": f"[{self.num_tokens}, {self.hidden}]",
            "experts": f"{self.top_k} of {self.num_experts}, {self.num_shared} shared",
            "inner": str(self.inner),
        }

    def num_bytes(self) -> int:
        """Count logits and tokens read once, outputs written once; the experts are the batch's to count."""
        values = 2 * self.num_tokens * self.hidden * self.dtype.itemsize
        return values + 4 * self.num_tokens * (self.num_experts + self.is_gated)

    def num_flops(self) -> int:
        """Count a multiplication and an addition per token and value of its experts."""
        return 2 * self.num_tokens * (self.top_k + self.num_shared) * self.expert_values


class Batch(batch.Batch[Shape]):
    """Tokens, the logits of their router, and all experts, the shared ones last."""

    def __init__(self, shape: Shape, seed_name: str, device: torch.device) -> None:
        super().__init__(shape, seed_name, device)
        count = shape.num_experts + shape.num_shared
        self.x = self.normal(shape.num_tokens, shape.hidden, dtype=shape.dtype)
        self.logits = self.normal(shape.num_tokens, shape.num_experts + shape.is_gated)
        self.bias = self.normal(shape.num_experts) * 0.1 if shape.is_sigmoid else None
        # Expert by expert: in fp32, all of them at once take twice the room.
        self.gate_up = torch.empty(count, 2 * shape.inner, shape.hidden, dtype=shape.dtype, device=device)
        self.down = torch.empty(count, shape.hidden, shape.inner, dtype=shape.dtype, device=device)
        for expert in range(count):
            self.gate_up[expert] = self.normal(2 * shape.inner, shape.hidden) * shape.hidden**-0.5
            self.down[expert] = self.normal(shape.hidden, shape.inner) * shape.inner**-0.5

    @cached_property
    def routes(self) -> tuple[Tensor, Tensor]:
        """The weights `[T, C]` fp32 and the experts `[T, C]` int64 of every token, the shared ones last."""
        shape = self.shape
        logits = self.logits[:, : shape.num_experts].double()
        scores = logits.sigmoid() if shape.is_sigmoid else logits.softmax(1)
        choices = scores if self.bias is None else scores + self.bias
        num_groups, top_groups = shape.groups
        if num_groups > 1:
            grouped = choices.unflatten(1, (num_groups, -1))
            best = grouped.amax(2) if self.bias is None else grouped.topk(2).values.sum(2)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(top_groups).indices, True)
            choices = grouped.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
        experts = choices.topk(shape.top_k).indices
        weights = scores.gather(1, experts)
        weights = weights / weights.sum(1, keepdim=True) * shape.scale
        shared = torch.arange(shape.num_shared, device=self.device).expand(shape.num_tokens, -1) + shape.num_experts
        gate = self.logits[:, shape.num_experts :].double().sigmoid() if shape.is_gated else torch.ones_like(weights)
        gates = gate[:, :1].expand(-1, shape.num_shared)
        return torch.cat((weights, gates), 1).float(), torch.cat((experts, shared), 1)

    def num_bytes(self) -> int:
        """Count each expert that a token has once, too."""
        touched: int = self.routes[1].unique().numel()
        return self.shape.num_bytes() + touched * self.shape.expert_values * self.shape.dtype.itemsize

    def expected(self) -> dict[str, Tensor]:
        """Return the outputs `[T, H]`, computed in fp32 expert by expert; TF32 is off where a bench runs."""
        weights, experts = self.routes
        out = torch.zeros(self.x.shape, device=self.device)
        for expert in experts.unique().tolist():
            token, choice = (experts == expert).nonzero(as_tuple=True)
            gate, up = (self.x[token].float() @ self.gate_up[expert].float().t()).chunk(2, dim=1)
            part = (silu(gate) * up) @ self.down[expert].float().t()
            out.index_add_(0, token, weights[token, choice, None] * part)
        return {"out": out}
