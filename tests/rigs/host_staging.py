"""A staging of the host's own memory, for what reads ahead where there is no other device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostStaging:
    """Has what was read where it was read to. Keeps how many bytes each tensor had that was begun, and fills it with
    what no file has."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def allocate(self, num_bytes: int) -> Tensor:
        self.begun.append(num_bytes)
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    @contextmanager
    def piece(self, target: Tensor) -> Iterator[NDArray[np.uint8]]:
        yield target.numpy()

    def hand_over(self, tensor: Tensor) -> None:
        pass
