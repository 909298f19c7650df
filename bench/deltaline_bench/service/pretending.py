"""deltaline-server with a device that only waits: what surrounds a GPU's step, without a GPU. A process of its own.

A batch takes as long as 4 layers of the service bench do on an H200, and another one waits for it there; its outputs
are its inputs. What it takes to launch it is left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from deltaline_server import computing
from deltaline_server.__main__ import main
from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.engine.executor import DeviceCounts, Launched, Report
from deltaline_server.tables.pages import PagesPlaced

# A batch of 64 short rows takes 662 us, one of 512 takes 2.86 ms; a token of a long one 1.3 us.
BATCH_S, ROW_S, TOKEN_S = 350e-6, 4.9e-6, 1.3e-6


class Pretender:
    """The Executor of a device that computes nothing."""

    is_asynchronous = True
    is_gone = False

    def __init__(self) -> None:
        self._free_s = 0.0

    def prepare(self, report: Report) -> None:
        pass

    def launch(self, batch: StepBatch) -> Launched:
        hidden = np.concatenate(batch.hidden)
        num_short = int(batch.control[0, batch.num_short])
        compute_s = BATCH_S + ROW_S * num_short + TOKEN_S * (len(hidden) - num_short)
        done_s = self._free_s = max(self._free_s, time.monotonic()) + compute_s

        def result() -> BatchResult:
            while (left_s := done_s - time.monotonic()) > 0:
                time.sleep(left_s)
            returned = hidden if batch.wanted is None else hidden[batch.wanted]
            first = 0
            for into in batch.into:
                target = into.view(np.uint8).reshape(-1)
                target[:] = returned.view(np.uint8).reshape(-1)[first : first + len(target)]
                first += len(target)
            finite = np.ones(batch.control.shape[1] - 1, np.bool_)
            is_placed = bool(batch.into)
            return BatchResult(
                returned[:0] if is_placed else returned, finite, compute_s=compute_s, is_placed=is_placed
            )

        return Launched(lambda: time.monotonic() >= done_s, result)

    def zero(self, lines: NDArray[np.int64]) -> None:
        pass

    def place_pages(self, placed: PagesPlaced) -> None:
        pass

    def transfer(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def is_lost(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def counts(self) -> DeviceCounts:
        return DeviceCounts()


def pretend() -> None:
    """Let what is built in this process from now on have such a device."""
    computing.make_executor = lambda model, pool, limits: Pretender()


if __name__ == "__main__":
    pretend()
    sys.exit(main())
