"""The process's heap: what of it the C library gives back to the system."""

from __future__ import annotations

from functools import cache

# The largest block by which the thresholds of glibc grow (mallopt(3)), less its header and a page.
LARGEST_BLOCK = 32 * 2**20 - 8192


@cache
def keep_freed_memory() -> None:
    """Let the process keep up to 64 MiB that it frees, instead of giving them back; once, and for good.

    Each message of a streamed prefill is megabytes that are freed again. glibc gives such blocks back to the system,
    which then maps and zeroes every page anew: as much time as the rest of sending. It keeps twice the size of the
    largest block that was freed so far, up to 32 MiB; a program that works with arrays has mostly freed such a one. The
    block's pages are never touched. Where the C library is another, nothing happens.
    """
    bytes(LARGEST_BLOCK)
