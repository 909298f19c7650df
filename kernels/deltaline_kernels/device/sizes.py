"""Sizes, for plans and launches: arithmetic of them, and what a device has room for."""

from functools import lru_cache

import torch

# The shared memory that a program may have on a Hopper GPU.
SHARED_BYTES = 227 << 10


@lru_cache
def find_shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a program may have on a device; on a CPU, for the interpreter, a Hopper's."""
    if device.type == "cpu":
        return SHARED_BYTES
    # torch's annotations lack it.
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def pow2(size: int) -> int:
    """Return the least power of two that is not below `size`, which is at least 1."""
    return 1 << (size - 1).bit_length()


def cdiv(size: int, part: int) -> int:
    """Return how many parts `size` has, the last one perhaps cut."""
    return -(-size // part)


def count_tiles(num_tokens: int, num_keys: int, rows: int) -> int:
    """Return the most tiles of `rows` tokens that tokens of so many keys take: all but one tile of a key are full."""
    keys = min(num_tokens, num_keys)
    return (num_tokens - keys) // rows + keys
