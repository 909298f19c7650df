"""A time that a call may take is a positive, finite number, wherever the client takes one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from deltaline_client import AsyncClient, Client, Retry, Row

# The last is beyond what gRPC counts in: it took the call to be over, and the client tried again for ever.
WRONG = [0, -1.0, math.nan, math.inf, "5", True, 1e10]
EXPECTED = "expected a positive number of seconds, finite and at most 1000000000, got "


@pytest.mark.parametrize("seconds", WRONG)
@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_a_client_refuses_other_times(make: Any, seconds: Any) -> None:
    with pytest.raises(ValueError, match=f"^timeout: {EXPECTED}{seconds!r}$"):
        make("127.0.0.1:1", timeout=seconds)


@pytest.mark.parametrize("seconds", WRONG)
def test_a_retry_refuses_other_times(seconds: Any) -> None:
    with pytest.raises(ValueError, match=f"^attempt_timeout_s: {EXPECTED}{seconds!r}$"):
        Retry(attempt_timeout_s=seconds)


@pytest.mark.parametrize("name", ["initial_backoff_s", "max_backoff_s"])
def test_a_wait_may_be_none_at_all(name: str) -> None:
    make: Any = Retry
    assert getattr(make(**{name: 0}), name) == 0
    for seconds in WRONG[1:]:
        with pytest.raises(
            ValueError, match=f"^{name}: expected a number of seconds, finite and at most 1000000000, got"
        ):
            make(**{name: seconds})
    for multiplier in (0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"^multiplier: expected 1 or more, finite, got {multiplier}$"):
            Retry(multiplier=multiplier)


@pytest.mark.parametrize("seconds", WRONG)
def test_leases_and_a_drain_refuse_other_times(driven: Any, seconds: Any) -> None:
    sequence = driven.do(driven.client.open())
    with pytest.raises(ValueError, match=f"^lease_s: {EXPECTED}{seconds!r}$"):
        driven.do(driven.client.open(lease_s=seconds))
    with pytest.raises(ValueError, match=f"^lease_s: {EXPECTED}{seconds!r}$"):
        driven.do(driven.client.renew([sequence], lease_s=seconds))
    with pytest.raises(ValueError, match=f"^timeout_s: {EXPECTED}{seconds!r}$"):
        driven.do(driven.client.drain(seconds))


@pytest.mark.parametrize("seconds", WRONG)
def test_calls_refuse_other_times_and_send_nothing(server: Any, driven: Any, seconds: Any) -> None:
    sequence = driven.do(driven.client.open())
    hidden = np.zeros((1, driven.do(driven.client.info()).hidden_size))
    calls: dict[Any, Any] = {
        driven.client.adapters.load: "french",
        driven.client.step: [Row.decode(sequence, hidden)],
        sequence.decode: hidden,
    }
    for call, argument in calls.items():
        with pytest.raises(ValueError, match=f"^timeout_s: {EXPECTED}{seconds!r}$"):
            driven.do(call(argument, timeout_s=seconds))
    for call, argument in list(calls.items())[1:]:
        with pytest.raises(ValueError, match=f"^queue_timeout_s: {EXPECTED}{seconds!r}$"):
            driven.do(call(argument, queue_timeout_s=seconds))
    assert server.requests["Step"] == []


@pytest.mark.parametrize("seconds", [1, np.float32(1.5), np.int64(3), 1e9], ids=["int", "float32", "int64", "most"])
def test_any_kind_of_number_is_a_time(server: Any, driven: Any, seconds: Any) -> None:
    Client("127.0.0.1:1", timeout=seconds).disconnect()
    assert Retry(attempt_timeout_s=seconds).attempt_timeout_s == seconds
    driven.do(driven.client.open(lease_s=seconds))
    assert server.requests["OpenSequences"][-1].lease_ms == int(1000 * seconds)
