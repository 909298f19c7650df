"""A client belongs to the process that made it."""

from __future__ import annotations

import os


def check_process(pid: int) -> None:
    """Raise RuntimeError in another process than `pid`: answers and link memory would be those of both."""
    if os.getpid() != pid:
        raise RuntimeError("this client was made before the process forked: make another one behind the fork")
