"""The Mamba-1 recurrence (selective scan) over packed rows: prefill, decode, verify and the replay of drafts."""

from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, STATES, check_positive, check_tensor
from deltaline_kernels.mamba1.cpu import mamba1_cpu
from deltaline_kernels.mamba1.inputs import ScanInputs, find_sizes
from deltaline_kernels.mamba1.reference import mamba1_reference
from deltaline_kernels.operators import operator
from deltaline_kernels.rows import Rows, StateLines, check_rows, check_waypoints

__all__ = ["mamba1", "mamba1_reference", "run_mamba1"]


def _fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator(_fake, mutates=["state", "drafts"])
def mamba1(
    x: Tensor,
    dt: Tensor,
    BC: Tensor,
    z: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    *,
    num_groups: int = 1,
) -> Tensor:
    """Run every row's replayed drafts and tokens through the state of its read line.

    Args:
        x: `[T, D]` (as the convolution leaves them) fp32, bf16 or fp16; a row stride is fine. Channel d uses group
            d // (D / G).
        dt: `[T, D]` in x.dtype or fp32; a row stride is fine. The time step is softplus(dt + dt_bias).
        BC: `[T, 2*G*S]` (B | C) in x.dtype or fp32; a row stride is fine.
        z: `[T, D]` in x.dtype or fp32, whose silu is the outputs' factor; a row stride is fine. None: no factor.
        A_log: `[D, S]` in x.dtype or fp32, contiguous. The log decay is the time step times -exp(A_log).
        D, dt_bias: `[D]` in x.dtype or fp32, contiguous.
        state: `[L, D, S]` fp32, bf16 or fp16; a line stride is fine. Mutated: the write lines, the token lines, and the
            lines of waypoints.
        drafts: `[L, 2, M, G*S + 2*D]` fp32, a line stride is fine: per token B, its update u (the time step times x)
            and the time step. Mutated: a half of the VERIFY rows' write lines. M is at least the length of a VERIFY
            row.

    Returns:
        y `[T, D]` in x.dtype; zero for skipped rows, unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected Tensor, got {type(x).__name__}")
    check_tensor("state", state, (None, None, None), STATES, x.device, row_stride=True)
    check_rows(rows, x.device)
    check_positive("num_groups", num_groups)
    inputs = ScanInputs(x, dt, BC, z, A_log, D, dt_bias, find_sizes(num_groups, *state.shape[1:]))
    _check_inputs(inputs, state, drafts)
    check_waypoints(rows, inputs.num_tokens)
    y = inputs.empty_output()
    run_mamba1(inputs, StateLines(state, drafts), rows, y)
    return y


def run_mamba1(inputs: ScanInputs, lines: StateLines, rows: Rows, y: Tensor) -> None:
    """Do what `mamba1` does with checked arguments; writes to y `[T, D]` of any dtype, mutates `lines`."""
    if inputs.x.device.type == "cpu":
        mamba1_cpu(inputs, lines, rows, y)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.mamba1.recurrent import mamba1_triton

        mamba1_triton(inputs, lines, rows, y)


def _check_inputs(inputs: ScanInputs, state: Tensor, drafts: Tensor) -> None:
    """Check the tensors whose sizes follow from those of the state."""
    x, sizes = inputs.x, inputs.heads
    device, kinds = x.device, (x.dtype, torch.float32)
    check_tensor("x", x, (None, sizes.channels), ACTIVATIONS, device, row_stride=True)
    check_tensor("dt", inputs.dt, tuple(x.shape), kinds, device, row_stride=True)
    check_tensor("BC", inputs.BC, (x.shape[0], 2 * sizes.key_channels), kinds, device, row_stride=True)
    if inputs.z is not None:
        check_tensor("z", inputs.z, tuple(x.shape), kinds, device, row_stride=True)
    check_tensor("A_log", inputs.rate, (sizes.channels, sizes.state_dim), kinds, device)
    for name, weight in (("D", inputs.D), ("dt_bias", inputs.dt_bias)):
        check_tensor(name, weight, (sizes.channels,), kinds, device)
    check_tensor("drafts", drafts, (state.shape[0], 2, None, sizes.record), (torch.float32,), device, row_stride=True)
