"""How a batch is cut into programs of the experts' kernels.

A plan follows from the numbers of tokens, choices and experts and from the sizes and the dtype, never from which token
has which expert: the order of every sum is the same for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_kernels.checks import FP8_BLOCK
from deltaline_kernels.device.overlap import can_overlap
from deltaline_kernels.device.sizes import SHARED_BYTES, cdiv, find_shared_bytes, pow2

ANY = 1 << 62
# Tokens that are computed at once, which bounds what is kept of their choices.
MAX_TOKENS = 16384
# So few tokens have few experts in common: each choice is computed for itself.
DIRECT_TOKENS = 4
# From so many choices per expert on they are sorted, where there are tensor cores and copies of whole tiles for them,
# and a Hopper's shared memory.
SORTED_CHOICES = 64
# Values of a row of what is copied in tiles are a multiple of these.
ROW_UNIT = 8
# And they begin at a multiple of these bytes.
COPY_BYTES = 16
# Weights of gate, and as many of up, that a program of the first direct kernel has on their way.
DIRECT_VALUES = 4096
# Bytes of weights that a program of the second direct kernel has on their way.
DIRECT_BYTES = 32 << 10


@dataclass(frozen=True)
class DirectPlan:
    """Programs of `block_n` rows of the weights and `block_k` columns at a time."""

    block_n: int
    block_k: int
    steps: int
    warps: int


@dataclass(frozen=True)
class ProductPlan:
    """Programs of a tile of tokens and `block_n` outputs, `block_k` inputs at a time, `stages` blocks on their way."""

    block_n: int
    block_k: int
    warps: int
    stages: int

    def options(self, inputs: int, outputs: int, *, in_fp8: bool = False) -> dict[str, int]:
        """Return what the kernel of products is compiled with; in_fp8: with outputs and inputs of one block of a weight
        in FP8, whose sum is by itself until it meets its scale."""
        block_k = max(16, min(self.block_k, pow2(inputs)))
        block_n = min(self.block_n, FP8_BLOCK) if in_fp8 else self.block_n
        return {
            "BLOCK_N": max(16, min(block_n, pow2(outputs))),
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
# Tiles of sorted choices: rows, and products with gate_up and with down.
SORTED_ROWS = 128
SORTED_FIRST, SORTED_SECOND = ProductPlan(128, 64, 8, 4), ProductPlan(256, 64, 8, 4)
# Products of fp32 are computed without tensor cores, and their operands are twice as large.
EXACT_PLAN = TilePlan(16, ProductPlan(32, 32, 4, 2), ProductPlan(32, 32, 4, 2), wide=True)


def plan_tiles(num_tokens: int, choices: int, num_experts: int, dtype: torch.dtype) -> TilePlan:
    """Return the plan of tiles for a batch."""
    if dtype == torch.float32:
        return EXACT_PLAN
    mean = cdiv(num_tokens * choices, num_experts)
    return next(bucket.plan for bucket in BUCKETS if mean <= bucket.choices)


def is_sorted(num_tokens: int, choices: int, x: Tensor, down: Tensor) -> bool:
    """Return whether choices are sorted for tokens like x and experts `[E, H, I]`; else they are listed in tiles."""
    num_experts, width, inner = down.shape
    return (
        num_tokens * choices >= SORTED_CHOICES * num_experts
        and x.dtype != torch.float32
        and width % ROW_UNIT == 0
        and inner % max(ROW_UNIT, COPY_BYTES // down.element_size()) == 0
        and down.data_ptr() % COPY_BYTES == 0
        and can_overlap(x)
        and find_shared_bytes(x.device) >= SHARED_BYTES
    )


def plan_direct_first(inputs: int) -> DirectPlan:
    """Return how gate_up meets the tokens: `block_n` rows of gate and as many of up."""
    block_k = min(2048, pow2(inputs))
    return DirectPlan(min(8, DIRECT_VALUES // block_k), block_k, cdiv(inputs, block_k), 2)


def plan_direct_second(inputs: int, choices: int, itemsize: int) -> DirectPlan:
    """Return how down meets what gate_up left: `block_n` rows of it for each choice of a token."""
    block_k = min(512, pow2(inputs))
    rows = min(8, max(1, DIRECT_BYTES // (pow2(choices) * block_k * itemsize)))
    return DirectPlan(rows, block_k, cdiv(inputs, block_k), max(1, min(4, rows)))
