"""Replies of a streamed prefill before the latest: a client with several steps in flight may have had none of them.

Knows bytes and cells (span, slot). They take what is free of the budget of kept replies, and are given up first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from deltaline_server.step import RowKind, StepRequest

# As many as may be in flight: a client that has had no answer for that long sends nothing more.
KEPT_STEPS = 8


@dataclass(frozen=True, eq=False)
class PrefillAnswer:
    """A request of one PREFILL row, step `step` of its cell, with its outputs [rows, hidden] and position after it."""

    step: int
    request: StepRequest
    outputs: NDArray[Any]
    position: int

    @property
    def num_bytes(self) -> int:
        return self.request.hidden.nbytes + self.outputs.nbytes


def is_streamed(request: StepRequest) -> bool:
    """Whether a request may be a part of a streamed prefill: one PREFILL row, alone, nothing of it in shared memory.

    What lies there the client may use for other things once it has the reply, so it is kept no longer than that.
    """
    is_shared = request.is_input_shared or request.output_memory is not None
    return not is_shared and request.form.num_rows == 1 and int(request.form.kind[0]) == RowKind.PREFILL


class EarlierReplies:
    """Of each cell the answers of its last PREFILL steps, up to the latest; any other step ends them.

    So a client that loses its connection with `max_steps` of them in flight finds every reply again.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._cells: dict[tuple[int, int], deque[PrefillAnswer]] = {}
        self.used_bytes = 0

    def add(self, span: int, slot: int, answer: PrefillAnswer, free_bytes: int) -> None:
        """A PREFILL step is done. It is kept if its bytes are free; without it the steps before it are of no use."""
        # Put back behind the others: those in front are given up first.
        kept = self._cells[span, slot] = self._cells.pop((span, slot), deque())
        while len(kept) >= self._max_steps:
            self.used_bytes -= kept.popleft().num_bytes
        if answer.num_bytes > free_bytes or (kept and kept[-1].step != answer.step - 1):
            self.end(span, slot)
            return
        kept.append(answer)
        self.used_bytes += answer.num_bytes

    def end(self, span: int, slot: int) -> None:
        """Forget the answers of a cell."""
        for answer in self._cells.pop((span, slot), ()):
            self.used_bytes -= answer.num_bytes

    def get(self, span: int, slot: int, step: int) -> PrefillAnswer | None:
        """The answer to a step of a cell, if it is kept."""
        return next((answer for answer in self._cells.get((span, slot), ()) if answer.step == step), None)

    def give_up(self, num_bytes: int) -> None:
        """Forget cells, the longest unused first, until so many bytes are free or none is left."""
        wanted = self.used_bytes - num_bytes
        while self._cells and self.used_bytes > max(0, wanted):
            self.end(*next(iter(self._cells)))
