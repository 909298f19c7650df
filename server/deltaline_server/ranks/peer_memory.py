"""Memory of every rank's GPU that the GPUs of the others read and write, and torch's kernels that sum by it.

All add a value's summands in the order of ranks, wherever it lies, so that all ranks have the same bits; of bf16 every
addition of torch's kernels rounds. They need no multicast.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from deltaline_kernels.norm.peer_sums import PARTS, PROGRAMS, UNWRITTEN, PeerSums

DTYPES = (torch.bfloat16, torch.float32)
"""What the kernels add."""
ALIGNMENT = 16
"""A summand's bytes are a multiple of it."""
JOINED_BYTES = 5 << 19
"""Of a summand that one launch adds, with the residual and the norm behind it: 256 rows of 5,120 bf16 values."""


def slots_bytes(world_size: int) -> int:
    """Bytes on each GPU of what `PeerMemory.join` works with."""
    return PARTS * world_size * JOINED_BYTES


class PeerMemory:
    """Room for one summand at a time. All ranks call the same methods in the same order, each on one stream."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        """Allocate and share it. Raises RuntimeError where a GPU can't reach the others'."""
        self.num_bytes = num_bytes
        self._memory = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        self._group = group.group_name
        symm_mem.rendezvous(self._memory, self._group)
        self._joining = self._share_slots(group, device)

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

    def joins(self, summand: Tensor) -> bool:
        """Whether `join` takes a summand."""
        row_bytes = summand.shape[-1] * summand.itemsize
        return 0 < len(summand) * row_bytes <= JOINED_BYTES and row_bytes % ALIGNMENT == 0

    def join(
        self, summand: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return residual + scale * sum, and its norm, as deltaline_kernels has them (norm/summed.py)."""
        from deltaline_kernels.norm.summed import summed_rms_norm  # it needs triton

        return summed_rms_norm(summand.contiguous(), residual.contiguous(), weight, eps, scale, self._joining)

    def _share_slots(self, group: dist.ProcessGroup, device: torch.device) -> PeerSums:
        """Allocate and share what `join` works with, on all ranks before any of them uses it."""
        self._slots = symm_mem.empty(slots_bytes(group.size()), dtype=torch.uint8, device=device)
        addresses = symm_mem.rendezvous(self._slots, self._group).buffer_ptrs
        self._slots.fill_(UNWRITTEN)
        memories = torch.tensor(addresses, dtype=torch.int64, device=device)
        turns = torch.zeros(PROGRAMS, 2, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        dist.barrier(group)
        return PeerSums(memories, turns, JOINED_BYTES, group.rank(), group.size())

    def _room(self, summand: Tensor) -> Tensor:
        return self._memory[: summand.numel() * summand.itemsize].view(summand.dtype).view(summand.shape)
