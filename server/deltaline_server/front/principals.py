"""Who a call is from."""

from __future__ import annotations

from typing import Any

from deltaline_server.step import ANONYMOUS, Principal


def principal_of(context: Any) -> Principal:
    """The principal of a call: everybody is anonymous, since calls carry neither certificates nor tokens."""
    return ANONYMOUS
