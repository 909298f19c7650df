"""How many calls of Python functions a piece of work takes, so that what grows with what is held is noticed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def num_calls(work: Callable[[], object]) -> int:
    """Do it, and count, what it calls included; what the collector of garbage would call comes later."""
    calls, before = 0, sys.getprofile()

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    was_collecting = gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        if was_collecting:
            gc.enable()
    return calls
