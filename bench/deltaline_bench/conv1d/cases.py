"""The cases of the convolution with their bars. The figures are for an H200."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deltaline_bench.bar import Bar, at_least_copy, at_least_peers, at_most_us
from deltaline_bench.case import ERROR_LIMITS, Case, Suite
from deltaline_bench.conv1d.batch import Batch, Mode, Shape
from deltaline_bench.conv1d.field import peers
from deltaline_bench.conv1d.sides import ours
from deltaline_bench.peers import Peers

RAGGED = (37, 513, 4096, 1, 2900, 8000, 64, 773)
SHORT = tuple(random.Random(0).choices(range(3, 41), k=512))


@dataclass(frozen=True)
class Row:
    """A row of the table: a case before its inputs exist; calling it makes them."""

    name: str
    what: str
    mode: Mode
    lengths: Sequence[int]
    needed: tuple[Bar, ...] = ()
    aim: tuple[Bar, ...] = ()
    channels: int = 8192
    width: int = 4
    dtype: torch.dtype = field(default=torch.bfloat16)
    split: tuple[int, ...] | None = None

    def __call__(self, device: torch.device, found: Peers) -> Case:
        shape = Shape(self.mode, tuple(self.lengths), self.channels, self.width, self.dtype)
        batch = Batch(shape, self.name, device)
        shapes = {
            "x": f"[{shape.num_tokens}, {shape.channels}]",
            "rows": str(shape.num_rows),
            "width": str(shape.width),
        }
        return Case(
            name=self.name,
            what=self.what,
            shapes=shapes,
            dtype=self.dtype,
            num_bytes=shape.num_bytes(),
            num_flops=shape.num_flops(),
            max_error=ERROR_LIMITS[self.dtype],
            expected=batch.expected(),
            ours=ours(batch, self.split),
            peers=peers(batch, found),
            needed=self.needed,
            aim=self.aim,
        )


def _prefill(name: str, what: str, lengths: Sequence[int], needed: float, aim: float, channels: int = 8192) -> Row:
    bars = ((at_least_copy(needed),), (at_least_copy(aim),))
    return Row(name, what, Mode.PREFILL, lengths, *bars, channels=channels)


def _update(num_rows: int, needed: float, aim: float) -> Row:
    what = f"{num_rows} rows of 1 token, lines scattered"
    bars = ((at_most_us(needed),), (at_most_us(aim),))
    return Row(f"update-{num_rows}", what, Mode.UPDATE, [1] * num_rows, *bars)


LEAD = (at_least_copy(85), at_least_peers(1.38))
ROWS = (
    Row("prefill-8x2048", "8 rows of 2048", Mode.PREFILL, [2048] * 8, LEAD, (at_least_copy(90),)),
    Row("prefill-1x16384", "1 row of 16384", Mode.PREFILL, [16384], LEAD, (at_least_copy(90),)),
    _prefill("prefill-ragged", "8 rows of 1 to 8000", RAGGED, 83, 88),
    _prefill("prefill-d10240", "4 rows of 2048", [2048] * 4, 84, 88, 10240),
    _prefill("prefill-d12288", "4 rows of 2048", [2048] * 4, 84, 88, 12288),
    _prefill("prefill-d2048", "4 rows of 2048", [2048] * 4, 72, 88, 2048),
    _update(1, 5.2, 4.8),
    _update(64, 7.2, 6.5),
    _update(256, 12.5, 11.5),
    _update(1024, 39, 36),
    Row("verify-256", "256 rows of 1 + 3", Mode.VERIFY, [4] * 256, (at_most_us(23),), (at_most_us(21),)),
    Row("prefill-d8200-odd", "no multiple of a tile", Mode.PREFILL, [2048] * 8, channels=8200),
    Row("prefill-split", "q, k, v apart", Mode.PREFILL, [2048] * 8, split=(2048, 2048, 4096)),
    Row("prefill-8x2048-fp16", "8 rows of 2048", Mode.PREFILL, [2048] * 8, dtype=torch.float16),
    Row("prefill-8x2048-fp32", "8 rows of 2048", Mode.PREFILL, [2048] * 8, dtype=torch.float32),
    Row("update-256-fp16", "256 rows of 1 token", Mode.UPDATE, [1] * 256, dtype=torch.float16),
    Row("update-256-fp32", "256 rows of 1 token", Mode.UPDATE, [1] * 256, dtype=torch.float32),
    Row("prefill-many-short", "512 rows of 3 to 40", Mode.PREFILL, SHORT),
    Row("prefill-w2", "8 rows of 2048, 2 taps", Mode.PREFILL, [2048] * 8, width=2),
)
SUITE = Suite("conv1d", {row.name: row for row in ROWS})
