"""The sizes of a case and its inputs: random numbers of a seed, and their truth. Knows no implementation."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor


class Shape(ABC):
    """The sizes of a case, and the least work that they need. dtype: that of the inputs."""

    dtype: torch.dtype

    @abstractmethod
    def words(self) -> dict[str, str]:
        """Say the sizes, for the report."""

    @abstractmethod
    def num_bytes(self) -> int:
        """Count the least bytes that must move: each input read once, each output written once."""

    @abstractmethod
    def num_flops(self) -> int:
        """Count multiplications and additions."""


S = TypeVar("S", bound=Shape)


class Batch(ABC, Generic[S]):
    """Random inputs of a shape, the same for a seed. No side mutates what it holds.

    Args:
        seed_name: what the random numbers depend on, beside the shape.
    """

    def __init__(self, shape: S, seed_name: str, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        # Its own generator: a capture that fails may leave the default one unusable.
        self.generator = torch.Generator(device).manual_seed(zlib.crc32(seed_name.encode()))

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw normal numbers in fp32; return them in `dtype`."""
        return torch.randn(size, generator=self.generator, device=self.device).to(dtype)

    def uniform(self, *size: int) -> Tensor:
        """Draw fp32 numbers of 0..1."""
        return torch.rand(size, generator=self.generator, device=self.device)

    def int32(self, values: Tensor | list[int]) -> Tensor:
        """Return `values` as int32 on the batch's device."""
        return torch.as_tensor(values).to(device=self.device, dtype=torch.int32)

    def words(self) -> dict[str, str]:
        """Say the sizes, and what of the work the inputs decide."""
        return self.shape.words()

    def num_bytes(self) -> int:
        """Count the shape's least bytes, and those that depend on the inputs."""
        return self.shape.num_bytes()

    def num_flops(self) -> int:
        """Count the shape's operations, and those that depend on the inputs."""
        return self.shape.num_flops()

    @abstractmethod
    def expected(self) -> dict[str, Tensor]:
        """Return the truth in fp32, by the names that sides give their tensors."""


AnyBatch = Batch[Any]
