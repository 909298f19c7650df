"""What a call over the link comes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from deltaline_client._exceptions import DeltalineError, ProtocolError
from deltaline_client._transport.flow import Method


def answer_of(method: Method[Any, Any], bodies: Sequence[bytes], error: DeltalineError | None) -> Any:
    """The response of a call that is over: it has one. Raises its error; ProtocolError for none that can be read."""
    if error is not None:
        raise error
    if len(bodies) != 1:
        raise ProtocolError(f"expected one reply, got {len(bodies)}")
    return read(method, bodies[0])


def read(method: Method[Any, Any], body: bytes) -> Any:
    """A response. Raises ProtocolError for one that can't be read."""
    try:
        return method.response_type.FromString(body)
    except (ValueError, DecodeError) as wrong:
        raise ProtocolError("the reply can't be parsed") from wrong
