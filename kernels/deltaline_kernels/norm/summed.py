"""The end of a residual branch that GPUs share, and the norm behind it: sum, residual and norm in one launch.

Each program has some rows: it puts this GPU's summands where the others read them, says so, waits until all have, and
adds in fp32 in the order of ranks. Two halves of the memory take turns. A GPU writes a half again when in the call
between it has heard of all others, which began that call behind their reading of the half: so one wait is enough.
Counts wrap, and are compared by their difference. Knows no process group: who shares the memory hands it in.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 64
"""Of every launch, so that their counts are alike."""


@dataclass(frozen=True, eq=False)
class PeerSums:
    """Memory through which the GPUs of a group sum, as one of them sees it; all launch the same calls in one order.

    Args:
        memories: int64 `[world]` on the device, the address of each rank's memory, at which this GPU reaches it: two
            halves of `half_bytes` each.
        flags: int64 `[world]`, likewise of int32 `[PROGRAMS, world]`, 0 on all ranks before the first call.
        counts: int32 `[PROGRAMS]`, this GPU's own, 0 before the first call.
        half_bytes: most bytes of a summand, a multiple of 16.
        rank, world: this GPU's place, and how many there are.
    """

    memories: Tensor
    flags: Tensor
    counts: Tensor
    half_bytes: int
    rank: int
    world: int


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_rows"])
def _summed_rms_norm(
    summand,
    residual,
    weight,
    summed,
    normed,
    memories,
    flags,
    counts,
    num_rows,
    half,
    scale,
    eps,
    D: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    kind: tl.constexpr = summand.dtype.element_ty
    pid = tl.program_id(0)
    o_d = tl.arange(0, BLOCK)
    in_row = o_d < D
    count = tl.load(counts + pid) + 1
    begin = (count & 1) * half
    own = tl.multiple_of(tl.load(memories + RANK).to(tl.pointer_type(kind)), 16) + begin
    for row in range(pid, num_rows, tl.num_programs(0)):
        b_x = tl.load(summand + row * D + o_d, mask=in_row)
        tl.store(own + row * D + o_d, b_x, mask=in_row)
    tl.debug_barrier()  # all of the program's stores are before what one of its threads says
    for other in tl.static_range(WORLD):
        if other != RANK:
            theirs = tl.load(flags + other).to(tl.pointer_type(tl.int32)) + pid * WORLD + RANK
            tl.atomic_xchg(theirs, count, sem="release", scope="sys")
    for other in tl.static_range(WORLD):
        if other != RANK:
            mine = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + pid * WORLD + other
            said = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
            while said - count < 0:
                said = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    b_w = tl.load(weight + o_d, mask=in_row, other=0.0)
    for row in range(pid, num_rows, tl.num_programs(0)):
        b_sum = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(WORLD):
            memory = tl.multiple_of(tl.load(memories + rank).to(tl.pointer_type(kind)), 16) + begin
            # Not by way of the L1, which does not hear of what others write.
            b_sum += tl.load(memory + row * D + o_d, mask=in_row, other=0.0, cache_modifier=".cg").to(tl.float32)
        b_r = tl.load(residual + row * D + o_d, mask=in_row, other=0.0).to(tl.float32)
        b_r = (b_r + scale * b_sum.to(kind).to(tl.float32)).to(summed.dtype.element_ty)
        tl.store(summed + row * D + o_d, b_r, mask=in_row)
        b_n = b_r.to(kind).to(tl.float32)
        b_n = b_n * tl.rsqrt(tl.sum(b_n * b_n, axis=0) / D + eps) * b_w
        tl.store(normed + row * D + o_d, b_n.to(kind), mask=in_row)
    tl.store(counts + pid, count)


def summed_rms_norm(
    summand: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float, peers: PeerSums
) -> tuple[Tensor, Tensor]:
    """Return the residual with the GPUs' sum, and the norm of that; mutates the memory of `peers`.

    Args:
        summand: `[T, D]` contiguous, bf16, fp16 or fp32, of at most `peers.half_bytes`; D a multiple of 16 bytes.
        residual: `[T, D]` contiguous, of the same dtype or fp32.
        weight: `[D]` fp32. eps: added to the mean square. scale: of the sum, which is rounded to summand.dtype first.

    Returns:
        `[T, D]` in residual.dtype, residual + scale * sum; and `[T, D]` in summand.dtype, that in summand.dtype times
        rsqrt(mean of its squares + eps) times weight.

    Raises:
        ValueError: the summand has more bytes than there is room for.
    """
    num_bytes = summand.numel() * summand.itemsize
    if num_bytes > peers.half_bytes:
        raise ValueError(f"summand: expected at most {peers.half_bytes} bytes, got {num_bytes}")
    size = summand.shape[1]
    summed, normed = torch.empty_like(residual), torch.empty_like(summand)
    kernel: Any = _summed_rms_norm
    kernel[(PROGRAMS,)](
        summand,
        residual,
        weight,
        summed,
        normed,
        peers.memories,
        peers.flags,
        peers.counts,
        len(summand),
        peers.half_bytes // summand.itemsize,
        float(scale),
        float(eps),
        D=size,
        RANK=peers.rank,
        WORLD=peers.world,
        BLOCK=triton.next_power_of_2(size),
        num_warps=16 if size > 2048 else 4,
    )
    return summed, normed
