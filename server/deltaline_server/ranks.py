"""The ranks of a tensor-parallel server: processes that share a model, and how their outputs are joined."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# For ever, as no wait is without a limit; a rank that dies is told at once.
PATIENCE = timedelta(days=3650)


class Ranks:
    """This process among the ranks, and what it exchanges with them.

    All ranks call the same methods in the same order, with tensors of one shape and dtype; a call waits for the others.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.world_size = group.rank(), group.size()

    def beside(self) -> Ranks:
        """Return the same ranks on a way of their own, between hosts' memory, where a call may wait for any time.

        All ranks call it, as all else in the same order.
        """
        return Ranks(dist.new_group(dist.get_process_group_ranks(self._group), timeout=PATIENCE, backend="gloo"))

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks the tensor that rank 0 has; mutates that of the others."""
        dist.broadcast(tensor, group=self._group, group_src=0)

    def say_end(self) -> None:
        """Tell rank 0 that this rank is about to end."""
        dist.send(torch.empty(1), group=self._group, group_dst=0)

    def wait_for_end(self, rank: int) -> None:
        """Wait on rank 0 until another rank says that it ends. Raises RuntimeError when it ends without."""
        dist.recv(torch.empty(1), group=self._group, group_src=rank)

    def gather(self, part: Tensor) -> tuple[Tensor, ...]:
        """Return every rank's tensor, in the order of ranks; they are the caller's to mutate."""
        parts = part.new_empty(self.world_size, *part.shape).unbind()
        dist.all_gather(list(parts), part.contiguous(), group=self._group)
        return parts

    def sum(self, summand: Tensor) -> Tensor:
        """Return the sum of the ranks' summands, in their dtype: in fp32 in the order of ranks, and rounded once.

        So it has the same bits on every rank, wherever in a batch a row lies: the order of a ring would depend on that.
        """
        return added(self.gather(summand)).to(summand.dtype)


def added(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors in fp32, one after the other; mutates the first."""
    first, *others = parts
    total = first.float()
    for other in others:
        total.add_(other)
    return total
