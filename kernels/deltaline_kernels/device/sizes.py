"""Arithmetic of sizes, for plans and launches."""


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
