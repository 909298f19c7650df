"""Who counts what the scheduler does: the interface that metrics.py implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason


@dataclass(frozen=True)
class BatchTiming:
    """Seconds of a batch per stage. queue_s float64 [N]: from arrival to here, NaN for rows that had begun before."""

    queue_s: NDArray[np.float64]
    copy_in_s: float
    compute_s: float
    copy_out_s: float


class Observer(Protocol):
    """Who counts what the scheduler does. Called on the event loop."""

    def batch_done(self, kinds: NDArray[np.uint8], tokens: int, timing: BatchTiming) -> None: ...

    def steps(self, outcome: str, count: int) -> None: ...

    def refused(self, reason: Reason, count: int) -> None: ...

    def drafts(self, sent: int) -> None: ...

    def accepted(self, count: int) -> None: ...
