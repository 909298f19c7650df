"""The end of a residual branch that GPUs share, and the norm behind it: sum, residual and norm in one launch.

Each program has some rows: it writes this GPU's summands into the memory of the others, takes theirs out of its own as
they come, and adds in fp32 in the order of ranks. Nothing is said or waited for beside the values: memory that nobody
has written to holds a NaN that no summand is, every bit of it 1. Three parts of the memory take turns. In each call a
GPU puts that NaN back where it has read in the one before; the others write there again in the call after the next,
which they begin behind a summand that this GPU sends in the next one. Knows no process group: who shares the memory
hands it in.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.device.overlap import can_overlap, launch_options
from deltaline_kernels.norm.peer_sums import PARTS, PROGRAMS, PeerSums


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_rows"])
def _summed_rms_norm(
    summand,
    residual,
    weight,
    summed,
    normed,
    memories,
    turns,
    num_rows,
    slot,
    scale,
    eps,
    D: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kind: tl.constexpr = summand.dtype.element_ty
    bits: tl.constexpr = tl.int16 if kind.primitive_bitwidth == 16 else tl.int32
    nan: tl.constexpr = 0x7FFF if kind.primitive_bitwidth == 16 else 0x7FFFFFFF
    pid = tl.program_id(0)
    o_d = tl.arange(0, BLOCK)
    in_row = o_d < D
    if OVERLAP:
        gdc_launch_dependents()
    b_w = tl.load(weight + o_d, mask=in_row, other=0.0)
    own = tl.multiple_of(tl.load(memories + RANK).to(tl.pointer_type(bits)), 16)
    if OVERLAP:
        gdc_wait()
    turn = tl.load(turns + 2 * pid)
    num_before = tl.multiple_of(tl.load(turns + 2 * pid + 1), 128 // kind.primitive_bitwidth)
    for row in range(pid, num_rows, tl.num_programs(0)):
        b_x = tl.load(summand + row * D + o_d, mask=in_row).to(bits, bitcast=True)
        b_x = tl.where(b_x == -1, nan, b_x).to(bits)
        for other in tl.static_range(WORLD):
            if other != RANK:
                theirs = tl.multiple_of(tl.load(memories + other).to(tl.pointer_type(bits)), 16)
                tl.store(theirs + (turn * WORLD + RANK) * slot + row * D + o_d, b_x, mask=in_row)
    for other in tl.static_range(WORLD):
        if other != RANK:
            read = own + ((turn + PARTS - 1) % PARTS * WORLD + other) * slot
            for begin in range(pid * BLOCK, num_before, tl.num_programs(0) * BLOCK):
                tl.store(read + begin + o_d, tl.full((BLOCK,), -1, bits), mask=begin + o_d < num_before)
    for row in range(pid, num_rows, tl.num_programs(0)):
        b_r = tl.load(residual + row * D + o_d, mask=in_row, other=0.0).to(tl.float32)
        b_sum = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(WORLD):
            if rank == RANK:
                b_x = tl.load(summand + row * D + o_d, mask=in_row, other=0.0)
            else:
                sent = own + (turn * WORLD + rank) * slot + row * D + o_d
                b_sent = tl.load(sent, mask=in_row, other=0, volatile=True)
                while tl.sum((b_sent == -1).to(tl.int32), axis=0) > 0:
                    b_sent = tl.load(sent, mask=in_row, other=0, volatile=True)
                b_x = b_sent.to(kind, bitcast=True)
            b_sum += b_x.to(tl.float32)
        b_r = (b_r + scale * b_sum.to(kind).to(tl.float32)).to(summed.dtype.element_ty)
        tl.store(summed + row * D + o_d, b_r, mask=in_row)
        b_n = b_r.to(kind).to(tl.float32)
        b_n = b_n * tl.rsqrt(tl.sum(b_n * b_n, axis=0) / D + eps) * b_w
        tl.store(normed + row * D + o_d, b_n.to(kind), mask=in_row)
    tl.debug_barrier()  # all threads have read the turn
    tl.store(turns + 2 * pid, (turn + 1) % PARTS)
    tl.store(turns + 2 * pid + 1, num_rows * D)


def summed_rms_norm(
    summand: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float, peers: PeerSums
) -> tuple[Tensor, Tensor]:
    """Return the residual with the GPUs' sum, and the norm of that; mutates the memory of `peers`.

    Args:
        summand: `[T, D]` contiguous, bf16, fp16 or fp32, the same in all calls with `peers`, of at most
            `peers.slot_bytes`; T > 0, D a multiple of 16 bytes.
        residual: `[T, D]` contiguous, of the same dtype or fp32.
        weight: `[D]` fp32. eps: added to the mean square. scale: of the sum, which is rounded to summand.dtype first.

    Returns:
        `[T, D]` in residual.dtype, residual + scale * sum; and `[T, D]` in summand.dtype, that in summand.dtype times
        rsqrt(mean of its squares + eps) times weight.

    Raises:
        ValueError: the summand has more bytes than there is room for, or none, behind which GPUs would not wait.
    """
    num_bytes = summand.numel() * summand.itemsize
    if not 0 < num_bytes <= peers.slot_bytes:
        raise ValueError(f"summand: expected 1 .. {peers.slot_bytes} bytes, got {num_bytes}")
    size, overlap = summand.shape[1], can_overlap(summand)
    summed, normed = torch.empty_like(residual), torch.empty_like(summand)
    kernel: Any = _summed_rms_norm
    kernel[(PROGRAMS,)](
        summand,
        residual,
        weight,
        summed,
        normed,
        peers.memories,
        peers.turns,
        len(summand),
        peers.slot_bytes // summand.itemsize,
        float(scale),
        float(eps),
        D=size,
        RANK=peers.rank,
        WORLD=peers.world,
        PARTS=PARTS,
        BLOCK=triton.next_power_of_2(size),
        OVERLAP=overlap,
        num_warps=16 if size > 2048 else 4,
        **launch_options(overlap=overlap),
    )
    return summed, normed
