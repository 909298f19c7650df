"""Ways to servers: which is taken, and when one is left for the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rigs.running_sum import FAST, tokens

from deltaline_client import Retry

NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize("by", ["calls", "steps"])
def test_a_name_that_has_never_answered_is_left_at_its_first_failure(driven: Any, server: Any, by: str) -> None:
    do, retry = driven.do, Retry(max_attempts=2, initial_backoff_s=0.0)
    client = driven.make(server.address, retry=retry, servers=[NOWHERE])
    server.info.server = NOWHERE
    sequence = do(client.open())
    if by == "calls":
        do(client.renew([sequence]))
    np.testing.assert_array_equal(do(sequence.decode(tokens(1)[0])), tokens(1)[0])
    do(client.disconnect())


@pytest.mark.parametrize("by", ["calls", "steps"])
def test_a_name_that_has_answered_is_tried_again(driven: Any, server: Any, other: Any, by: str) -> None:
    do = driven.do
    client = driven.make(server.address, retry=FAST, servers=[other.address])
    server.info.server = other.address
    sequence = do(client.open())
    other.streams, other.bound = server.streams, server.bound  # it is the same server, at two addresses
    method = {"calls": "CloseSequences", "steps": "Step"}[by]

    def call() -> Any:
        return client.close([sequence]) if by == "calls" else sequence.decode(tokens(1)[0])

    do(call())
    other.lose(method)
    do(call())
    do(call())
    assert not server.requests[method] and len(other.requests[method]) == 4
    do(client.disconnect())
