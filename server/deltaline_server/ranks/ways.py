"""The ranks of a tensor-parallel server: processes that share a model, and how their outputs are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from deltaline_server.ranks.orders import Orders
from deltaline_server.ranks.peer_memory import PeerMemory

# Up to so many bytes it takes less time to read all summands than to read parts, and then those of the sum.
ONE_SHOT_BYTES = 1 << 20
# As torch called it before 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# For ever, as no wait is without a limit; a rank that dies is told at once.
PATIENCE = timedelta(days=3650)


@dataclass(frozen=True)
class Ways:
    """Ways of the same ranks beside their sums, each used by one thread of a rank at a time: for what rank 0 tells, for
    signs of life, for states' bytes, and for adapters."""

    orders: Orders
    beats: Ranks
    states: Ranks
    adapters: Ranks

    @classmethod
    def open(cls, ranks: Ranks) -> Ways:
        """All ranks call it, as all else in the same order."""
        return cls(Orders.open(ranks.beside()), ranks.beside(), ranks.beside(), ranks.beside())


class Ranks:
    """This process among the ranks, and what it exchanges with them.

    All ranks call the same methods in the same order, with tensors of one shape and dtype; a call waits for the others.
    """

    def __init__(self, group: dist.ProcessGroup, memory: PeerMemory | None = None) -> None:
        """memory: by which sums are made where it has room; None: all are gathered."""
        self._group, self._memory = group, memory
        self.rank, self.world_size = group.rank(), group.size()

    @property
    def way(self) -> str:
        """How sums are made, for people."""
        return "gathered" if self._memory is None else "peers' memory"

    def beside(self) -> Ranks:
        """Return the same ranks on a way of their own, between hosts' memory, where a call may wait for any time.

        All ranks call it, as all else in the same order.
        """
        return Ranks(dist.new_group(dist.get_process_group_ranks(self._group), timeout=PATIENCE, backend="gloo"))

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks the tensor that rank 0 has; mutates that of the others."""
        dist.broadcast(tensor, group=self._group, group_src=0)

    def give(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor to another rank, which takes it. Raises RuntimeError when that is gone."""
        dist.send(tensor, group=self._group, group_dst=rank)

    def take(self, tensor: Tensor, rank: int) -> None:
        """Wait for what another rank gives; mutates tensor. Raises RuntimeError when that is gone."""
        dist.recv(tensor, group=self._group, group_src=rank)

    def gather(self, part: Tensor) -> tuple[Tensor, ...]:
        """Return every rank's tensor, in the order of ranks; they are the caller's to mutate."""
        parts = part.new_empty(self.world_size, *part.shape)
        all_gather(parts.flatten(), part.contiguous().flatten(), group=self._group)
        return parts.unbind()

    def sum(self, summand: Tensor) -> Tensor:
        """Return the sum of the ranks' summands, in their dtype, added in the order of ranks.

        So it has the same bits on every rank, wherever in a batch a row lies: the order of a ring would depend on that.
        What is gathered is added in fp32 and rounded once. How it is added follows from the summand's size alone.
        """
        memory = self._memory
        if memory is not None and memory.holds(summand):
            is_small = summand.numel() * summand.itemsize <= ONE_SHOT_BYTES
            return memory.one_shot(summand) if is_small else memory.two_shot(summand)
        return added(self.gather(summand)).to(summand.dtype)

    def joins(self, summand: Tensor) -> bool:
        """Whether `join` takes a summand: by its size alone; all have one dtype."""
        return self._memory is not None and self._memory.joins(summand)

    def join(
        self, summand: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return what a residual branch leaves, residual + scale * sum, in residual.dtype, and the norm of that in the
        summand's, both `[T, D]`: in one launch, by memory of the peers.

        The sum is made in fp32 in the order of ranks, and rounded once. weight: `[D]` fp32.
        """
        assert self._memory is not None
        return self._memory.join(summand, residual, weight, eps, scale)


def added(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors in fp32, one after the other; mutates the first."""
    first, *others = parts
    total = first.float()
    for other in others:
        total.add_(other)
    return total
