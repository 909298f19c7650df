"""What a bench has measured: a table of steps with their times, joined from all processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from deltaline_cli.bench.options import KINDS, Kind

COLUMNS = ("kind", "tokens", "due", "late", "sent", "done", "queue", "copy in", "compute", "copy out")
"""Of a sample: index of the kind in KINDS; tokens of all rows; when it was due, how late the generator noticed, when it
was sent and when it was done; the stages in the server's reply. Seconds, on the monotonic clock."""

SERVER_STAGES = ("queue", "copy in", "compute", "copy out")
STAGES = ("total", "wait", *SERVER_STAGES, "transport")
"""total: from due to done. wait: from due to sent. transport: what is left of the total."""

Sample = tuple[float, ...]


def sample(
    kind: Kind,
    tokens: int,
    sent_s: float,
    done_s: float,
    stages_s: Sequence[float] = (0.0,) * len(SERVER_STAGES),
    *,
    due_s: float | None = None,
    late_s: float = 0.0,
) -> Sample:
    """Put a step's values in the order of COLUMNS. due_s: when it was sent, unless it is given."""
    return (KINDS.index(kind), tokens, sent_s if due_s is None else due_s, late_s, sent_s, done_s, *stages_s)


@dataclass(frozen=True)
class Samples:
    """Steps [steps, COLUMNS] float64, those of the warm-up included; the measured window begins at `begin_s`.

    unserved: when those steps were due that were not done in the end. cpu_share: the busiest process's share of one
    core while it measured.
    """

    table: NDArray[np.float64]
    begin_s: float
    end_s: float
    unserved: NDArray[np.float64]
    cpu_share: float

    @classmethod
    def of(cls, rows: Sequence[Sample], begin_s: float, end_s: float, unserved: Sequence[float], cpu: float) -> Self:
        """Make the table of rows in the order of COLUMNS."""
        table = np.array(rows, np.float64).reshape(-1, len(COLUMNS))
        return cls(table, begin_s, end_s, np.array(unserved, np.float64), cpu)

    @classmethod
    def join(cls, parts: Sequence[Samples]) -> Self:
        """Put the samples of all processes together: percentiles are of all steps, never means of percentiles."""
        return cls(
            np.concatenate([part.table for part in parts]),
            parts[0].begin_s,
            max(part.end_s for part in parts),
            np.concatenate([part.unserved for part in parts]),
            max(part.cpu_share for part in parts),
        )

    def column(self, name: str) -> NDArray[np.float64]:
        """One column, all steps."""
        return self.table[:, COLUMNS.index(name)]

    @property
    def seconds(self) -> float:
        """Length of the measured window."""
        return max(self.end_s - self.begin_s, 1e-9)

    def due(self) -> NDArray[np.bool_]:
        """Which steps were due in the window: those whose latency counts."""
        return self._inside("due")

    def done(self, kind: Kind | None = None) -> NDArray[np.bool_]:
        """Which steps, of a kind, were done in the window: those that throughput counts."""
        inside = self._inside("done")
        return inside if kind is None else inside & self.is_kind(kind)

    def is_kind(self, kind: Kind) -> NDArray[np.bool_]:
        """Which steps are of a kind."""
        found: NDArray[np.bool_] = self.column("kind") == KINDS.index(kind)
        return found

    def stages_s(self, kind: Kind) -> dict[str, NDArray[np.float64]]:
        """Seconds by stage of each step of a kind that was due in the window.

        transport is NaN for a step whose stages add up to more than it took: one that the client sent as several
        requests, or that was computed in several batches.
        """
        rows = self.table[self.due() & self.is_kind(kind)]
        take: dict[str, Any] = {name: rows[:, COLUMNS.index(name)] for name in COLUMNS}
        stages = {"total": take["done"] - take["due"], "wait": take["sent"] - take["due"]}
        stages |= {name: take[name] for name in SERVER_STAGES}
        rest = take["done"] - take["sent"] - sum(take[name] for name in SERVER_STAGES)
        stages["transport"] = np.where(rest > 0, rest, np.nan)
        return stages

    def _inside(self, name: str) -> NDArray[np.bool_]:
        times = self.column(name)
        found: NDArray[np.bool_] = (times >= self.begin_s) & (times <= self.end_s)
        return found
