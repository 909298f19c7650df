"""The errors of a server that is full, all in the family CapacityError of `_exceptions`."""

from __future__ import annotations

from deltaline_client._exceptions import CapacityError


class NoFreeLines(CapacityError):
    """Fewer state lines are free than sequences were asked for."""

    reason = "NO_FREE_LINES"


class QueueFull(CapacityError):
    """Too many rows or bytes wait for the device."""

    reason = "QUEUE_FULL"


class ReplyBytesExhausted(CapacityError):
    """The reply could not be kept for a retry, so the step was not begun."""

    reason = "REPLY_BYTES_EXHAUSTED"


class TooManyInFlight(CapacityError):
    """Too many steps of one sequence are in flight."""

    reason = "TOO_MANY_IN_FLIGHT"


class PagesExhausted(CapacityError):
    """Too few pages of keys and values are free for the step; closing sequences frees theirs."""

    reason = "PAGES_EXHAUSTED"
