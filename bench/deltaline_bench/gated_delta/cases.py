"""The cases of the gated delta rule with their bars. The figures are for an H200."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from deltaline_bench.bar import Bar, at_least_peers, at_most_us
from deltaline_bench.case import ERROR_LIMITS, Case, CaseMaker, Side, SideMaker, Suite
from deltaline_bench.gated_delta.accuracy import Errors, NoWorse
from deltaline_bench.gated_delta.batch import Batch, Inputs
from deltaline_bench.gated_delta.field import peers
from deltaline_bench.gated_delta.mixer import Mixer
from deltaline_bench.gated_delta.shape import Mode, Shape
from deltaline_bench.gated_delta.sides import ours
from deltaline_bench.peers import Peers

RAGGED = (37, 513, 4096, 1, 2900, 8000, 64, 773)
# What a hard input may cost, whatever it costs the field.
HARD_ERROR = 5e-2
# The peer whose errors ours may not exceed, and its sides.
RIVAL, RIVAL_SIDES = "fla", ("fla", "fla, gates given")
# The side that bars in multiples of a decode look at: 0.8x its speed is 1.25 times its time.
DECODE = "gated_delta, decode"


@dataclass(frozen=True)
class Row:
    """A row of the table: a case before its inputs exist; calling it makes them."""

    name: str
    what: str
    shape: Shape
    needed: tuple[Bar, ...] = ()
    aim: tuple[Bar, ...] = ()
    inputs: Inputs = field(default_factory=Inputs)
    max_error: float = ERROR_LIMITS[torch.bfloat16]

    def __call__(self, device: torch.device, found: Peers) -> Case:
        batch = Batch(self.shape, self.name, device, self.inputs)
        num_replayed = batch.num_replayed
        return Case(
            name=self.name,
            what=self.what,
            shapes=_shapes(self.shape, self.shape.num_flops(num_replayed)),
            dtype=self.shape.dtype,
            num_bytes=self.shape.num_bytes(num_replayed),
            num_flops=self.shape.num_flops(num_replayed),
            max_error=self.max_error,
            expected=batch.expected(),
            ours={"deltaline": lambda: ours(batch)},
            peers=peers(batch, found),
            needed=self.needed,
            aim=self.aim,
        )


@dataclass(frozen=True)
class VerifyRow:
    """A verify beside a decode of as many rows, which its bars are multiples of."""

    row: Row

    def __call__(self, device: torch.device, found: Peers) -> Case:
        case = self.row(device, found)
        shape = replace(self.row.shape, mode=Mode.DECODE, lengths=(1,) * self.row.shape.num_rows)
        batch = Batch(shape, f"{self.row.name} decode", device, self.row.inputs)
        expected = {f"decode {name}": tensor for name, tensor in batch.expected().items()}
        return replace(case, expected={**case.expected, **expected}, peers={**_decode(batch, "decode "), **case.peers})


@dataclass(frozen=True)
class MixerRow:
    """The whole mixer beside its decode alone, which its bars are multiples of."""

    row: Row

    def __call__(self, device: torch.device, found: Peers) -> Case:
        batch = Batch(self.row.shape, self.row.name, device, self.row.inputs)
        mixer = Mixer(batch)
        return Case(
            name=self.row.name,
            what=self.row.what,
            shapes=_shapes(self.row.shape, mixer.num_flops()),
            dtype=self.row.shape.dtype,
            num_bytes=mixer.num_bytes(),
            num_flops=mixer.num_flops(),
            max_error=self.row.max_error,
            expected=mixer.expected(),
            ours={"deltaline": mixer.side},
            peers=_decode(batch),
            needed=self.row.needed,
            aim=self.row.aim,
        )


@dataclass(frozen=True)
class AccuracyRow:
    """A prefill of which no tensor may be further from the truth than fla's."""

    row: Row

    def __call__(self, device: torch.device, found: Peers) -> Case:
        case = self.row(device, found)
        errors = Errors(case.expected)
        bars = tuple(
            NoWorse(errors=errors, tensor=tensor, ours=name, peer=RIVAL, sides=RIVAL_SIDES)
            for name in case.ours
            for tensor in case.expected
        )
        return replace(case, ours=errors.watch(case.ours), peers=errors.watch(case.peers), needed=(*case.needed, *bars))


def _decode(batch: Batch, prefix: str = "") -> dict[str, SideMaker]:
    """Our decode as a side to compare with; the names of its outputs get `prefix`."""

    def make() -> Side:
        side = ours(batch)
        return replace(side, outputs=lambda done: {prefix + name: x for name, x in side.outputs(done).items()})

    return {DECODE: make}


def _shapes(shape: Shape, num_flops: int) -> Mapping[str, str]:
    return {
        "qkv": f"[{shape.num_tokens}, {shape.channels}]",
        "heads": f"{shape.num_key_heads}/{shape.num_value_heads} of {shape.key_dim}/{shape.value_dim}",
        "rows": str(shape.num_rows),
        "state": str(shape.state).removeprefix("torch."),
        "work": f"{num_flops / 1e9:.1f} GFLOP",
    }


def _us(*values: float) -> tuple[tuple[Bar, ...], tuple[Bar, ...]]:
    """Make the needed bar and the aim of a time."""
    needed, aim = values
    return (at_most_us(needed),), (at_most_us(aim),)


def _prefill(
    name: str,
    what: str,
    lengths: Sequence[int],
    heads: tuple[int, int] = (16, 32),
    needed: tuple[Bar, ...] = (),
    aim: tuple[Bar, ...] = (),
) -> Row:
    shape = Shape(Mode.PREFILL, tuple(lengths), *heads)
    return Row(name, f"{heads[0]}/{heads[1]} heads, {what}", shape, needed, aim)


def _hard(
    name: str, what: str, inputs: Inputs, lengths: tuple[int, ...] = (1, 8192), heads: tuple[int, int] = (16, 32)
) -> AccuracyRow:
    """The last row continues a random state; the one before it has a single token."""
    shape = Shape(Mode.PREFILL, lengths, *heads)
    return AccuracyRow(Row(f"accuracy-{name}", what, shape, inputs=inputs, max_error=HARD_ERROR))


def _decoding(num_rows: int, needed: float, aim: float, state: torch.dtype = torch.float32) -> Row:
    suffix = "" if state is torch.float32 else "-bf16-state"
    shape = Shape(Mode.DECODE, (1,) * num_rows, state=state)
    return Row(f"decode-{num_rows}{suffix}", f"{num_rows} rows of 1 token, lines scattered", shape, *_us(needed, aim))


def _mixer(num_rows: int, needed: float, aim: float) -> MixerRow:
    """Give the bars as multiples of the decode's speed."""
    what = f"{num_rows} rows: convolution, gates, rule, norm; the side to beat is the rule alone"
    shape = Shape(Mode.DECODE, (1,) * num_rows)
    return MixerRow(Row(f"mixer-{num_rows}", what, shape, (at_least_peers(needed),), (at_least_peers(aim),)))


LEAD = (at_most_us(650), at_least_peers(2.8))
ROWS: tuple[Row, ...] = (
    _prefill("prefill-4x8192", "4 rows of 8192", [8192] * 4, needed=LEAD, aim=(at_most_us(400),)),
    _prefill("prefill-8x2048", "8 rows of 2048", [2048] * 8, (16, 32), *_us(360, 220)),
    _prefill("prefill-ragged", "8 rows of 1 to 8000", RAGGED, (16, 32), *_us(500, 300)),
    _prefill("prefill-1x8192", "1 row of 8192", [8192], (16, 32), *_us(420, 280)),
    _prefill("prefill-1x2048", "1 row of 2048", [2048], (16, 32), *_us(130, 100)),
    _prefill("prefill-h2x8", "1 row of 32768", [32768], (2, 8), (at_least_peers(1.6),), (at_most_us(320),)),
    _prefill("prefill-h16x64", "4 rows of 8192", [8192] * 4, (16, 64)),
    _prefill("prefill-h16x48", "4 rows of 8192", [8192] * 4, (16, 48)),
    _decoding(1, 7.5, 6.5),
    _decoding(16, 23, 20),
    _decoding(64, 74, 69),
    _decoding(256, 275, 265),
    _decoding(64, 42, 39, torch.bfloat16),
    _decoding(256, 148, 140, torch.bfloat16),
)
COMPARED: tuple[MixerRow | VerifyRow, ...] = (
    # At most 1.25 and 1.15 times the decode; the aims 1.12 and 1.08.
    _mixer(64, 0.8, 0.893),
    _mixer(256, 0.87, 0.926),
    VerifyRow(
        Row(
            "verify-64",
            "64 rows of 1 + 4 after 1 to 5 accepted drafts; bars in the speed of a decode of 64 rows",
            Shape(Mode.VERIFY, (5,) * 64),
            # At most 1.4 times the decode; the aim 1.25.
            (at_least_peers(0.715),),
            (at_least_peers(0.8),),
        )
    ),
)
HARD: tuple[AccuracyRow, ...] = (
    _hard("random", "independent keys", Inputs()),
    _hard("alike", "keys 0.95 alike, gates and beta near 1", Inputs(0.95, (1e-5, 1e-4), 4)),
    _hard("forget", "gates near 0", Inputs(step=(1.0, 20.0))),
    _hard("keep", "gates near 1", Inputs(step=(1e-7, 1e-5))),
    _hard("write", "beta near 1", Inputs(write=6.0)),
    # Few heads: the fp64 truth of these takes a second and 6 GiB.
    _hard("100k", "independent keys, 100,000 tokens", Inputs(), (1, 100_000), (2, 4)),
)
MAKERS: dict[str, CaseMaker] = {row.name: row for row in ROWS}
MAKERS |= {maker.row.name: maker for maker in (*HARD, *COMPARED)}
SUITE = Suite("gated_delta", MAKERS)
