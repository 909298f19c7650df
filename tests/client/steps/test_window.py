"""The window of a call: its requests leave room on the stream for those of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deltaline_client._steps.packing import CHUNK_BYTES, WINDOW_BYTES, requests_in_flight
from deltaline_client._transport.channels.channel import MAX_MESSAGE_BYTES, MAX_TENSOR_BYTES
from deltaline_server.front.grpc_port import MESSAGE_SLACK_BYTES
from deltaline_server.front.steps.stepping import STREAM_BYTES


@pytest.mark.parametrize(("inline", "steps", "expected"), [(2**30, 8, 4), (2**20, 8, 8), (2**20, 3, 3), (1, 0, 1)])
def test_requests_in_flight_fit_the_window(inline: int, steps: int, expected: int) -> None:
    limits: Any = SimpleNamespace(inline_limit_bytes=inline, max_steps_in_flight=steps)
    assert requests_in_flight(limits) == expected
    assert expected * min(inline, CHUNK_BYTES) <= WINDOW_BYTES <= STREAM_BYTES // 2


def test_a_channel_carries_what_a_server_takes_besides_the_tensor() -> None:
    assert MAX_TENSOR_BYTES + MESSAGE_SLACK_BYTES <= MAX_MESSAGE_BYTES
