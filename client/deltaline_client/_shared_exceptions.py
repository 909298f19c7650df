"""The errors of shared memory, each in its family of `_exceptions`. The client meets them by going inline."""

from __future__ import annotations

from deltaline_client._exceptions import CapacityError, ConflictError, RequestError


class InvalidSharedMemory(RequestError):
    """A slice of shared memory is out of its region, or the server does not have the region (any more)."""

    reason = "INVALID_SHARED_MEMORY"


class SharedMemoryExhausted(CapacityError):
    """The server has no more memory to share."""

    reason = "SHARED_MEMORY_EXHAUSTED"


class SharedMemoryOff(ConflictError):
    """The server shares no memory."""

    reason = "SHARED_MEMORY_OFF"
