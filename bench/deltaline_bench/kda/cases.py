"""The cases of KDA with their bars. The figures are for an H200."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deltaline_bench.bar import at_least_peers, at_most_us, pair
from deltaline_bench.case import Suite
from deltaline_bench.family import Family, Row
from deltaline_bench.kda.batch import Batch
from deltaline_bench.kda.shape import Shape
from deltaline_bench.kda.sides import ours, peers
from deltaline_bench.lines import Mode

FAMILY = Family(Batch, ours, peers)


def _prefill(name: str, what: str, lengths: Sequence[int], num_heads: int, needed: float, aim: float) -> Row[Shape]:
    """What is needed is what FlashKDA publishes."""
    shape = Shape(Mode.PREFILL, tuple(lengths), num_heads, num_heads)
    return Row(f"prefill-{name}", f"{num_heads} heads, {what}", shape, *pair(at_most_us, needed, aim))


def _decoding(num_rows: int, state: torch.dtype = torch.float32) -> Row[Shape]:
    suffix = "" if state is torch.float32 else "-bf16-state"
    shape = Shape(Mode.DECODE, (1,) * num_rows, 32, 32, state=state, lower_bound=None)
    what = f"{num_rows} rows of 1 token, lines scattered, softplus for a gate"
    return Row(f"decode-{num_rows}{suffix}", what, shape, *pair(at_least_peers, 1.0, 1.1))


ROWS = (
    _prefill("1x8192", "1 row of 8192", [8192], 64, 1283, 950),
    _prefill("10-rows", "10 rows of 8192 tokens in all", [820, 819] * 4 + [818, 818], 64, 905, 750),
    _prefill("1x8192-h8", "1 row of 8192", [8192], 8, 318, 280),
    _prefill("1x65536-h4", "1 row of 65536", [65536], 4, 966, 850),
    _decoding(1),
    _decoding(16),
    _decoding(64),
    _decoding(256),
    _decoding(64, torch.bfloat16),
)
VERIFY = Row(
    "verify-64",
    "64 rows of 1 + 4 after 1 to 5 accepted drafts; bars in the speed of a decode of 64 rows",
    Shape(Mode.VERIFY, (5,) * 64, 32, 32, lower_bound=None),
    # At most 2 times the decode; the aim 1.4.
    *pair(at_least_peers, 0.5, 0.715),
    beside=("kda, decode", Shape(Mode.DECODE, (1,) * 64, 32, 32, lower_bound=None)),
)
SUITE = Suite("kda", FAMILY.cases([*ROWS, VERIFY]))
