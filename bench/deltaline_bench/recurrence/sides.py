"""How a side of a recurrence holds its states: our lines with their drafts, and the pools of the field's engines.

Knows no figures and no bars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.case import Side
from deltaline_bench.lines import Mode
from deltaline_bench.recurrence.batch import Batch
from deltaline_kernels import Rows

AnyBatch = Batch[Any, Any]


def on_lines(batch: AnyBatch, operation: Callable[[Tensor, Tensor, Rows], Tensor]) -> Side:
    """Make a side of an operation of ours that returns o; it reads and writes states and drafts in place."""
    state, drafts = batch.new_state(), batch.new_drafts()
    rows = batch.rows(batch.accepted, batch.half)

    def outputs(o: Any) -> Mapping[str, Tensor]:
        found = {"o": o, "state": state[batch.line_index]}
        if batch.shape.mode is Mode.VERIFY:
            found["drafts"] = drafts[batch.line_index, 1 - batch.half]
        if batch.shape.waypoints:
            found["waypoints"] = state[batch.waypoint_index]
        return found

    def reset() -> None:
        batch.reset_state(state)
        batch.reset_drafts(drafts)

    return Side(lambda: operation(state, drafts, rows), outputs, reset)


class Pool:
    """A peer's pool of lines, and what every peer is told about rows.

    Args:
        zeroed: a row that starts from the zero state reads it from its own line, as its allocator left it.
    """

    def __init__(self, batch: AnyBatch, *, zeroed: bool = False) -> None:
        self._batch, self._zeroed = batch, zeroed
        self.state = batch.new_state()
        self.index = batch.int32(batch.line_index)
        self.starts = batch.int32(batch.shape.starts)
        self._reset()

    def _reset(self) -> None:
        self._batch.reset_state(self.state)
        if self._zeroed:
            self.state[self._batch.line_index[~self._batch.continues]] = 0

    def side(self, call: Callable[[], Any], o: Callable[[Any], Tensor]) -> Side:
        """Make a side whose packed output is `o(result)` and that works on the pool in place."""
        return Side(call, lambda done: {"o": o(done), "state": self.state[self._batch.line_index]}, self._reset)


class TokenPool:
    """A peer's pool with a line per token of a verify: a row starts from that of its last accepted draft."""

    def __init__(self, batch: AnyBatch) -> None:
        shape = batch.shape
        columns = shape.max_drafts
        # Line 0 is its null line.
        order = torch.arange(1, shape.num_rows * columns + 1, device=batch.device)
        self._table = order.view(columns, shape.num_rows).t().contiguous()
        self._first = self._table.gather(1, batch.accepted[:, None] - 1)[:, 0]
        self._started = batch.started().to(shape.state)
        self.index, self.accepted = batch.int32(self._table), batch.int32(batch.accepted)
        self.starts = batch.int32(shape.starts)
        size = (shape.num_rows * columns + 1, *batch.states.shape[1:])
        self.state = torch.empty(size, dtype=shape.state, device=batch.device)
        self._reset()

    def _reset(self) -> None:
        self.state.fill_(torch.nan)
        self.state[self._first] = self._started

    def side(self, call: Callable[[], Any], o: Callable[[Any], Tensor]) -> Side:
        """Make a side whose packed output is `o(result)` and that works on the pool in place."""
        return Side(call, lambda done: {"o": o(done), "token_states": self.state[self._table]}, self._reset)
