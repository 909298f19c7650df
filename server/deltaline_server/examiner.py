"""The examiner: looks at every byte of large tensors with threads of its own, so that the event loop need not.

Knows arrays, not requests.
"""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.finite import all_finite, finite_rows

CHECKSUM_BYTES = 32
# Tensors from this size on are looked at by threads: smaller ones take less time than waking these.
LARGE_BYTES, THREADS = 1 << 20, 8
# Fewest elements of a part: each waits for the interpreter's lock a few times, and the event loop for it.
PART = 1 << 20


def checksum(values: NDArray[Any]) -> bytes:
    """A cryptographic checksum of the bytes of contiguous `values`; a gibibyte takes one to two seconds."""
    return hashlib.blake2b(values.view(np.uint8).data, digest_size=CHECKSUM_BYTES).digest()


class Examiner:
    """Its threads. `close` ends them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="examiner")

    async def all_finite(self, values: NDArray[Any]) -> bool:
        """As the function of this name, with all threads at once."""
        run, words = asyncio.get_running_loop().run_in_executor, values.reshape(-1)
        part = max(PART, -(-len(words) // THREADS))
        parts = (words[begin : begin + part] for begin in range(0, len(words), part))
        return all(await asyncio.gather(*(run(self._pool, all_finite, part) for part in parts)))

    async def finite_rows(self, values: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """As the function of this name, with one thread: few tensors need it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, finite_rows, values, starts)

    def begin_checksum(self, values: NDArray[Any]) -> Future[bytes]:
        """Begin to compute `checksum`, behind what was asked for before."""
        return self._pool.submit(checksum, values)

    def close(self) -> None:
        """Finish what was begun and end the threads."""
        self._pool.shutdown()
