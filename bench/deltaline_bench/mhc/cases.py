"""The cases of hyper-connections with their bars. The figures are for an H200."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltaline_bench.bar import Bar, at_most_us
from deltaline_bench.case import ERROR_LIMITS, Case, Suite
from deltaline_bench.mhc.batch import FUSED, HEAD, POST, PRE, Batch, Shape
from deltaline_bench.mhc.field import peers
from deltaline_bench.mhc.sides import ours
from deltaline_bench.peers import Peers


@dataclass(frozen=True)
class Row:
    """A row of the table: a case before its inputs exist; calling it makes them."""

    name: str
    shape: Shape
    needed: tuple[Bar, ...] = ()
    aim: tuple[Bar, ...] = ()

    def __call__(self, device: torch.device, found: Peers) -> Case:
        batch, shape = Batch(self.shape, self.name, device), self.shape
        return Case(
            name=self.name,
            what=f"{shape.work}, {shape.num_tokens} token{'s' * (shape.num_tokens > 1)}",
            shapes={"residual": f"[{shape.num_tokens}, {shape.streams}, {shape.hidden}]"},
            dtype=shape.dtype,
            num_bytes=shape.num_bytes(),
            num_flops=shape.num_flops(),
            max_error=ERROR_LIMITS[shape.dtype],
            expected=batch.expected(),
            ours=ours(batch),
            peers=peers(batch, found),
            needed=self.needed,
            aim=self.aim,
        )


def _row(name: str, shape: Shape, needed: float, aim: float | None = None) -> Row:
    return Row(name, shape, (at_most_us(needed),), () if aim is None else (at_most_us(aim),))


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
    Row("fused-1x4096", Shape(FUSED, 1, 4096)),
    Row("fused-4096x4096", Shape(FUSED, 4096, 4096)),
    Row("pre-512x4096", Shape(PRE, 512, 4096)),
    Row("head-64x4096", Shape(HEAD, 64, 4096)),
    Row("pre-64x1280-of-8", Shape(PRE, 64, 1280, streams=8)),
    Row("pre-64x4096-fp16", Shape(PRE, 64, 4096, dtype=torch.float16)),
    Row("pre-64x4096-fp32", Shape(PRE, 64, 4096, dtype=torch.float32)),
)
SUITE = Suite("mhc", {row.name: row for row in ROWS})
