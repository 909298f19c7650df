"""A client belongs to the process that made it."""

from __future__ import annotations


def forked() -> RuntimeError:
    """What a client raises in another process than that: answers and link memory would be those of both."""
    return RuntimeError("this client was made before the process forked: make another one behind the fork")
