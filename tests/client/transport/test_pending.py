"""Steps of a stream that is over have no answer."""

from __future__ import annotations

import pytest

from deltaline_client import DeltalineError, Disconnected, QueueFull, Unavailable
from deltaline_client._transport.flow import Answer
from deltaline_client._transport.pending import Pending


@pytest.mark.parametrize("end", [None, QueueFull("full"), Unavailable("lost")], ids=str)
def test_whatever_ended_the_stream_its_steps_may_have_been_applied(end: DeltalineError | None) -> None:
    pending, told = Pending(), list[Answer]()
    pending.add(3, told.append)
    pending.fail(end)
    pending.fail(Disconnected())
    [(number, error)] = told
    assert number == 3 and isinstance(error, Unavailable)
