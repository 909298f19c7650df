"""Copies between arrays of the host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

# Arrays from this size on are copied by several threads; for smaller ones, waking these takes longer.
LARGE_BYTES, COPY_THREADS = 1 << 21, 4


class Copier:
    """Copies between arrays of the host, large ones with several threads at once."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy")

    def copy(self, target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        """Copy bytes `[n]`; mutates `target`."""
        if len(target) < LARGE_BYTES:
            target[:] = source
            return
        part = -(-len(target) // COPY_THREADS)
        begins = range(0, len(target), part)
        waiting = [self._pool.submit(np.copyto, target[i : i + part], source[i : i + part]) for i in begins[1:]]
        np.copyto(target[:part], source[:part])
        for done in waiting:
            done.result()

    def close(self) -> None:
        self._pool.shutdown()
