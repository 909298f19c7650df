"""How bytes of files come to a device: through a few pieces of pinned memory."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Of what is copied at once. So much stays in a core's cache until it is hashed.
PIECE_BYTES = 4 << 20
# Pieces on their way to a GPU, and being filled.
NUM_PIECES = 32


class Staging(Protocol):
    """Takes bytes to tensors of a device; threads may share it."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return `num_bytes` bytes of the device, uint8, undefined."""

    def piece(self, target: Tensor) -> AbstractContextManager[NDArray[np.uint8]]:
        """Give an array of as many bytes as `target`, PIECE_BYTES at most, in a context; behind it they go there."""

    def hand_over(self, tensor: Tensor) -> None:
        """Let what the calling thread does next on the device find in `tensor`, given by allocate, what was sent."""


class CudaStaging:
    """Pieces of pinned memory take turns, and are copied on a stream of their own while others are filled."""

    def __init__(self, device: torch.device, allocate_pinned: Callable[[int], Tensor]) -> None:
        """allocate_pinned: gives so many bytes of pinned memory, uint8."""
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pieces: queue.SimpleQueue[tuple[Tensor, torch.cuda.Event]] = queue.SimpleQueue()
        for _ in range(NUM_PIECES):
            self._pieces.put((allocate_pinned(PIECE_BYTES), torch.cuda.Event(blocking=True)))

    def allocate(self, num_bytes: int) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    @contextmanager
    def piece(self, target: Tensor) -> Iterator[NDArray[np.uint8]]:
        memory, copied = self._pieces.get()
        try:
            copied.synchronize()
            yield memory[: len(target)].numpy()
            with torch.cuda.stream(self._stream):
                target.copy_(memory[: len(target)], non_blocking=True)
                copied.record()
        finally:
            self._pieces.put((memory, copied))

    def hand_over(self, tensor: Tensor) -> None:
        current = torch.cuda.current_stream(self._device)
        # For what was sent of other tensors as well, which is a few pieces.
        current.wait_stream(self._stream)
        # Its memory is this stream's: it may be given away again only when the other one is done with it.
        tensor.record_stream(current)
