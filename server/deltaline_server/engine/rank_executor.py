"""An engine over ranks: what rank 0's executor is asked that changes the device's state, all ranks do, in its order."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from deltaline_server.engine.executor import DeviceCounts, Executor, Launched, Report
from deltaline_server.engine.rank_orders import (
    HEADER_FIELDS,
    Integers,
    Order,
    bare_order,
    batch_of,
    batch_order,
    num_integers,
    place_order,
    placed_of,
    zero_order,
)
from deltaline_server.models.model import Model
from deltaline_server.ranks import Ranks
from deltaline_server.step import StepBatch
from deltaline_server.tables.pages import PagesPlaced

logger = logging.getLogger(__name__)


class LeadingExecutor:
    """Rank 0's executor: tells the other ranks, then does the same by its own one.

    A rank that is gone is a lost device: what it has of the state is nowhere else. One thread for each rank waits for
    its end.
    """

    def __init__(self, own: Executor, ranks: Ranks) -> None:
        """ranks: those that share the model; the others `follow`."""
        self._own, self._orders, self._ends = own, ranks.beside(), ranks.beside()
        self.is_asynchronous = own.is_asynchronous
        self.is_gone = False
        for rank in range(1, ranks.world_size):
            threading.Thread(target=self._watch, args=(rank,), name=f"rank {rank}", daemon=True).start()

    def prepare(self, report: Report) -> None:
        self._tell(*bare_order(Order.PREPARE))
        self._own.prepare(report)

    def launch(self, batch: StepBatch) -> Launched:
        """As Executor has it; after an error the ranks are no longer at the same place."""
        if len(batch.hidden) > 1:
            batch = replace(batch, hidden=(np.concatenate(batch.hidden),), into=())
        try:
            self._tell(*batch_order(batch))
            self._orders.broadcast(torch.from_numpy(_bytes_of(batch.hidden[0])))
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
        """Refuse, by the future: the state of one rank is a share of the whole."""
        done: Future[None] = Future()
        done.set_exception(NotImplementedError("transfer: expected a device that has the whole state, got ranks"))
        return done

    def is_lost(self) -> bool:
        return self.is_gone or self._own.is_lost()

    def close(self) -> None:
        """End the other ranks too."""
        with contextlib.suppress(RuntimeError):  # of a rank that is gone
            self._tell(*bare_order(Order.END))
        self._own.close()

    def counts(self) -> DeviceCounts:
        return self._own.counts()

    def _tell(self, header: Integers, integers: Integers) -> None:
        self._orders.broadcast(torch.from_numpy(header))
        if len(integers):
            self._orders.broadcast(torch.from_numpy(integers))

    def _watch(self, rank: int) -> None:
        """The thread of a rank."""
        try:
            self._ends.wait_for_end(rank)
        except RuntimeError:
            self.is_gone = True
            logger.error("rank %d is gone", rank)


def follow(model: Model, executor: Executor, ranks: Ranks) -> None:
    """Do on a rank other than 0 what rank 0 tells, until it ends; the thread sleeps while there is nothing.

    Raises RuntimeError when a rank is gone, and what the executor raises: this rank is no longer where the others are.
    """
    orders, ends = ranks.beside(), ranks.beside()
    header = torch.empty(HEADER_FIELDS, dtype=torch.int32)
    with torch.inference_mode():
        while True:
            orders.broadcast(header)
            fields = header.tolist()
            integers = np.empty(num_integers(fields), dtype=np.int32)
            if len(integers):
                orders.broadcast(torch.from_numpy(integers))
            if fields[0] == Order.END:
                executor.close()
                ends.say_end()
                return
            if fields[0] == Order.PREPARE:
                executor.prepare(lambda done, total: None)
            elif fields[0] == Order.ZERO:
                executor.zero(integers.astype(np.int64))
            elif fields[0] == Order.PLACE_PAGES:
                executor.place_pages(placed_of(fields, integers))
            else:
                _, span, *_ = fields
                width = model.ends[span].input_width
                hidden = np.empty((fields[4], width), dtype=model.numpy_dtype)
                orders.broadcast(torch.from_numpy(_bytes_of(hidden)))
                executor.launch(batch_of(fields, integers, hidden)).result()


def _bytes_of(hidden: NDArray[np.generic]) -> NDArray[np.uint8]:
    """The bytes of hidden states, the same memory if they are contiguous."""
    return np.ascontiguousarray(hidden).reshape(-1).view(np.uint8)
