"""Pinned memory: pages that CUDA copies from and to by itself."""

from __future__ import annotations

import contextlib
from typing import SupportsInt

import numpy as np
import torch
from numpy.typing import NDArray


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
        """Let the pages of an array that was pinned go. Raises RuntimeError."""
        with torch.cuda.device(self._device):
            self._check(torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data))

    def _check(self, error: SupportsInt) -> None:
        """Raise RuntimeError unless a call of the CUDA runtime succeeded."""
        if int(error):
            # The runtime keeps a thread's last error, and torch would raise it after a later launch on it.
            with contextlib.suppress(RuntimeError):
                self._spare.zero_()
            raise RuntimeError(f"CUDA error {int(error)}")
