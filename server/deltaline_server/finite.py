"""Whether values are finite: one look at every element of a tensor.

Knows bits, not requests.
"""

from __future__ import annotations

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
# Elements that are looked at twice in a row. Fewer would lie in a core's own cache (a fifth faster), but after each
# block a thread waits for the interpreter's lock, and the event loop for the thread: decodes beside a prefill notice.
BLOCK = 1 << 23


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
    """Which rows of `values` [T, width] have finite values only, bool [N]; starts int64 [N]: their first tokens.

    values: as in `all_finite`. Nothing of their size is made.
    """
    bits, signed, exponent = _BITS[values.dtype]
    words, first = values.reshape(-1).view(bits), starts * values.shape[1]
    negative = exponent + (1 << 8 * bits.itemsize - 1)
    largest = np.maximum.reduceat
    sound: NDArray[np.bool_] = largest(words, first) < negative
    sound &= largest(words.view(signed), first) < exponent
    return sound
