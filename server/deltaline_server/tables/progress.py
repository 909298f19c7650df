"""How far sequences are on each span, as arrays by slot; and all of it of one slot, for who takes a sequence along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class Progress:
    """Where cells stand: one int64 array `values` [5, spans, slots], and a view [spans, slots] of each field.

    step: number of the last step. position: committed tokens. pending: tokens of a verify that waits for its commit.
    replay: accepted tokens of a committed verify that the next step folds into the state. zero_commits: verifies in a
    row at this position of which nothing was accepted; with the position it names a verify on every span.
    """

    def __init__(self, num_spans: int, num_slots: int) -> None:
        self.values = np.zeros((5, num_spans, num_slots), dtype=np.int64)
        self.step, self.position, self.pending, self.replay, self.zero_commits = self.values


@dataclass(frozen=True, eq=False)
class WholeProgress:
    """All that the ledger has of a slot of which nothing is in flight.

    values int64 [5, spans], as in Progress. committed int64 [2, spans]: the step of the last verify that was committed,
    and its accepted count. fixed: counts by position and ordinal, as in CommittedProgress.
    """

    values: NDArray[np.int64]
    committed: NDArray[np.int64]
    fixed: Mapping[tuple[int, int], int]
