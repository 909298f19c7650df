"""A call that is interrupted: whatever line it was at, no tokens are applied twice afterwards."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.running_sum import HIDDEN, tokens

from deltaline_client import Client, QueueFull, SequenceBusy, StepError, StepStale
from deltaline_client._steps import exchange, request, sequence
from deltaline_server.errors import Reason

LIMIT = 4096 // (HIDDEN * 4)
"""Tokens that the fake takes in one request."""

FILES = {module.__file__ for module in (exchange, request, sequence)}
TOKEN, BAD = tokens(1, seed=9), np.full((1, HIDDEN), np.nan, np.float32)

# By what is special: the tokens of the first of two sequences, and the call.
CALLS: dict[str, tuple[NDArray[Any], Callable[[Client, list[Any], NDArray[Any]], Any]]] = {
    "nothing": (tokens(1), lambda client, both, hidden: client.decode(both, np.concatenate([hidden, TOKEN]))),
    "a verify": (tokens(3), lambda _, both, hidden: both[0].verify(hidden)),
    "a row is refused": (tokens(1), lambda client, both, hidden: client.decode(both, np.concatenate([hidden, BAD]))),
    "several requests": (tokens(2 * LIMIT), lambda _, both, hidden: both[0].prefill(hidden)),
}


class Interruption:
    """A KeyboardInterrupt before the given line of those that this thread runs to send steps and to note answers."""

    def __init__(self, line: int) -> None:
        self.line, self.num_lines = line, 0

    @property
    def has_come(self) -> bool:
        return self.num_lines >= self.line

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code.co_filename not in FILES or code.co_name == "__del__":
            return None
        if event == "line":
            self.num_lines += 1
            if self.has_come:
                raise KeyboardInterrupt
        return self.trace

    @contextmanager
    def under_way(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)


def go_on(one: Any, hidden: NDArray[Any]) -> str:
    """Resume what is unfinished, commit what is pending, and make another step. Returns how it ended."""
    how = "resumed" if one.unfinished else "gone on"
    try:
        if one.unfinished:
            np.testing.assert_array_equal(one.resume(), np.cumsum(hidden, axis=0))
        if one.progress().pending_tokens:
            one.commit(2)
        one.decode(TOKEN)
    except QueueFull:
        return go_on(one, hidden)
    except (SequenceBusy, StepStale) as error:
        how = type(error).__name__
    return how


@pytest.mark.parametrize("is_full", [False, True], ids=["", "the next call is refused"])
@pytest.mark.parametrize("special", CALLS)
def test_no_tokens_are_applied_twice(server: Any, special: str, is_full: bool) -> None:
    hidden, call = CALLS[special]
    ends, line = Counter[str](), 0
    with Client(server.address) as client:
        client.info()
        while True:
            line += 1
            both, interruption = client.open_many(2), Interruption(line)
            with suppress(KeyboardInterrupt, StepError), interruption.under_way():
                call(client, both, hidden)
            if not interruption.has_come:
                break
            if is_full:
                server.refuse_rows({0: Reason.QUEUE_FULL})
            end = go_on(both[0], hidden)
            server.faults.clear()  # a busy sequence sends nothing
            ends[end] += 1
            stream = server.streams[both[0].handle][0]
            others = TOKEN if end in ("gone on", "resumed") else TOKEN[:0]
            done = hidden[: stream.position - len(others)]
            assert stream.position == len(done) + len(others), line
            np.testing.assert_array_equal(stream.total, done.sum(axis=0) + others.sum(axis=0), f"line {line}")
    assert ends["resumed"] and ends["gone on"]
    assert ends["SequenceBusy"] <= 2  # while the call gives the sequence back
    assert not ends["StepStale"] or special == "several requests"  # the fake keeps one reply
