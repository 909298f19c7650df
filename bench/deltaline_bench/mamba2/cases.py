"""The cases of the Mamba2 recurrence with their bars. The figures are for an H200."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deltaline_bench.bar import at_least_peers, at_most_us, pair
from deltaline_bench.case import Suite
from deltaline_bench.family import Family, Row
from deltaline_bench.lines import Mode
from deltaline_bench.mamba2.batch import Batch
from deltaline_bench.mamba2.shape import Shape
from deltaline_bench.mamba2.sides import ours, peers

FAMILY = Family(Batch, ours, peers)


def _prefill(lengths: Sequence[int], needed: float, aim: float) -> Row[Shape]:
    shape = Shape(Mode.PREFILL, tuple(lengths))
    name = f"prefill-{len(lengths)}x{lengths[0]}"
    what = f"{len(lengths)} rows of {lengths[0]}, every other one fresh"
    return Row(name, what, shape, *pair(at_most_us, needed, aim))


def _decoding(num_rows: int, needed: float | None, aim: float, state: torch.dtype = torch.float32) -> Row[Shape]:
    suffix = "" if state is torch.float32 else "-bf16-state"
    shape = Shape(Mode.DECODE, (1,) * num_rows, state=state)
    what = f"{num_rows} rows of 1 token, lines scattered"
    return Row(f"decode-{num_rows}{suffix}", what, shape, *pair(at_most_us, needed, aim))


ROWS = (
    _prefill([2048] * 8, 450, 350),
    _prefill([8192], 240, 190),
    _prefill([2048], 90, 70),
    _decoding(1, None, 6.5),
    _decoding(16, None, 40),
    _decoding(64, 148, 140),
    _decoding(256, 570, 545),
    _decoding(1024, 2260, 2160),
    _decoding(64, None, 75, torch.bfloat16),
    _decoding(256, 310, 290, torch.bfloat16),
    Row(
        "verify-64",
        "64 rows of 1 + 4 after 1 to 5 accepted drafts; bars in the speed of a decode of 64 rows",
        Shape(Mode.VERIFY, (5,) * 64),
        # At most 1.4 times the decode; the aim 1.25: 0.8x its speed is 1.25 times its time.
        *pair(at_least_peers, 0.715, 0.8),
        beside=("mamba2, decode", Shape(Mode.DECODE, (1,) * 64)),
    ),
    Row(
        "prefill-1x8192-waypoints",
        "1 row of 8192 that leaves its state every 512 tokens; the side to beat leaves none",
        Shape(Mode.PREFILL, (8192,), waypoints=512),
        *pair(at_least_peers, None, 0.97),
        beside=("mamba2, no waypoints", Shape(Mode.PREFILL, (8192,))),
    ),
)
SUITE = Suite("mamba2", FAMILY.cases(ROWS))
