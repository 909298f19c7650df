"""Random tokens and experts. Whatever no token may read is NaN: experts that none has, weights of choices of none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from rigs.kernels.fp8_batches import stored
from rigs.kernels.paths import Path
from torch import Tensor

from deltaline_kernels import run_experts_reference


@dataclass(frozen=True)
class Batch:
    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    experts: Tensor
    activation: str = "silu"
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    limit: float = 0.0

    def run(self, path: Path) -> Tensor:
        routes = self.weights, self.experts, self.activation
        scales = self.gate_up_scales, self.down_scales, self.limit
        return path.run_experts(self.x, self.gate_up, self.down, *routes, *scales)

    def run_reference(self) -> Tensor:
        """Return the outputs of the reference, in fp64 of these very inputs."""
        routes = self.weights.double(), self.experts, self.activation
        scales = self.gate_up_scales, self.down_scales, self.limit
        return run_experts_reference(self.x.double(), self.gate_up, self.down, *routes, *scales)

    def in_fp8(self, seed: int = 0) -> Batch:
        """Return the batch with weights in FP8 in place of its own, of which no scale of an expert that none has is a
        number."""
        num_experts, width, inner = self.down.shape
        halves, device = self.gate_up.shape[1] // inner, self.x.device
        first, of_first = stored(num_experts * halves, inner, width, seed=seed)
        second, of_second = stored(num_experts, width, inner, seed=seed + 1)
        of_first = of_first.view(num_experts, halves * of_first.shape[1], -1)
        unused = ~torch.isin(torch.arange(num_experts), self.experts.cpu())
        of_first[unused], of_second[unused] = torch.nan, torch.nan
        return replace(
            self,
            gate_up=first.view(num_experts, halves * inner, width).to(device),
            down=second.to(device),
            gate_up_scales=of_first.to(device),
            down_scales=of_second.to(device),
        )

    def rolled(self, shift: int) -> Batch:
        """Return the batch with its tokens in other places, at the same strides: a kernel is compiled for these."""
        x = torch.empty_strided(self.x.shape, self.x.stride(), dtype=self.x.dtype, device=self.x.device)
        x.copy_(self.x.roll(shift, 0))
        return replace(self, x=x, weights=self.weights.roll(shift, 0), experts=self.experts.roll(shift, 0))

    def alone(self, row: int) -> Batch:
        """Return the batch in which no token has experts but one."""
        experts = torch.full_like(self.experts, -1)
        experts[row] = self.experts[row]
        return replace(self, experts=experts)


# Makes the experts of tokens `[T, C]` of their numbers and a generator.
Choose = Callable[[int, int, int, torch.Generator], Tensor]


def anything(num_tokens: int, choices: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Different experts of each token."""
    return torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :choices]


def one(num_tokens: int, choices: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """The last expert first, and others behind it, the same for all tokens."""
    return (num_experts - 1 - torch.arange(choices)).repeat(num_tokens, 1)


def some(num_tokens: int, choices: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """None now and then, as -1 or as a number that is no expert's; no expert at all for the last tokens."""
    experts = anything(num_tokens, choices, num_experts, generator)
    dropped = torch.rand(experts.shape, generator=generator)
    experts[dropped < 0.2], experts[dropped > 0.8] = -1, num_experts
    experts[num_tokens * 2 // 3 :] = -1
    return experts


def make_batch(
    path: Path,
    num_tokens: int,
    choices: int,
    num_experts: int,
    width: int = 48,
    inner: int = 40,
    choose: Choose = anything,
    seed: int = 0,
    *,
    integers: bool = False,
    activation: str = "silu",
) -> Batch:
    """Make inputs on the path's device; rows of x lie apart, with NaN between.

    integers: small ones, so that sums of gate and up are exact.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        if integers:
            return torch.randint(-1, 2, size, generator=generator).float()
        return torch.randn(*size, generator=generator)

    experts = choose(num_tokens, choices, num_experts, generator).to(torch.int32)
    gate_up = draw(num_experts, (2 if activation == "silu" else 1) * inner, width) * width**-0.5
    down = draw(num_experts, width, inner) * inner**-0.5
    unused = torch.ones(num_experts, dtype=torch.bool)
    is_expert = (experts >= 0) & (experts < num_experts)
    unused[experts[is_expert].long()] = False
    gate_up[unused], down[unused] = torch.nan, torch.nan
    weights = torch.rand(num_tokens, choices, generator=generator)
    weights[~is_expert] = torch.nan
    x = draw(num_tokens, width + 8)
    x[:, width:] = torch.nan
    to, dtype = path.device, path.dtype
    gate_up, down, weights, experts = gate_up.to(to, dtype), down.to(to, dtype), weights.to(to), experts.to(to)
    return Batch(x.to(to, dtype)[:, :width], gate_up, down, weights, experts, activation)
