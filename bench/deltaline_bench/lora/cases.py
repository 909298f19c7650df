"""The cases of LoRA with their bars. The figures are for an H200."""

from __future__ import annotations

import torch

from deltaline_bench.bar import at_most_us, pair
from deltaline_bench.case import Suite
from deltaline_bench.family import Family, Row
from deltaline_bench.lora.batch import Batch, Shape
from deltaline_bench.lora.sides import ours, peers

FAMILY = Family(Batch, ours, peers)
# What a projection of queries, keys, values and gates, and one of two small gates, have side by side.
GATED_DELTA = (8192, 4096, 32, 32)


def _row(
    num_tokens: int,
    num_adapters: int,
    needed: float,
    aim: float,
    rank: int = 16,
    sizes: tuple[int, int] = (2048, 12288),
) -> Row[Shape]:
    """Make a case of one slice whose adapters have the same rank."""
    inputs, outputs = sizes
    words = [f"{num_tokens} token{'s' * (num_tokens > 1)}", f"{num_adapters} adapter{'s' * (num_adapters > 1)}"]
    shape = Shape(num_tokens, inputs, (outputs,), (rank,) * num_adapters, rank)
    name = f"r{rank}-{num_tokens}-of-{num_adapters}"
    return Row(name, ", ".join(words), shape, *pair(at_most_us, needed, aim))


def _base(num_tokens: int) -> Row[Shape]:
    """Make a case of tokens without adapters, which may cost what two empty kernels do."""
    shape = Shape(num_tokens, 2048, (12288,), (), 16)
    return Row(f"base-{num_tokens}", f"{num_tokens} tokens, no adapter", shape, (at_most_us(8),))


ROWS = (
    _row(1, 1, 8.5, 6.5),
    _row(64, 16, 14, 10),
    _row(256, 64, 38, 28),
    _row(8192, 8, 155, 125),
    _row(256, 64, 42, 32, 64, (4096, 4096)),
    _base(64),
    _base(8192),
    Row("packed-64-of-16", "64 tokens, 4 slices", Shape(64, 2048, GATED_DELTA, (16,) * 16, 16)),
    Row("mixed-256-of-64", "ranks 4 to 64", Shape(256, 4096, (4096,), (4, 8, 16, 64) * 16, 64)),
    Row("r256-8192-of-8", "8192 tokens, high ranks", Shape(8192, 2048, (12288,), (256,) * 8, 256)),
    Row("r16-64-of-16-fp16", "64 tokens, 16 adapters", Shape(64, 2048, (12288,), (16,) * 16, 16, torch.float16)),
)
SUITE = Suite("lora", FAMILY.cases(ROWS))
