"""Packed rows of tokens whose states lie in lines scattered over a pool, as a server holds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from deltaline_bench.batch import Batch, Shape
from deltaline_kernels import Rows


class Mode(Enum):
    """What the rows of a batch do."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True)
class LinesShape(Shape):
    """`lengths` tokens per row.

    VERIFY: every row has the same length, and as many drafts before it may have been accepted.

    Args:
        waypoints: PREFILL: our side leaves what a row is behind every so many tokens, a multiple of 64; 0: nowhere.
    """

    mode: Mode
    lengths: tuple[int, ...]
    waypoints: int = field(default=0, kw_only=True)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def starts(self) -> list[int]:
        """The first packed token of each row, and the end of the last one."""
        return [0, *accumulate(self.lengths)]

    @property
    def places(self) -> list[tuple[int, int]]:
        """The waypoints: rows, and how many of their tokens are before."""
        if self.waypoints == 0:
            return []
        every = self.waypoints
        return [(row, done) for row, length in enumerate(self.lengths) for done in range(every, length + 1, every)]

    @property
    def max_drafts(self) -> int:
        """Drafts that a line has room for."""
        return max(self.lengths) if self.mode is Mode.VERIFY else 1

    def is_fresh(self, row: int) -> bool:
        """Say whether a row starts from the zero state: every other row of a prefill."""
        return self.mode is Mode.PREFILL and row % 2 == 0

    @property
    def num_continuing(self) -> int:
        """Rows that read their line."""
        return sum(not self.is_fresh(row) for row in range(self.num_rows))


S = TypeVar("S", bound=LinesShape)


class LinesBatch(Batch[S]):
    """Rows with a line each; what no row may read holds NaN.

    Args:
        line_index: `[N]`. waypoint_index: the lines of the shape's places.
        continues: `[N]`, whether a row reads its line. accepted: `[N]`, drafts; 0 but for VERIFY.
    """

    num_lines: int
    line_index: Tensor
    waypoint_index: Tensor
    continues: Tensor
    accepted: Tensor

    def scatter_lines(self) -> None:
        """Draw which row has which line."""
        shape = self.shape
        # Line 0 is the null line of every side; some lines belong to nobody.
        num_places = len(shape.places)
        self.num_lines = 2 + shape.num_rows + shape.num_rows // 4 + num_places
        order = torch.randperm(self.num_lines - 1, generator=self.generator, device=self.device) + 1
        self.line_index = order[: shape.num_rows]
        self.waypoint_index = order[shape.num_rows : shape.num_rows + num_places]
        self.continues = ~torch.tensor([shape.is_fresh(row) for row in range(shape.num_rows)], device=self.device)
        self.accepted = torch.zeros(shape.num_rows, dtype=torch.int64, device=self.device)

    def accept_drafts(self) -> None:
        """Draw how many drafts of each row of a verify were accepted."""
        self.accepted.random_(1, self.shape.max_drafts + 1, generator=self.generator)

    def rows(self, num_replayed: Tensor, half: Tensor) -> Rows:
        """Say what each row does in its line: prefill and decode commit their tokens, a verify keeps them as drafts.

        Args:
            num_replayed: `[N]`, drafts that a row replays. half: `[N]`, where it finds them.
        """
        shape = self.shape
        owned = self.line_index.tolist()
        kept = [(*place, line) for place, line in zip(shape.places, self.waypoint_index.tolist(), strict=True)]
        return Rows.build(
            shape.lengths,
            [0 if shape.is_fresh(row) else line for row, line in enumerate(owned)],
            owned,
            [0] * shape.num_rows if shape.mode is Mode.VERIFY else shape.lengths,
            num_replayed.tolist(),
            half.tolist(),
            max_short=shape.max_drafts,
            device=self.device,
            waypoints=kept or None,
        )
