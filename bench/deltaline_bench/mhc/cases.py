"""The cases of hyper-connections with their bars. The figures are for an H200."""

from __future__ import annotations

import torch

from deltaline_bench.bar import at_most_us, pair
from deltaline_bench.case import Suite
from deltaline_bench.family import Family, Row
from deltaline_bench.mhc.batch import FUSED, HEAD, POST, PRE, Batch, Shape
from deltaline_bench.mhc.sides import ours, peers

FAMILY = Family(Batch, ours, peers)


def _row(name: str, shape: Shape, needed: float | None = None, aim: float | None = None) -> Row[Shape]:
    what = f"{shape.work}, {shape.num_tokens} token{'s' * (shape.num_tokens > 1)}"
    return Row(name, what, shape, *pair(at_most_us, needed, aim))


ROWS = (
    _row("post-4096x4096", Shape(POST, 4096, 4096), 78, 75),
    _row("post-8192x7168", Shape(POST, 8192, 7168), 260, 255),
    _row("post-1x4096", Shape(POST, 1, 4096), 5.0),
    _row("post-64x4096", Shape(POST, 64, 4096), 5.7),
    _row("pre-1x4096", Shape(PRE, 1, 4096), 14, 10),
    _row("pre-64x4096", Shape(PRE, 64, 4096), 16, 12),
    _row("pre-4096x4096", Shape(PRE, 4096, 4096), 85, 55),
    _row("pre-4096x7168", Shape(PRE, 4096, 7168), 148, 95),
    _row("fused-64x4096", Shape(FUSED, 64, 4096), 18, 14),
    _row("fused-1x4096", Shape(FUSED, 1, 4096)),
    _row("fused-4096x4096", Shape(FUSED, 4096, 4096)),
    _row("pre-512x4096", Shape(PRE, 512, 4096)),
    _row("head-64x4096", Shape(HEAD, 64, 4096)),
    _row("pre-64x1280-of-8", Shape(PRE, 64, 1280, streams=8)),
    _row("pre-64x4096-fp16", Shape(PRE, 64, 4096, dtype=torch.float16)),
    _row("pre-64x4096-fp32", Shape(PRE, 64, 4096, dtype=torch.float32)),
)
SUITE = Suite("mhc", FAMILY.cases(ROWS))
