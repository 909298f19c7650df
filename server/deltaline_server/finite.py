"""Whether values are finite: one look at every element of a tensor, with several threads where it is large.

Knows bits, not requests.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

# Of each type: integers of its size, and the exponent's bits. All of these are set in infinities and NaNs, and in
# nothing else.
_BITS: dict[np.dtype[Any], tuple[np.dtype[Any], np.dtype[Any], int]] = {
    np.dtype(np.float32): (np.dtype(np.uint32), np.dtype(np.int32), 0x7F80_0000),
    np.dtype(bfloat16): (np.dtype(np.uint16), np.dtype(np.int16), 0x7F80),
    np.dtype(np.float16): (np.dtype(np.uint16), np.dtype(np.int16), 0x7C00),
}
# Elements that are looked at twice in a row: few enough for a core's cache, enough that other threads go on meanwhile.
BLOCK = 1 << 20
# Tensors from this size on are looked at by threads: smaller ones take less time than waking these.
LARGE_BYTES, THREADS = 1 << 20, 4


def all_finite(values: NDArray[Any]) -> bool:
    """Whether all values are finite; values contiguous, float32, bfloat16 or float16."""
    # Integers order as magnitudes do: infinities and NaNs are the largest of each sign, read as signed integers those
    # above 0, as unsigned ones those below. Two passes, no array in between.
    bits, signed, exponent = _BITS[values.dtype]
    words = values.reshape(-1).view(bits)
    largest = np.maximum.reduce
    negative = exponent + (1 << 8 * bits.itemsize - 1)
    for begin in range(0, len(words), BLOCK):
        block = words[begin : begin + BLOCK]
        if int(largest(block)) >= negative or int(largest(block.view(signed))) >= exponent:
            return False
    return True


def finite_rows(values: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows of `values` [T, hidden] have finite values only, bool [N]; starts int64 [N]: their first tokens."""
    bits, _, exponent = _BITS[values.dtype]
    infinite = (values.view(bits) & exponent) == exponent
    sound: NDArray[np.bool_] = ~np.logical_or.reduceat(infinite.any(axis=1), starts)
    return sound


class FiniteCheck:
    """Looks at large tensors with threads of its own, so that the event loop does not wait."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="finite")

    async def all_finite(self, values: NDArray[Any]) -> bool:
        """As the function of this name."""
        run, words = asyncio.get_running_loop().run_in_executor, values.reshape(-1)
        part = -(-len(words) // THREADS)
        parts = (words[begin : begin + part] for begin in range(0, len(words), part))
        return all(await asyncio.gather(*(run(self._pool, all_finite, part) for part in parts)))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
