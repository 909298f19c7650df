"""Pinned memory: pages that CUDA copies from and to by itself. Knows torch and bytes; not what they are for."""

from __future__ import annotations

from typing import SupportsInt

import numpy as np
import torch
from numpy.typing import NDArray

# cudaErrorHostMemoryAlreadyRegistered
ALREADY_REGISTERED = 712


class CudaPinning:
    """Pins memory that was allocated elsewhere, for one CUDA device. torch then takes tensors in it for pinned ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Pin the pages of a writable array. Raises RuntimeError."""
        runtime, address = torch.cuda.cudart(), memory.ctypes.data
        with torch.cuda.device(self._device):
            error = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
            if error == ALREADY_REGISTERED:
                # For memory that was here before, whose pages a device would still copy, and not these.
                _check(runtime.cudaHostUnregister(address))
                error = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
            _check(error)

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """Let the pages of an array that was pinned go. Raises RuntimeError."""
        with torch.cuda.device(self._device):
            _check(torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data))


def _check(error: SupportsInt) -> None:
    """Raise RuntimeError unless a call of the CUDA runtime succeeded."""
    if int(error):
        raise RuntimeError(f"CUDA error {int(error)}")
