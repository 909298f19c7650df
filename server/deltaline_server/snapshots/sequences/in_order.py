"""Work on sequences' states, which has its place in the order of each sequence's steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.scheduling.scheduler import Scheduler
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.sequence import SequenceState
from deltaline_server.tables.sequences import SequenceTable

Result = TypeVar("Result")


class InOrder:
    """Lets work be done behind the steps that were taken before, while those that come meanwhile wait. All methods
    belong to the event loop's thread."""

    def __init__(self, table: SequenceTable, scheduler: Scheduler) -> None:
        self._table, self._scheduler = table, scheduler

    async def run(
        self,
        epoch: int,
        handles: NDArray[np.uint64],
        principal: Principal,
        work: Callable[[Slots], Result],
    ) -> Result:
        """The result of work on sequences' states, when the steps that were taken so far are over; nothing is done for
        whoever has gone meanwhile. Where it is a future, later steps wait until that is done."""
        if len(np.unique(handles)) != len(handles):
            raise RequestError(Reason.DUPLICATE_SEQUENCE, "sequence: expected none twice", field="sequence")
        slots = self.held(epoch, handles, principal)
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def on_reached(dropped: set[int]) -> asyncio.Future[Any] | None:
            if done.done():
                return None
            try:
                self.held(epoch, handles, principal)
                if dropped:
                    message = "a step before this call was refused, so nothing was done"
                    raise RequestError(Reason.PREDECESSOR_REFUSED, message)
                result = work(slots)
                done.set_result(result)
            except Exception as error:
                done.set_exception(error)
                return None
            return result if isinstance(result, asyncio.Future) else None

        self._scheduler.in_order(slots, on_reached)
        return await done

    def held(self, epoch: int, handles: NDArray[np.uint64], principal: Principal) -> Slots:
        """The slots of sequences that are open. Raises RequestError where one is not, or its state is not finite."""
        slots, states = self._table.lookup(epoch, handles, principal)
        for row, (slot, state) in enumerate(zip(slots.tolist(), states.tolist(), strict=True)):
            if state == SequenceState.POISONED:
                message = "a computation on the sequence's state failed or gave a value that is not finite"
                raise RequestError(Reason.STATE_NOT_FINITE, message)
            if state != SequenceState.OPEN:
                refusal = self._table.moved_refusals(epoch, handles, states, principal).get(row)
                refusal = (refusal or self._table.refusal(state, slot, 0)).of_row(row)
                raise RequestError(refusal.reason, refusal.message, metadata=refusal.metadata)
        self._table.touch(slots)
        return slots
