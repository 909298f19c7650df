"""Memory of every rank's GPU that the GPUs of the others read and write, and torch's kernels that sum by it.

Both add a value's summands in the order of ranks, wherever it lies, so that all ranks have the same bits; of bf16 every
addition rounds. They need no multicast.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float32)
"""What the kernels add."""
ALIGNMENT = 16
"""A summand's bytes are a multiple of it."""


class PeerMemory:
    """Room for one summand at a time. All ranks call the same methods in the same order, each on one stream."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        """Allocate and share it. Raises RuntimeError where a GPU can't reach the others'."""
        self.num_bytes = num_bytes
        self._memory = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        self._group = group.group_name
        symm_mem.rendezvous(self._memory, self._group)

    def holds(self, summand: Tensor) -> bool:
        """Whether a summand can be added here."""
        num_bytes = summand.numel() * summand.itemsize
        return summand.dtype in DTYPES and 0 < num_bytes <= self.num_bytes and num_bytes % ALIGNMENT == 0

    def one_shot(self, summand: Tensor) -> Tensor:
        """Return the sum: each rank reads all summands."""
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            self._room(summand), summand.contiguous(), "sum", self._group
        )
        return summed

    def two_shot(self, summand: Tensor) -> Tensor:
        """Return the sum: each rank adds a part of it, and reads the parts of the others."""
        room, summed = self._room(summand), torch.empty_like(summand, memory_format=torch.contiguous_format)
        room.copy_(summand)
        torch.ops.symm_mem.two_shot_all_reduce_out(room, "sum", self._group, summed)
        return summed

    def _room(self, summand: Tensor) -> Tensor:
        return self._memory[: summand.numel() * summand.itemsize].view(summand.dtype).view(summand.shape)
