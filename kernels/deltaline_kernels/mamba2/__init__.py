"""The Mamba2 recurrence (SSD) over packed rows: prefill, decode, verify and the replay of accepted drafts."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, STATES, check_positive, check_tensor
from deltaline_kernels.mamba2.cpu import mamba2_cpu
from deltaline_kernels.mamba2.inputs import MambaHeads, MambaInputs, find_heads
from deltaline_kernels.mamba2.reference import mamba2_reference
from deltaline_kernels.operators import operator
from deltaline_kernels.rows import Rows, StateLines, check_rows, check_waypoints

__all__ = ["mamba2", "mamba2_reference", "run_mamba2"]


def _fake(xBC: Tensor, state: Tensor, **_: Any) -> Tensor:
    return xBC.new_empty(xBC.shape[0], *state.shape[1:3])


@operator(_fake, mutates=["state", "drafts"])
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
    """Run every row's replayed drafts and tokens through the state of its read line.

    Args:
        xBC: `[T, H*P + 2*G*S]` (x | B | C, as the convolution leaves them) fp32, bf16 or fp16; a row stride is fine.
            Head h uses group h // (H / G).
        dt: `[T, H]` in xBC.dtype or fp32; a row stride is fine. The time step is softplus(dt + dt_bias), clamped to
            dt_limit.
        A_log, D, dt_bias: `[H]` in xBC.dtype or fp32, contiguous. The log decay is the time step times -exp(A_log).
        state: `[L, H, P, S]` fp32, bf16 or fp16; a line stride is fine. Mutated: the write lines, the token
            lines, and the lines of waypoints.
        drafts: `[L, 2, M, G*S + H*P + H]` fp32, a line stride is fine: per token B, its update u (the time step times
            x) and its log decay. Mutated: a half of the VERIFY rows' write lines. M is at least the length of a VERIFY
            row.
        dt_limit: least and greatest time step, 0 <= least <= greatest.

    Returns:
        y `[T, H, P]` in xBC.dtype; zero for skipped rows, unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    heads = _check_state(xBC, state, rows, num_groups, dt_limit)
    inputs = MambaInputs(xBC, dt, A_log, D, dt_bias, heads)
    _check_inputs(inputs, state, drafts)
    check_waypoints(rows, inputs.num_tokens)
    y = inputs.empty_output()
    run_mamba2(inputs, StateLines(state, drafts), rows, y)
    return y


def run_mamba2(inputs: MambaInputs, lines: StateLines, rows: Rows, y: Tensor) -> None:
    """Do what `mamba2` does with checked arguments; writes to y `[T, H, P]` of any dtype, mutates `lines`."""
    if inputs.xBC.device.type == "cpu":
        mamba2_cpu(inputs, lines, rows, y)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.mamba2.launch import mamba2_triton

        mamba2_triton(inputs, lines, rows, y)


def _check_state(xBC: Tensor, state: Tensor, rows: Rows, num_groups: int, dt_limit: tuple[float, float]) -> MambaHeads:
    """Check what tells the sizes, and return them."""
    if not isinstance(xBC, Tensor):
        raise TypeError(f"xBC: expected Tensor, got {type(xBC).__name__}")
    check_tensor("state", state, (None, None, None, None), STATES, xBC.device, row_stride=True)
    check_rows(rows, xBC.device)
    _, num_heads, head_dim, state_dim = state.shape
    check_positive("num_groups", num_groups)
    if not isinstance(dt_limit, Sequence):
        raise TypeError(f"dt_limit: expected two numbers, got {dt_limit!r}")
    return find_heads(num_groups, num_heads, head_dim, state_dim, tuple(dt_limit))


def _check_inputs(inputs: MambaInputs, state: Tensor, drafts: Tensor) -> None:
    """Check the tensors whose sizes follow from those of the heads."""
    xBC, heads = inputs.xBC, inputs.heads
    device, kinds = xBC.device, (xBC.dtype, torch.float32)
    check_tensor("xBC", xBC, (None, heads.channels), ACTIVATIONS, device, row_stride=True)
    check_tensor("dt", inputs.dt, (xBC.shape[0], heads.num_heads), kinds, device, row_stride=True)
    for name, weight in (("A_log", inputs.rate), ("D", inputs.D), ("dt_bias", inputs.dt_bias)):
        check_tensor(name, weight, (heads.num_heads,), kinds, device)
    check_tensor("drafts", drafts, (state.shape[0], 2, None, heads.record), (torch.float32,), device, row_stride=True)
