"""Pinned memory: pages that CUDA copies from and to by itself, pinned where they are, or given pinned to adapters.

torch's own pinned memory is rounded up to powers of two and never given back; a budget of it would not hold.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import SupportsInt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaline_server.memory.mappings import Pinning

_log = logging.getLogger(__name__)


class CudaPinning:
    """Pins memory that was allocated elsewhere, for one CUDA device. torch then takes tensors in it for pinned ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare = torch.zeros(1, device=device)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Pin the pages of a writable array. Raises RuntimeError."""
        runtime, address = torch.cuda.cudart(), memory.ctypes.data
        with torch.cuda.device(self._device):
            if torch.from_numpy(memory).is_pinned():
                # For memory that was here before, whose pages a device would still copy, and not these.
                self._check(runtime.cudaHostUnregister(address))
            self._check(runtime.cudaHostRegister(address, memory.nbytes, 0))

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """Unpin the pages of an array that was pinned. Raises RuntimeError."""
        with torch.cuda.device(self._device):
            self._check(torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data))

    def _check(self, error: SupportsInt) -> None:
        """Raise RuntimeError unless a call of the CUDA runtime succeeded."""
        if int(error):
            # The runtime keeps a thread's last error, and torch would raise it after a later launch on it.
            with contextlib.suppress(RuntimeError):
                self._spare.zero_()
            raise RuntimeError(f"CUDA error {int(error)}")


class HostMemory:
    """Gives host memory to adapters, to the page as large as it was asked for, pinned where a device copies from it by
    itself, and takes it back once no tensor uses it. `close` ends its thread."""

    def __init__(self, pinning: Pinning | None) -> None:
        """pinning: None where devices use host memory as it is."""
        self._pinning = pinning
        self._stuck: list[NDArray[np.uint8]] = []
        # Unpinning takes milliseconds, and the last tensor may go on the event loop.
        self._unpinning = ThreadPoolExecutor(max_workers=1, thread_name_prefix="unpin")

    def allocate(self, num_bytes: int) -> Tensor:
        """Give `num_bytes` bytes (1 or more), uint8, undefined. From any thread. Raises MemoryError or RuntimeError."""
        if self._pinning is None:
            return torch.empty(num_bytes, dtype=torch.uint8)
        try:
            pages = mmap.mmap(-1, num_bytes)
        except OSError as error:
            raise MemoryError(f"{num_bytes} bytes can't be mapped") from error
        given, kept = (np.frombuffer(pages, dtype=np.uint8) for _ in range(2))
        self._pinning.pin(kept)
        # Not at the interpreter's end: then the device is gone before.
        weakref.finalize(given, self._take_back, kept).atexit = False
        return torch.from_numpy(given)

    def close(self) -> None:
        """Wait until what was taken back is unpinned. Idempotent."""
        self._unpinning.shutdown()

    def _take_back(self, kept: NDArray[np.uint8]) -> None:
        """Unpin what no tensor uses any more; `kept` holds the pages until then."""
        try:
            self._unpinning.submit(self._unpin, kept)
        except RuntimeError:  # the executor is closed
            self._unpin(kept)

    def _unpin(self, kept: NDArray[np.uint8]) -> None:
        assert self._pinning is not None
        try:
            self._pinning.unpin(kept)
        except RuntimeError as error:
            # Of memory that is mapped there later a device would copy these pages.
            self._stuck.append(kept)
            _log.error("%d bytes of adapters' memory can't be unpinned and stay mapped: %s", kept.nbytes, str(error))
