"""Memory through which the GPUs of a group sum, and how large it is: known without triton, which computes by it."""

from dataclasses import dataclass

from torch import Tensor

PROGRAMS = 64
"""Of every launch, so that their turns are alike."""
PARTS = 3
"""Of the memory."""
UNWRITTEN = 0xFF
"""Every byte of memory that nobody has written to."""


@dataclass(frozen=True, eq=False)
class PeerSums:
    """Memory through which the GPUs of a group sum, as one of them sees it; all launch the same calls in one order.

    Args:
        memories: int64 `[world]` on the device, the address of each rank's memory, at which this GPU reaches it:
            `[PARTS, world, slot_bytes]`, a slot for what each rank sends, UNWRITTEN on all ranks before the first call.
        turns: int32 `[PROGRAMS, 2]`, this GPU's own, 0 before the first call: the part whose turn it is, and values of
            a summand of the call before.
        slot_bytes: most bytes of a summand, a multiple of 16.
        rank, world: this GPU's place, and how many there are.
    """

    memories: Tensor
    turns: Tensor
    slot_bytes: int
    rank: int
    world: int
