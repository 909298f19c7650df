"""Who counts what the scheduler does: the interface that metrics and traces implement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deltaline_server.errors import Reason
from deltaline_server.scheduling.scheduled_rows import ScheduledRows
from deltaline_server.step import RowKind


@dataclass(slots=True)
class BatchTiming:
    """A batch that is done. num_of_kind: its rows by kind. queued: (kind, rows, seconds from arrival to the device) of
    rows that began with it. busy_s: seconds, not counted with other batches, in which the engine had this one.
    num_adapter_rows: rows with an adapter, of num_adapters different ones. began_s: when the device came to it, as far
    as is known, on the scheduler's clock. scheduled: its rows.
    """

    num_of_kind: Mapping[RowKind, int]
    num_tokens: int
    queued: Sequence[tuple[RowKind, int, float]]
    copy_in_s: float
    compute_s: float
    copy_out_s: float
    busy_s: float
    num_adapter_rows: int = 0
    num_adapters: int = 0
    began_s: float = 0.0
    scheduled: Sequence[ScheduledRows] = ()


class Observer(Protocol):
    """Who counts what the scheduler does. Called on the event loop."""

    def batch_done(self, timing: BatchTiming) -> None: ...

    def steps(self, outcome: str, count: int) -> None: ...

    def refused(self, reason: Reason, count: int) -> None: ...

    def drafts(self, sent: int) -> None: ...

    def accepted(self, count: int) -> None: ...
