"""The cases of the gated delta rule with their bars. The figures are for an H200."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from deltaline_bench.bar import Bar, at_least_peers, at_most_us, pair
from deltaline_bench.case import Case, SideMaker, Suite
from deltaline_bench.family import Family, Row
from deltaline_bench.gated_delta.accuracy import hold_errors_to
from deltaline_bench.gated_delta.batch import Batch
from deltaline_bench.gated_delta.mixer import Mixer
from deltaline_bench.gated_delta.shape import Inputs, Shape
from deltaline_bench.gated_delta.sides import ours, peers
from deltaline_bench.lines import Mode
from deltaline_bench.peers import Peers

RAGGED = (37, 513, 4096, 1, 2900, 8000, 64, 773)
# What a hard input may cost, whatever it costs the field.
HARD_ERROR = 5e-2
# The side that bars in multiples of a decode look at: 0.8x its speed is 1.25 times its time.
DECODE = "gated_delta, decode"


def decode_alone(batch: Batch, found: Peers) -> Mapping[str, SideMaker]:
    """Return the rule without the mixer around it."""
    return {DECODE: ours(batch)["deltaline"]}


RULE = Family(Batch, ours, peers)
MIXER = Family(Mixer, lambda mixer: {"deltaline": mixer.side}, decode_alone)


def hard_case(row: Row[Shape], device: torch.device, found: Peers) -> Case:
    """Make a prefill of which no tensor may be further from the truth than fla's."""
    return hold_errors_to(RULE.make(row, device, found), "fla", ("fla", "fla, gates given"))


def _prefill(
    name: str,
    what: str,
    lengths: Sequence[int],
    heads: tuple[int, int] = (16, 32),
    needed: tuple[Bar, ...] = (),
    aim: tuple[Bar, ...] = (),
) -> Row[Shape]:
    shape = Shape(Mode.PREFILL, tuple(lengths), *heads)
    return Row(name, f"{heads[0]}/{heads[1]} heads, {what}", shape, needed, aim)


def _hard(
    name: str, what: str, inputs: Inputs, lengths: tuple[int, ...] = (1, 8192), heads: tuple[int, int] = (16, 32)
) -> Row[Shape]:
    """The last row continues a random state; the one before it has a single token."""
    shape = Shape(Mode.PREFILL, lengths, *heads, inputs=inputs)
    return Row(f"accuracy-{name}", what, shape, max_error=HARD_ERROR)


def _decoding(num_rows: int, needed: float, aim: float, state: torch.dtype = torch.float32) -> Row[Shape]:
    suffix = "" if state is torch.float32 else "-bf16-state"
    shape = Shape(Mode.DECODE, (1,) * num_rows, state=state)
    what = f"{num_rows} rows of 1 token, lines scattered"
    return Row(f"decode-{num_rows}{suffix}", what, shape, *pair(at_most_us, needed, aim))


def _mixer(num_rows: int, needed: float, aim: float) -> Row[Shape]:
    """Give the bars as multiples of the decode's speed."""
    what = f"{num_rows} rows: convolution, gates, rule, norm; the side to beat is the rule alone"
    shape = Shape(Mode.DECODE, (1,) * num_rows)
    return Row(f"mixer-{num_rows}", what, shape, *pair(at_least_peers, needed, aim))


LEAD = (at_most_us(650), at_least_peers(2.8))
ROWS = (
    _prefill("prefill-4x8192", "4 rows of 8192", [8192] * 4, needed=LEAD, aim=(at_most_us(400),)),
    _prefill("prefill-8x2048", "8 rows of 2048", [2048] * 8, (16, 32), *pair(at_most_us, 360, 220)),
    _prefill("prefill-ragged", "8 rows of 1 to 8000", RAGGED, (16, 32), *pair(at_most_us, 500, 300)),
    _prefill("prefill-1x8192", "1 row of 8192", [8192], (16, 32), *pair(at_most_us, 420, 280)),
    _prefill("prefill-1x2048", "1 row of 2048", [2048], (16, 32), *pair(at_most_us, 130, 100)),
    _prefill("prefill-h2x8", "1 row of 32768", [32768], (2, 8), (at_least_peers(1.6),), (at_most_us(320),)),
    _prefill("prefill-h2x8-long", "1 row of 65536", [65536], (2, 8), *pair(at_most_us, 380, 330)),
    _prefill("prefill-h16x64", "4 rows of 8192", [8192] * 4, (16, 64)),
    _prefill("prefill-h16x48", "4 rows of 8192", [8192] * 4, (16, 48)),
    _decoding(1, 7.5, 6.5),
    _decoding(16, 23, 20),
    _decoding(64, 74, 69),
    _decoding(256, 275, 265),
    _decoding(64, 42, 39, torch.bfloat16),
    _decoding(256, 148, 140, torch.bfloat16),
)
HARD = (
    _hard("random", "independent keys", Inputs()),
    _hard("alike", "keys 0.95 alike, gates and beta near 1", Inputs(0.95, (1e-5, 1e-4), 4)),
    _hard("forget", "gates near 0", Inputs(step=(1.0, 20.0))),
    _hard("keep", "gates near 1", Inputs(step=(1e-7, 1e-5))),
    _hard("write", "beta near 1", Inputs(write=6.0)),
    # Few heads: the fp64 truth of these takes a second and 6 GiB.
    _hard("100k", "independent keys, 100,000 tokens", Inputs(), (1, 100_000), (2, 4)),
)
# A service leaves states on the way of a prompt for at most 1.03 times the layers' time.
WAYPOINTS = Row(
    "prefill-1x8192-waypoints",
    "1 row of 8192 that leaves its state every 512 tokens; the side to beat leaves none",
    Shape(Mode.PREFILL, (8192,), waypoints=512),
    *pair(at_least_peers, None, 0.97),
    beside=("gated_delta, no waypoints", Shape(Mode.PREFILL, (8192,))),
)
# At most 1.25 and 1.15 times the decode; the aims 1.12 and 1.08.
MIXERS = (_mixer(64, 0.8, 0.893), _mixer(256, 0.87, 0.926))
VERIFY = Row(
    "verify-64",
    "64 rows of 1 + 4 after 1 to 5 accepted drafts; bars in the speed of a decode of 64 rows",
    Shape(Mode.VERIFY, (5,) * 64),
    # At most 1.4 times the decode; the aim 1.25.
    *pair(at_least_peers, 0.715, 0.8),
    beside=(DECODE, Shape(Mode.DECODE, (1,) * 64)),
)
SUITE = Suite(
    "gated_delta",
    {
        **RULE.cases(ROWS),
        **{row.name: partial(hard_case, row) for row in HARD},
        **MIXER.cases(MIXERS),
        **RULE.cases([VERIFY, WAYPOINTS]),
    },
)
