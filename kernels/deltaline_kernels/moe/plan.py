"""How a batch is cut into programs of the experts' kernels.

A plan follows from the numbers of tokens, choices and experts and from the sizes and the dtype, never from which token
has which expert: the order of every sum is the same for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.device.sizes import cdiv, pow2

ANY = 1 << 62
HOPPER = (9, 0)
# Tokens that are computed at once, which bounds what is kept of their choices.
MAX_TOKENS = 16384
# So few tokens have few experts in common: each choice is computed for itself.
DIRECT_TOKENS = 4
# From so many choices per expert on, torch's grouped products are taken where there are any.
GROUPED_CHOICES = 48
# Bytes of weights that a program of the direct kernels has on their way.
DIRECT_BYTES = 64 << 10


@dataclass(frozen=True)
class DirectPlan:
    """Programs of `block_n` rows of the weights and `block_k` columns at a time."""

    block_n: int
    block_k: int
    steps: int
    warps: int
    unroll: int = 1


@dataclass(frozen=True)
class ProductPlan:
    """Programs of a tile of tokens and `block_n` outputs, `block_k` inputs at a time, `stages` blocks on their way."""

    block_n: int
    block_k: int
    warps: int
    stages: int

    def options(self, inputs: int, outputs: int) -> dict[str, int]:
        """Return what the kernel of products is compiled with."""
        block_k = max(16, min(self.block_k, pow2(inputs)))
        return {
            "BLOCK_N": max(16, min(self.block_n, pow2(outputs))),
            "BLOCK_K": block_k,
            "STEPS": cdiv(inputs, block_k),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@dataclass(frozen=True)
class TilePlan:
    """Tiles of `rows` choices of one expert.

    Args:
        first, second: products with gate_up and with down.
        wide: the outputs of a choice are kept in fp32 until they are added up; else in the dtype of the tokens.
    """

    rows: int
    first: ProductPlan
    second: ProductPlan
    wide: bool


@dataclass(frozen=True)
class Bucket:
    """A row of the table: batches of at most `choices` per expert on average."""

    choices: int
    plan: TilePlan


# Products of 64 or more choices are asynchronous ones, whose operands come from shared memory.
BUCKETS = (
    Bucket(8, TilePlan(16, ProductPlan(32, 128, 4, 4), ProductPlan(64, 128, 4, 4), wide=True)),
    Bucket(24, TilePlan(32, ProductPlan(32, 128, 4, 4), ProductPlan(64, 128, 4, 4), wide=True)),
    Bucket(64, TilePlan(64, ProductPlan(64, 64, 4, 4), ProductPlan(128, 64, 4, 4), wide=False)),
    Bucket(ANY, TilePlan(128, ProductPlan(128, 64, 8, 3), ProductPlan(256, 64, 8, 3), wide=False)),
)
# Products of fp32 are computed without tensor cores, and their operands are twice as large.
EXACT_PLAN = TilePlan(16, ProductPlan(32, 32, 4, 2), ProductPlan(32, 32, 4, 2), wide=True)


def plan_tiles(num_tokens: int, choices: int, num_experts: int, dtype: torch.dtype) -> TilePlan:
    """Return the plan of tiles for a batch."""
    if dtype == torch.float32:
        return EXACT_PLAN
    mean = cdiv(num_tokens * choices, num_experts)
    return next(bucket.plan for bucket in BUCKETS if mean <= bucket.choices)


def is_grouped(num_tokens: int, choices: int, num_experts: int) -> bool:
    """Return whether torch's grouped products are taken if there are any."""
    return num_tokens * choices >= GROUPED_CHOICES * num_experts


def plan_direct_first(inputs: int) -> DirectPlan:
    """Return how gate_up meets the tokens: `block_n` rows of gate and as many of up."""
    block_k = min(512, pow2(inputs))
    return DirectPlan(8, block_k, cdiv(inputs, block_k), 4, 2)


def plan_direct_second(inputs: int, choices: int, itemsize: int) -> DirectPlan:
    """Return how down meets what gate_up left: `block_n` rows of it for each choice of a token."""
    block_k = min(512, pow2(inputs))
    rows = max(1, DIRECT_BYTES // (pow2(choices) * block_k * itemsize))
    return DirectPlan(min(8, rows), block_k, cdiv(inputs, block_k), 8 if rows >= 4 else 4)


def can_overlap(tensor: Tensor) -> bool:
    """Return whether a launch may start while the one before it still runs: from Hopper on."""
    return tensor.device.type != "cpu" and torch.cuda.get_device_capability(tensor.device) >= HOPPER


def launch_options(*, dependent: bool) -> dict[str, Any]:
    """Return how a kernel is launched that may be `dependent` on one which still runs."""
    return {"launch_pdl": True} if dependent else {}
