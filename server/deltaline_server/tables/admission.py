"""Rows of a step request that were taken.

Plain arrays; the ledger makes them, and applies them once the rows are done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

NO_COMMIT = -1

Slots = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Admission:
    """Rows of a request that were taken, in row order: what each does once it runs.

    rows: index into the request. after: the progress of their slots on the span once the rows are done, int64 [5, rows]
    as in Progress: the numbers of their steps and their positions come first.
    commit: accepted count that the row fixes, NO_COMMIT for none; has_commits: whether any may. num_replayed: drafts
    that it folds into the state first; has_replays: whether there are any. is_idle: whether no row's cell has a step in
    flight. Nothing of it changes; it is not frozen because every step makes one.
    """

    rows: NDArray[np.int64]
    slots: Slots
    after: NDArray[np.int64]
    has_commits: bool
    commit: NDArray[np.int64]
    commit_position: NDArray[np.int64]
    commit_ordinal: NDArray[np.int64]
    num_replayed: NDArray[np.int64]
    has_replays: bool
    is_idle: bool

    def only(self, index: NDArray[np.int64]) -> Admission:
        """These rows (positions in the admission) alone. The flags may speak of rows that are left out."""
        return replace(
            self,
            rows=self.rows[index],
            slots=self.slots[index],
            after=self.after[:, index],
            commit=self.commit[index],
            commit_position=self.commit_position[index],
            commit_ordinal=self.commit_ordinal[index],
            num_replayed=self.num_replayed[index],
        )
