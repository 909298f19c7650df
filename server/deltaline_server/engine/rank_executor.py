"""An engine over ranks: what rank 0's executor is asked that changes the device's state, all ranks do, in its order."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from deltaline_server.batch import StepBatch
from deltaline_server.engine.executor import DeviceCounts, Executor, Launched, Report
from deltaline_server.engine.rank_orders import (
    FIRST_INTEGERS,
    Integers,
    Order,
    bare_order,
    batch_of,
    batch_order,
    messages_of,
    opened,
    place_order,
    placed_of,
    transfer_order,
    zero_order,
)
from deltaline_server.engine.rank_pulse import END_S, Pulse
from deltaline_server.ranks.ways import Ways
from deltaline_server.tables.pages import PagesPlaced

logger = logging.getLogger(__name__)

# Batches whose results another rank than 0 has not waited for when it launches the next one, so that this is not late.
AHEAD = 2


class LeadingExecutor:
    """Rank 0's executor: tells the other ranks, then does the same by its own one.

    A rank that is gone is a lost device: what it has of the state is nowhere else.
    """

    def __init__(self, own: Executor, ways: Ways, lost: Callable[[], None] = lambda: None) -> None:
        """ways: to the ranks that share the model; the others `follow`. lost: called on another thread when one of them
        is gone: whoever told it something may wait for it, and for ever."""
        self._own, self._orders, self._telling, self._lost = own, ways.orders, threading.Lock(), lost
        self.is_asynchronous = own.is_asynchronous
        self.is_gone = False
        others = range(1, ways.beats.world_size)
        self._pulses = [Pulse(ways.beats, rank, partial(self._lose, rank)) for rank in others]

    def prepare(self, report: Report) -> None:
        self._tell(*bare_order(Order.PREPARE))
        self._own.prepare(report)

    def launch(self, batch: StepBatch) -> Launched:
        """As Executor has it; after an error the ranks are no longer at the same place."""
        try:
            self._tell(*batch_order(batch))
            return self._own.launch(batch)
        except Exception:
            self.is_gone = True
            raise

    def zero(self, lines: NDArray[np.int64]) -> None:
        self._tell(*zero_order(lines))
        self._own.zero(lines)

    def place_pages(self, placed: PagesPlaced) -> None:
        self._tell(*place_order(placed))
        self._own.place_pages(placed)

    def transfer(self, work: Callable[[], None]) -> Future[None]:
        """As Executor has it, of this rank alone; what it wants of the others it may `tell_transfer`."""
        return self._own.transfer(work)

    def tell_transfer(self, told: Integers) -> None:
        """Let every other rank copy what is told, after the batches that it was told of before; from any thread."""
        self._tell(*transfer_order(told))

    def is_lost(self) -> bool:
        return self.is_gone or self._own.is_lost()

    def close(self) -> None:
        """End the other ranks too; nothing is told, nor waited for, where one is gone."""
        if not self.is_gone:
            with contextlib.suppress(RuntimeError):  # of a rank that has just gone
                self._tell(*bare_order(Order.END))
            self._own.close()
        for pulse in self._pulses:
            pulse.stop(0.0 if self.is_gone else END_S)
        self._orders.close()

    def counts(self) -> DeviceCounts:
        return self._own.counts()

    def _tell(self, header: Integers, integers: Integers) -> None:
        with self._telling:
            for message in messages_of(header, integers):
                self._orders.tell(message)

    def _lose(self, rank: int, why: str) -> None:
        self.is_gone = True
        logger.error("rank %d is gone: %s", rank, why)
        self._lost()


def follow(executor: Executor, ways: Ways, copy: Callable[[Integers], None], lost: Callable[[], None]) -> None:
    """Do on a rank other than 0 what rank 0 tells, until it ends; the thread sleeps while there is nothing.

    copy: what is to be done of a transfer that was told. lost: called on another thread when rank 0 is gone or a
    transfer failed, whatever this one waits for.
    Raises RuntimeError when a rank is gone, and what the executor raises: this rank is no longer where the others are.
    """
    orders, pulse = ways.orders, Pulse(ways.beats, 0, lambda why: lost())
    first = np.empty(FIRST_INTEGERS, dtype=np.int32)
    launched: deque[Launched] = deque()
    with torch.inference_mode():
        while True:
            orders.hear(first)
            fields, integers, rest = opened(first)
            if len(rest):
                orders.hear(rest)
            if fields[0] == Order.END:
                while launched:
                    launched.popleft().result()
                executor.close()
                pulse.stop()
                orders.close()
                return
            if fields[0] == Order.PREPARE:
                executor.prepare(lambda done, total: None)
            elif fields[0] == Order.ZERO:
                executor.zero(integers.astype(np.int64))
            elif fields[0] == Order.TRANSFER:
                executor.transfer(partial(copy, integers)).add_done_callback(partial(_check, lost))
            elif fields[0] == Order.PLACE_PAGES:
                executor.place_pages(placed_of(fields, integers))
            else:
                if len(launched) == AHEAD:
                    launched.popleft().result()
                launched.append(executor.launch(batch_of(fields, integers)))


def _check(lost: Callable[[], None], ended: Future[None]) -> None:
    """See to it that a transfer that failed is not waited for."""
    error = ended.exception()
    if error is not None:
        logger.error("a transfer failed: %s", error)
        lost()
