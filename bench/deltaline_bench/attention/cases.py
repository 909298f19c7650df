"""The cases of attention with their bars. The figures are for an H200."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from deltaline_bench.attention.batch import Batch
from deltaline_bench.attention.shape import Shape
from deltaline_bench.attention.sides import flex, ours, sdpa
from deltaline_bench.bar import Bar, at_least_peers, at_most_us
from deltaline_bench.case import ERROR_LIMITS, Case, CaseMaker, Side, SideMaker, Suite
from deltaline_bench.peers import Peers

# The side that a window over many keys is compared with.
SHORT = "as many keys as the window"


@dataclass(frozen=True)
class Row:
    """A row of the table: a case before its inputs exist; calling it makes them.

    Args:
        against: a shape that our own side computes too, in place of peers; bars in multiples look at it.
    """

    name: str
    what: str
    shape: Shape
    needed: tuple[Bar, ...] = ()
    aim: tuple[Bar, ...] = ()
    against: Shape | None = None

    def __call__(self, device: torch.device, found: Peers) -> Case:
        batch = Batch(self.shape, self.name, device)
        expected = batch.expected()
        peers: dict[str, SideMaker] = {"SDPA": lambda: sdpa(batch), "flex_attention": lambda: flex(batch)}
        if self.against is not None:
            # Dense keys of such a length have no room beside the pages.
            other = Batch(self.against, f"{self.name} against", device)
            expected["o against"] = other.expected()["o"]
            peers = {SHORT: lambda: _against(other)}
        return Case(
            name=self.name,
            what=self.what,
            shapes=_shapes(self.shape),
            dtype=self.shape.dtype,
            num_bytes=self.shape.num_bytes,
            num_flops=self.shape.num_flops,
            max_error=ERROR_LIMITS[self.shape.dtype],
            expected=expected,
            ours={"deltaline": lambda: ours(batch)},
            peers=peers,
            needed=self.needed,
            aim=self.aim,
        )


def _against(batch: Batch) -> Side:
    side = ours(batch)
    return replace(side, outputs=lambda o: {"o against": o})


def _shapes(shape: Shape) -> Mapping[str, str]:
    modifiers = [f"soft cap {shape.soft_cap}"] if shape.soft_cap is not None else []
    modifiers += ["causal"] if shape.is_causal else []
    modifiers += [f"window {shape.window}"] if shape.window is not None else []
    lengths = f"{min(shape.lengths)}..{max(shape.lengths)}" if shape.is_ragged else str(shape.lengths[0])
    return {
        "rows": f"{shape.num_rows} of {shape.tokens}",
        "keys": lengths,
        "heads": f"{shape.num_queries}/{shape.num_keys} of {shape.dim}",
        "page": str(shape.page_size),
        "modifiers": ", ".join(modifiers) or "none",
    }


def _decode(name: str, shape: Shape, needed: float | None, aim: float | None = None) -> Row:
    lengths = f"{shape.lengths[0]} keys each" if not shape.is_ragged else "ragged keys"
    bars = () if needed is None else (at_most_us(needed),)
    aims = () if aim is None else (at_most_us(aim),)
    return Row(name, f"{shape.num_rows} rows of {shape.tokens}, {lengths}", shape, bars, aims)


RAGGED = tuple(int(2 ** (i / 2)) for i in range(2, 34))
# Bytes of the ragged rows at 4.38 TB/s, and a fifth more.
RAGGED_US = Shape(RAGGED).num_bytes / 4.38e6 * 1.2
WINDOW = 4096

ROWS: tuple[Row, ...] = (
    _decode("decode-32x8192", Shape((8192,) * 32, is_causal=False), 142, 132),
    _decode("decode-32x8192-capped", Shape((8192,) * 32, soft_cap=30.0), 142, 132),
    _decode("decode-1x32768", Shape((32768,), is_causal=False), 29, 24),
    _decode("decode-1x32768-capped", Shape((32768,), soft_cap=30.0), 29, 24),
    _decode("decode-32x8192-32-8-128", Shape((8192,) * 32, 1, 32, 8, 128, soft_cap=30.0), 262, 250),
    _decode("decode-128x2048", Shape((2048,) * 128), 140, 132),
    _decode("decode-ragged", Shape(RAGGED), round(RAGGED_US, 1)),
    _decode("verify-32x8192", Shape((8192,) * 32, 5), None, 142),
    Row(
        "decode-16x131072-window",
        "16 rows of 1, a window of 4096 over 131072 keys; bars in the speed of rows of 4096",
        Shape((131072,) * 16, window=WINDOW),
        # At most 1.2 times the time.
        (at_least_peers(0.834),),
        (at_least_peers(0.95),),
        Shape((WINDOW,) * 16),
    ),
)
MAKERS: dict[str, CaseMaker] = {row.name: row for row in ROWS}
SUITE = Suite("attention", MAKERS)
