"""The steps on a stream that wait for their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltaline_client._exceptions import AccessError, DeltalineError, TransportError, Unavailable
from deltaline_client._transport.flow import Answer

Deliver = Callable[[Answer], Any]


class Pending:
    """Correlation ids of one stream, and what waits for each."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[int, Deliver]] = {}
        self._last_id = 0

    def add(self, number: int, deliver: Deliver) -> int:
        """Note a step: deliver((number, what became of it)) is to be called once. Returns its correlation id."""
        self._last_id += 1
        self._waiting[self._last_id] = number, deliver
        return self._last_id

    def deliver(self, correlation_id: int, result: object) -> None:
        """Hand an answer to the call that waits for it. An answer that no call waits for is dropped."""
        number, deliver = self._waiting.pop(correlation_id, (0, None))
        if deliver is not None:
            deliver((number, result))

    def fail(self, error: DeltalineError | None) -> None:
        """The stream is over, None: in order. For a step that waits it means no answer, whatever the reason was; but a
        client that is not let in, or not any more, had no step taken that waits."""
        if not isinstance(error, TransportError | AccessError):
            error = Unavailable("the stream ended" if error is None else f"the stream ended: {error}")
        waiting, self._waiting = self._waiting, {}
        for number, deliver in waiting.values():
            deliver((number, error))
