"""How much host memory a front end may take."""

from __future__ import annotations

from deltaline import link

# Of messages on their way at a time, beside what the process itself takes.
_MESSAGES = 64
_BASE_BYTES = 2**30


def most_bytes(message_bytes: int) -> int:
    """The limit of a front end's own memory, which the kernel holds it to: one that is flooded ends, and is started
    again. message_bytes: most bytes of a request."""
    return _BASE_BYTES + _MESSAGES * message_bytes


def link_bytes(message_bytes: int) -> int:
    """Link memory that a front end may have, shared with the core: twice what it asks for, requests' and replies',
    since that of one that ended is given back a little later. message_bytes: most bytes of a request."""
    return 3 * link.memory_bytes(message_bytes)
