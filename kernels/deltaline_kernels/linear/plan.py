"""Which products of few tokens are made by the kernel here, and how each is cut into programs.

A plan follows from sizes, dtype and device, never from what tokens hold: the order of every sum is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_kernels.device.overlap import can_overlap
from deltaline_kernels.device.sizes import cdiv

# Tokens of a product whose time is that of reading the weight.
MAX_TOKENS = 64
# Values of a row of a weight are a multiple of these, so that it is read 16 bytes at a time.
ROW_UNIT = 8


@dataclass(frozen=True)
class ProductPlan:
    """Programs of all tokens, up to `rows` of them, and `block_n` outputs, `block_k` inputs at a time, of which
    `stages` blocks are on their way."""

    rows: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    def options(self, inputs: int) -> dict[str, int]:
        """Return what the kernel is compiled with."""
        return {
            "BLOCK_M": self.rows,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "STEPS": cdiv(inputs, self.block_k),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# By the most tokens.
PLANS = {16: ProductPlan(16, 32, 128, 4, 5), 64: ProductPlan(64, 64, 128, 4, 3)}


def plan_product(x: Tensor) -> ProductPlan | None:
    """Return how tokens x `[T, K]` meet a weight; None: as torch has it."""
    num_tokens, inputs = x.shape
    if (
        not 0 < num_tokens <= MAX_TOKENS
        or x.dtype == torch.float32
        or inputs % ROW_UNIT
        or x.stride(0) % ROW_UNIT
        or not can_overlap(x)
    ):
        return None
    return choose_plan(num_tokens)


def choose_plan(num_tokens: int) -> ProductPlan:
    """Return the plan of so many tokens, MAX_TOKENS at most."""
    return next(plan for most, plan in PLANS.items() if num_tokens <= most)
