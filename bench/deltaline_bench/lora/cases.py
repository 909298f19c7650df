"""The cases of LoRA with their bars. The figures are for an H200."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltaline_bench.bar import Bar, at_most_us
from deltaline_bench.case import ERROR_LIMITS, Case, Suite
from deltaline_bench.lora.batch import Batch, Shape
from deltaline_bench.lora.field import peers
from deltaline_bench.lora.sides import ours
from deltaline_bench.peers import Peers

# What a projection of queries, keys, values and gates, and one of two small gates, have side by side.
GATED_DELTA = (8192, 4096, 32, 32)


@dataclass(frozen=True)
class Row:
    """A row of the table: a case before its inputs exist; calling it makes them."""

    name: str
    what: str
    shape: Shape
    needed: tuple[Bar, ...] = ()
    aim: tuple[Bar, ...] = ()

    def __call__(self, device: torch.device, found: Peers) -> Case:
        batch, shape = Batch(self.shape, self.name, device), self.shape
        shapes = {
            "x": f"[{shape.num_tokens}, {shape.inputs}]",
            "out": " + ".join(map(str, shape.sizes)),
            "adapters": str(len(shape.ranks)),
            "rank": " to ".join(str(rank) for rank in sorted({min(shape.ranks), max(shape.ranks)}))
            if shape.ranks
            else "-",
        }
        return Case(
            name=self.name,
            what=self.what,
            shapes=shapes,
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


def _row(
    num_tokens: int,
    num_adapters: int,
    needed: float,
    aim: float,
    rank: int = 16,
    sizes: tuple[int, int] = (2048, 12288),
) -> Row:
    """Make a case of one slice whose adapters have the same rank."""
    inputs, outputs = sizes
    words = [f"{num_tokens} token{'s' * (num_tokens > 1)}", f"{num_adapters} adapter{'s' * (num_adapters > 1)}"]
    shape = Shape(num_tokens, inputs, (outputs,), (rank,) * num_adapters, rank)
    name = f"r{rank}-{num_tokens}-of-{num_adapters}"
    return Row(name, f"{', '.join(words)}", shape, (at_most_us(needed),), (at_most_us(aim),))


def _base(num_tokens: int) -> Row:
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
SUITE = Suite("lora", {row.name: row for row in ROWS})
