"""Times that callers give: numbers of seconds, which may be anything that Python takes for one."""

from __future__ import annotations

from numbers import Real
from typing import Any

# gRPC counts time in nanoseconds of 64 bits: a deadline that does not fit is over at once, and a retry never ends.
MAX_SECONDS = 1e9


def check_seconds(name: str, seconds: Any, *, may_be_zero: bool = False) -> None:
    """Raise ValueError unless it is a time that can be waited for."""
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not (is_number and (0 < seconds <= MAX_SECONDS or (may_be_zero and seconds == 0))):
        expected = (
            f"a {'number' if may_be_zero else 'positive number'} of seconds, finite and at most {MAX_SECONDS:.0f}"
        )
        raise ValueError(f"{name}: expected {expected}, got {seconds!r}")


def milliseconds(name: str, seconds: float | None) -> int:
    """A time in whole milliseconds, at least one; 0 for None. Raises ValueError."""
    if seconds is None:
        return 0
    check_seconds(name, seconds)
    return max(1, round(seconds * 1000))
