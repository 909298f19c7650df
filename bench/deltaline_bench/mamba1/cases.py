"""The cases of the Mamba-1 recurrence with their bars. The times are for an H200."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deltaline_bench.bar import Bar, at_least_copy, at_least_peers, at_most_us, pair
from deltaline_bench.case import Suite
from deltaline_bench.family import Family, Row
from deltaline_bench.lines import Mode
from deltaline_bench.mamba1.batch import Batch
from deltaline_bench.mamba1.shape import Shape
from deltaline_bench.mamba1.sides import ours, peers

FAMILY = Family(Batch, ours, peers)


def _prefill(lengths: Sequence[int], needed: tuple[Bar, ...], aim: Bar) -> Row[Shape]:
    name = f"prefill-{len(lengths)}x{lengths[0]}"
    what = f"{len(lengths)} rows of {lengths[0]}, every other one fresh"
    return Row(name, what, Shape(Mode.PREFILL, tuple(lengths)), needed, (aim,))


def _decoding(num_rows: int, needed: Bar, aim: Bar, state: torch.dtype = torch.float32) -> Row[Shape]:
    suffix = "" if state is torch.float32 else "-bf16-state"
    shape = Shape(Mode.DECODE, (1,) * num_rows, state=state)
    what = f"{num_rows} rows of 1 token, lines scattered"
    return Row(f"decode-{num_rows}{suffix}", what, shape, (needed,), (aim,))


LEVEL = at_least_peers(1.0), at_least_peers(1.1)
ROWS = (
    _prefill([2048] * 8, (at_least_peers(1.3), at_most_us(1960)), at_most_us(1000)),
    _prefill([8192], (at_least_peers(1.3), at_most_us(1005)), at_most_us(700)),
    _prefill([2048], (), at_least_peers(1.0)),
    _decoding(1, *LEVEL),
    _decoding(16, *LEVEL),
    _decoding(64, at_least_copy(85), at_least_peers(1.1)),
    _decoding(256, at_least_copy(85), at_least_peers(1.1)),
    _decoding(64, *LEVEL, torch.bfloat16),
    Row(
        "verify-64",
        "64 rows of 1 + 4 after 1 to 5 accepted drafts; bars in the speed of a decode of 64 rows",
        Shape(Mode.VERIFY, (5,) * 64),
        # At most 2 times the decode; the aim 1.4.
        *pair(at_least_peers, 0.5, 0.715),
        beside=("mamba1, decode", Shape(Mode.DECODE, (1,) * 64)),
    ),
    Row(
        "prefill-1x8192-waypoints",
        "1 row of 8192 that leaves its state every 512 tokens; the side to beat leaves none",
        Shape(Mode.PREFILL, (8192,), waypoints=512),
        *pair(at_least_peers, None, 0.97),
        beside=("mamba1, no waypoints", Shape(Mode.PREFILL, (8192,))),
    ),
)
SUITE = Suite("mamba1", FAMILY.cases(ROWS))
