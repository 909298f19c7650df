"""One look at every byte of a tensor: whether its values are finite, and its checksum; by threads where it is large."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from concurrent.futures import Future, ThreadPoolExecutor
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

CHECKSUM_BYTES = 32
# Tensors from this size on are looked at by threads: smaller ones take less time than waking these.
LARGE_BYTES, THREADS = 1 << 20, 8
# Fewest elements of a part: each waits for the interpreter's lock a few times, and the event loop for it.
PART = 1 << 20


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


def checksum(values: NDArray[Any]) -> bytes:
    """A cryptographic checksum of the bytes of contiguous `values`; a gibibyte takes one to two seconds."""
    return hashlib.blake2b(values.view(np.uint8).data, digest_size=CHECKSUM_BYTES).digest()


class FiniteCheck:
    """Threads that look at large tensors, so that the event loop need not. `close` ends them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="finite")

    async def all_finite(self, values: NDArray[Any]) -> bool:
        """As the function of this name, with all threads at once."""
        words = values.reshape(-1)
        part = max(PART, -(-len(words) // THREADS))
        looks = [
            self._pool.submit(all_finite, words[begin : begin + part]) for begin in range(0, max(1, len(words)), part)
        ]
        # The event loop is woken by the last part alone: being told of each takes it as long as a core takes for one.
        left, over = itertools.count(1 - len(looks)), Future[None]()

        def looked(_: object) -> None:
            if next(left) == 0 and over.set_running_or_notify_cancel():
                over.set_result(None)

        for look in looks:
            look.add_done_callback(looked)
        try:
            await asyncio.wrap_future(over)
        finally:
            for look in looks:  # who asked may have gone: others wait for the threads
                look.cancel()
        return all(look.result() for look in looks)

    async def finite_rows(self, values: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """As the function of this name, with one thread: few tensors need it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, finite_rows, values, starts)

    def begin_checksum(self, values: NDArray[Any]) -> Future[bytes]:
        """Begin to compute `checksum`, behind what was asked for before."""
        return self._pool.submit(checksum, values)

    def close(self) -> None:
        """Finish what was begun and end the threads."""
        self._pool.shutdown()
