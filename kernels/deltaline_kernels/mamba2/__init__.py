"""The Mamba2 recurrence (SSD) over packed rows: prefill, decode, verify and the replay of accepted drafts.

Validates and picks the path by device. Does not know about projections, convolution or norms.
"""

import math

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, MAX_HEAD_DIM, STATES, check_positive, check_tensor
from deltaline_kernels.mamba2.cpu import mamba2_cpu
from deltaline_kernels.mamba2.heads import Heads
from deltaline_kernels.mamba2.reference import mamba2_reference
from deltaline_kernels.rows import Rows

__all__ = ["mamba2", "mamba2_reference"]


@torch.no_grad()
def mamba2(
    xBC: Tensor,
    dt: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    *,
    num_groups: int,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Run every row's replayed drafts and tokens through the state of its read line; record nothing for gradients.

    Args:
        xBC: `[T, H*P + 2*G*S]` (x | B | C, as the convolution leaves them) fp32, bf16 or fp16; a row stride is fine.
            Head h uses group h // (H / G).
        dt: `[T, H]` in xBC.dtype or fp32; a row stride is fine. The time step is softplus(dt + dt_bias), clamped to
            dt_limit.
        A_log, D, dt_bias: `[H]` in xBC.dtype or fp32, contiguous. The log decay is the time step times -exp(A_log).
        state: `[L, H, P, S]` fp32 or bf16. Mutated: the write lines.
        drafts: `[L, 2, M, G*S + H*P + H]` fp32: per token B, its update u (the time step times x) and its log decay.
            Mutated: a half of the VERIFY rows' write lines. M is at least the length of a VERIFY row.
        dt_limit: least and greatest time step, 0 <= least <= greatest.

    Returns:
        y `[T, H, P]` in xBC.dtype; zero for skipped rows, unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    heads = _check(xBC, dt, A_log, D, dt_bias, state, drafts, rows, num_groups, dt_limit)
    y = torch.empty(xBC.shape[0], heads.num_heads, heads.head_dim, dtype=xBC.dtype, device=xBC.device)
    if xBC.device.type == "cpu":
        mamba2_cpu(xBC, dt, -A_log.float().exp(), D, dt_bias, state, drafts, rows, y, heads)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.mamba2.launch import mamba2_triton

        mamba2_triton(xBC, dt, A_log, D, dt_bias, state, drafts, rows, y, heads)
    return y


def _check(
    xBC: Tensor,
    dt: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    num_groups: int,
    dt_limit: tuple[float, float],
) -> Heads:
    for name, value, kind in (("xBC", xBC, Tensor), ("rows", rows, Rows)):
        if not isinstance(value, kind):
            raise TypeError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
    device = xBC.device
    check_positive("num_groups", num_groups)
    check_tensor("state", state, (None, None, None, None), STATES, device)
    num_lines, num_heads, head_dim, state_dim = state.shape
    if num_heads < 1 or num_heads % num_groups:
        raise ValueError(f"state: expected a multiple of {num_groups} heads, got {num_heads}")
    for name, size in (("P", head_dim), ("S", state_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"state: expected {name} of 1..{MAX_HEAD_DIM}, got {size}")
    least, greatest = dt_limit
    if not (0.0 <= least < math.inf and least <= greatest):
        raise ValueError(f"dt_limit: expected 0 <= least <= greatest, got {dt_limit}")
    heads = Heads(num_groups, num_heads, head_dim, state_dim, (float(least), float(greatest)))
    check_tensor("xBC", xBC, (None, heads.channels), ACTIVATIONS, device, row_stride=True)
    kinds = (xBC.dtype, torch.float32)
    check_tensor("dt", dt, (xBC.shape[0], num_heads), kinds, device, row_stride=True)
    for name, weight in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias)):
        check_tensor(name, weight, (num_heads,), kinds, device)
    check_tensor("drafts", drafts, (num_lines, 2, None, heads.record), (torch.float32,), device)
    if rows.control.device != device:
        raise ValueError(f"rows: expected device {device}, got {rows.control.device}")
    return heads
