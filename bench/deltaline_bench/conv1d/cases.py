"""The cases of the convolution with their bars. The figures are for an H200."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from deltaline_bench.bar import Bar, at_least_copy, at_least_peers, at_most_us, pair
from deltaline_bench.case import Suite
from deltaline_bench.conv1d.batch import Batch, Shape
from deltaline_bench.conv1d.sides import ours, peers
from deltaline_bench.family import Family, Row
from deltaline_bench.lines import Mode

FAMILY = Family(Batch, ours, peers)
RAGGED = (37, 513, 4096, 1, 2900, 8000, 64, 773)
SHORT = tuple(random.Random(0).choices(range(3, 41), k=512))


def _row(
    name: str,
    what: str,
    mode: Mode,
    lengths: Sequence[int],
    needed: tuple[Bar, ...] = (),
    aim: tuple[Bar, ...] = (),
    **sizes: Any,
) -> Row[Shape]:
    return Row(name, what, Shape(mode, tuple(lengths), **sizes), needed, aim)


def _prefill(
    name: str, what: str, lengths: Sequence[int], needed: float, aim: float, channels: int = 8192
) -> Row[Shape]:
    return _row(name, what, Mode.PREFILL, lengths, *pair(at_least_copy, needed, aim), channels=channels)


def _update(num_rows: int, needed: float, aim: float) -> Row[Shape]:
    what = f"{num_rows} rows of 1 token, lines scattered"
    return _row(f"update-{num_rows}", what, Mode.DECODE, [1] * num_rows, *pair(at_most_us, needed, aim))


LEAD = (at_least_copy(85), at_least_peers(1.38))
ROWS = (
    _row("prefill-8x2048", "8 rows of 2048", Mode.PREFILL, [2048] * 8, LEAD, (at_least_copy(90),)),
    _row("prefill-1x16384", "1 row of 16384", Mode.PREFILL, [16384], LEAD, (at_least_copy(90),)),
    _prefill("prefill-ragged", "8 rows of 1 to 8000", RAGGED, 83, 88),
    _prefill("prefill-d10240", "4 rows of 2048", [2048] * 4, 84, 88, 10240),
    _prefill("prefill-d12288", "4 rows of 2048", [2048] * 4, 84, 88, 12288),
    _prefill("prefill-d2048", "4 rows of 2048", [2048] * 4, 72, 88, 2048),
    _update(1, 5.2, 4.8),
    _update(64, 7.2, 6.5),
    _update(256, 12.5, 11.5),
    _update(1024, 39, 36),
    _row("verify-256", "256 rows of 1 + 3", Mode.VERIFY, [4] * 256, *pair(at_most_us, 23, 21)),
    _row("prefill-d8200-odd", "no multiple of a tile", Mode.PREFILL, [2048] * 8, channels=8200),
    _row("prefill-split", "q, k, v apart", Mode.PREFILL, [2048] * 8, split=(2048, 2048, 4096)),
    _row("prefill-8x2048-fp16", "8 rows of 2048", Mode.PREFILL, [2048] * 8, dtype=torch.float16),
    _row("prefill-8x2048-fp32", "8 rows of 2048", Mode.PREFILL, [2048] * 8, dtype=torch.float32),
    _row("update-256-fp16", "256 rows of 1 token", Mode.DECODE, [1] * 256, dtype=torch.float16),
    _row("update-256-fp32", "256 rows of 1 token", Mode.DECODE, [1] * 256, dtype=torch.float32),
    _row("prefill-many-short", "512 rows of 3 to 40", Mode.PREFILL, SHORT),
    _row("prefill-w2", "8 rows of 2048, 2 taps", Mode.PREFILL, [2048] * 8, width=2),
)
WAYPOINTS = Row(
    "prefill-1x8192-waypoints",
    "1 row of 8192 that leaves its last inputs every 512 tokens; the side to beat leaves none",
    Shape(Mode.PREFILL, (8192,), waypoints=512),
    *pair(at_least_peers, None, 0.97),
    beside=("conv1d, no waypoints", Shape(Mode.PREFILL, (8192,))),
)
SUITE = Suite("conv1d", FAMILY.cases((*ROWS, WAYPOINTS)))
