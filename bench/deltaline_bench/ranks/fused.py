"""One kernel in place of three: the ranks' sum, the residual behind it and the norm behind that.

A candidate, kept here until it is measured. Each program has some rows: it puts this rank's summands where the others
read them, says so, waits until all ranks have, and adds in fp32 in the order of ranks. Two halves of the memory take
turns: a rank writes a half again when it has heard of all others in the call between, which they began after they had
read it. So one wait is enough. Counts wrap, and are compared by their difference.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 64


@triton.jit  # type: ignore[untyped-decorator]
def _sum_norm(  # type: ignore[no-untyped-def]
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
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
):
    pid = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    is_in = d < D
    count = tl.load(counts + pid) + 1
    begin = (count & 1) * half
    own = tl.multiple_of(tl.load(memories + RANK).to(tl.pointer_type(summand.dtype.element_ty)), 16) + begin
    for row in range(pid, num_rows, tl.num_programs(0)):
        x = tl.load(summand + row * D + d, mask=is_in)
        tl.store(own + row * D + d, x, mask=is_in)
    tl.debug_barrier()
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
    scale = tl.load(weight + d, mask=is_in, other=0.0)
    for row in range(pid, num_rows, tl.num_programs(0)):
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(WORLD):
            memory = tl.multiple_of(tl.load(memories + rank).to(tl.pointer_type(summand.dtype.element_ty)), 16) + begin
            part = tl.load(memory + row * D + d, mask=is_in, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
        made = total.to(summand.dtype.element_ty)
        r = tl.load(residual + row * D + d, mask=is_in, other=0.0).to(tl.float32) + made.to(tl.float32)
        r = r.to(residual.dtype.element_ty)
        tl.store(summed + row * D + d, r, mask=is_in)
        r = r.to(tl.float32)
        y = r * tl.rsqrt(tl.sum(r * r) / D + eps) * scale
        tl.store(normed + row * D + d, y.to(normed.dtype.element_ty), mask=is_in)
    tl.store(counts + pid, count)


class SumNorm:
    """The kernel with its memory, for at most `rows` rows of `hidden` bf16 values."""

    def __init__(self, group: dist.ProcessGroup, rows: int, hidden: int, device: torch.device) -> None:
        self._half, self._hidden, self._world = rows * hidden, hidden, group.size()
        self._rank = group.rank()
        self._memory = symm_mem.empty(2 * self._half, dtype=torch.bfloat16, device=device)
        memory = symm_mem.rendezvous(self._memory, group.group_name)
        self._flags = symm_mem.empty(PROGRAMS * self._world, dtype=torch.int32, device=device)
        flags = symm_mem.rendezvous(self._flags, group.group_name)
        self._flags.zero_()
        self._memories = torch.tensor(memory.buffer_ptrs, dtype=torch.int64, device=device)
        self._flag_pointers = torch.tensor(flags.buffer_ptrs, dtype=torch.int64, device=device)
        self._counts = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def __call__(self, summand: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the residual with the ranks' sum, and that normalised, both `[T, hidden]`."""
        summed, normed = torch.empty_like(residual), torch.empty_like(residual)
        kernel: Any = _sum_norm
        kernel[(PROGRAMS,)](
            summand,
            residual,
            weight,
            summed,
            normed,
            self._memories,
            self._flag_pointers,
            self._counts,
            len(summand),
            self._half,
            float(eps),
            D=self._hidden,
            BLOCK=triton.next_power_of_2(self._hidden),
            RANK=self._rank,
            WORLD=self._world,
            num_warps=16,
        )
        return summed, normed
