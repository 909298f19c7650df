"""How products with FP8 weights are computed: which of three ways, and how it is cut into programs.

A plan follows from the bucket of the number of tokens, the sizes and the dtype, never from contents: within a bucket
the order of every sum is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OneRow:
    """Programs of `outputs` outputs that read `blocks` blocks of inputs at a time, for one token."""

    outputs: int
    blocks: int
    warps: int


@dataclass(frozen=True)
class FewRows:
    """Programs of `tokens` tokens and `outputs` outputs; each of `parts` parts of the inputs has its own."""

    tokens: int
    outputs: int
    parts: int
    warps: int
    stages: int


@dataclass(frozen=True)
class ManyRows:
    """The weight times its scales is written out, whole blocks of rows of at most `values` values at a time, and
    multiplied by the library."""

    values: int


Plan = OneRow | FewRows | ManyRows


@dataclass(frozen=True)
class Bucket:
    """A row of the table: batches of at most `tokens` tokens."""

    tokens: int
    plan: Plan


BUCKETS = (
    Bucket(1, OneRow(8, 4, warps=4)),
    Bucket(16, FewRows(16, 64, 4, warps=4, stages=4)),
    Bucket(32, FewRows(32, 64, 4, warps=4, stages=4)),
    Bucket(128, FewRows(64, 128, 4, warps=4, stages=3)),
)
MANY = ManyRows(1 << 26)


def choose_plan(num_tokens: int, dtype: torch.dtype) -> Plan:
    """Return the plan of a batch. Tensor cores know no fp32."""
    if dtype == torch.float32:
        return MANY
    return next((bucket.plan for bucket in BUCKETS if num_tokens <= bucket.tokens), MANY)
