"""The cases of the Mamba2 recurrence with their bars. The figures are for an H200."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from deltaline_bench.bar import Bar, at_least_peers, at_most_us
from deltaline_bench.case import ERROR_LIMITS, Case, CaseMaker, Side, SideMaker, Suite
from deltaline_bench.gated_delta.shape import Mode
from deltaline_bench.mamba2.batch import Batch
from deltaline_bench.mamba2.field import peers
from deltaline_bench.mamba2.shape import Shape
from deltaline_bench.mamba2.sides import ours
from deltaline_bench.peers import Peers

# The side that bars in multiples of a decode look at: 0.8x its speed is 1.25 times its time.
DECODE = "mamba2, decode"


@dataclass(frozen=True)
class Row:
    """A row of the table: a case before its inputs exist; calling it makes them."""

    name: str
    what: str
    shape: Shape
    needed: tuple[Bar, ...] = ()
    aim: tuple[Bar, ...] = ()
    max_error: float = ERROR_LIMITS[torch.bfloat16]

    def __call__(self, device: torch.device, found: Peers) -> Case:
        batch = Batch(self.shape, self.name, device)
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
        batch = Batch(shape, f"{self.row.name} decode", device)
        expected = {f"decode {name}": tensor for name, tensor in batch.expected().items()}
        return replace(case, expected={**case.expected, **expected}, peers={**_decode(batch), **case.peers})


def _decode(batch: Batch) -> dict[str, SideMaker]:
    """Our decode as a side to compare with."""

    def make() -> Side:
        side = ours(batch)
        return replace(side, outputs=lambda done: {f"decode {name}": x for name, x in side.outputs(done).items()})

    return {DECODE: make}


def _shapes(shape: Shape, num_flops: int) -> Mapping[str, str]:
    return {
        "xBC": f"[{shape.num_tokens}, {shape.channels}]",
        "heads": f"{shape.num_heads} of {shape.head_dim} x {shape.state_dim}, {shape.num_groups} groups",
        "rows": str(shape.num_rows),
        "state": str(shape.state).removeprefix("torch."),
        "work": f"{num_flops / 1e9:.1f} GFLOP",
    }


def _prefill(lengths: Sequence[int], needed: float, aim: float) -> Row:
    shape = Shape(Mode.PREFILL, tuple(lengths))
    name = f"prefill-{len(lengths)}x{lengths[0]}"
    what = f"{len(lengths)} rows of {lengths[0]}, every other one fresh"
    return Row(name, what, shape, (at_most_us(needed),), (at_most_us(aim),))


def _decoding(num_rows: int, needed: float | None, aim: float, state: torch.dtype = torch.float32) -> Row:
    suffix = "" if state is torch.float32 else "-bf16-state"
    shape = Shape(Mode.DECODE, (1,) * num_rows, state=state)
    bars = () if needed is None else (at_most_us(needed),)
    what = f"{num_rows} rows of 1 token, lines scattered"
    return Row(f"decode-{num_rows}{suffix}", what, shape, bars, (at_most_us(aim),))


ROWS: tuple[Row, ...] = (
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
)
VERIFY = VerifyRow(
    Row(
        "verify-64",
        "64 rows of 1 + 4 after 1 to 5 accepted drafts; bars in the speed of a decode of 64 rows",
        Shape(Mode.VERIFY, (5,) * 64),
        # At most 1.4 times the decode; the aim 1.25.
        (at_least_peers(0.715),),
        (at_least_peers(0.8),),
    )
)
MAKERS: dict[str, CaseMaker] = {row.name: row for row in ROWS}
MAKERS[VERIFY.row.name] = VERIFY
SUITE = Suite("mamba2", MAKERS)
