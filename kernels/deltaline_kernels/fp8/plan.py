"""How products with FP8 weights are cut into programs.

A plan follows from the bucket of the number of tokens, the sizes and the dtype, never from contents: within a bucket
the order of every sum is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deltaline_kernels.checks import FP8_BLOCK
from deltaline_kernels.device.sizes import cdiv

ANY = 1 << 62
# Programs that give each multiprocessor of a Hopper GPU one.
PROGRAMS = 132
# Outputs of a program, at least.
LEAST_OUTPUTS = 16


@dataclass(frozen=True)
class Plan:
    """Programs of `tokens` tokens and `outputs` outputs.

    Args:
        ways: blocks of inputs whose sums are apart until the end, so that as many warps share a product of few tokens.
        inputs: of a way at a time, a divisor of a block.
        stages: times ways * inputs of them are on their way.
    """

    tokens: int
    outputs: int
    ways: int
    inputs: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Bucket:
    """A row of the table: batches of at most `tokens` tokens."""

    tokens: int
    plan: Plan


# Not measured yet. What a few tokens take is to read the weight: about 32 KB of it are on their way in a program.
# Products of 64 or more tokens are asynchronous ones, whose operands come from shared memory.
BUCKETS = (
    Bucket(16, Plan(16, 32, 4, 128, warps=4, stages=3)),
    Bucket(32, Plan(32, 32, 2, 128, warps=4, stages=4)),
    Bucket(64, Plan(64, 64, 1, 128, warps=4, stages=4)),
    Bucket(256, Plan(64, 128, 1, 128, warps=4, stages=3)),
    Bucket(ANY, Plan(128, 128, 1, 128, warps=8, stages=3)),
)
# Products of fp32 are computed without tensor cores, and their operands are twice as large.
EXACT = Plan(16, 32, 1, 32, warps=4, stages=2)


def choose_plan(num_tokens: int, outputs: int, dtype: torch.dtype) -> Plan:
    """Return the plan of a batch. So few outputs that they don't fill the GPU are cut smaller, which changes no sum."""
    if dtype == torch.float32:
        return EXACT
    plan = next(bucket.plan for bucket in BUCKETS if num_tokens <= bucket.tokens)
    while plan.tokens < 64 and plan.outputs > LEAST_OUTPUTS and cdiv(outputs, plan.outputs) < PROGRAMS:
        plan = replace(plan, outputs=plan.outputs // 2)
    assert FP8_BLOCK % plan.outputs == 0 and FP8_BLOCK % plan.inputs == 0  # so that a program's block has one scale
    return plan
