"""Checks of the arguments that the operations of a delta rule share."""

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, STATES, check_positive, check_tensor
from deltaline_kernels.device.delta_rule.inputs import DeltaHeads, DeltaInputs, find_heads
from deltaline_kernels.rows import Rows, check_rows, check_waypoints


def check_heads(
    qkv: Tensor, state: Tensor, rows: Rows, num_key_heads: int, scale: float | None, eps: float, *, keyed: bool = False
) -> DeltaHeads:
    """Check what tells the sizes, and qkv, and return the sizes."""
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv: expected Tensor, got {type(qkv).__name__}")
    check_tensor("state", state, (None, None, None, None), STATES, qkv.device, row_stride=True)
    check_rows(rows, qkv.device)
    _, num_value_heads, value_dim, key_dim = state.shape
    check_positive("num_key_heads", num_key_heads)
    heads = find_heads(num_key_heads, num_value_heads, key_dim, value_dim, scale, eps, keyed=keyed)
    check_tensor("qkv", qkv, (None, heads.channels), ACTIVATIONS, qkv.device, row_stride=True)
    return heads


def check_inputs(inputs: DeltaInputs, state: Tensor, drafts: Tensor, rows: Rows) -> None:
    """Check the tensors whose sizes follow from those of the heads."""
    v, A_log, dt_bias, heads = inputs.v, inputs.A_log, inputs.dt_bias, inputs.heads
    device, gates = v.device, (v.dtype, torch.float32)
    check_tensor("a", inputs.a, (v.shape[0], heads.num_decays), gates, device, row_stride=True)
    check_tensor("b", inputs.b, (v.shape[0], heads.num_value_heads), gates, device, row_stride=True)
    if (A_log is None) != (dt_bias is None):
        missing = "A_log" if A_log is None else "dt_bias"
        raise ValueError(
            f"{missing}: expected a tensor, or None for both A_log and dt_bias, got None for {missing} alone"
        )
    if A_log is not None and dt_bias is not None:
        check_tensor("A_log", A_log, (heads.num_value_heads,), gates, device)
        check_tensor("dt_bias", dt_bias, (heads.num_decays,), gates, device)
    check_tensor("drafts", drafts, (state.shape[0], 2, None, heads.record), (torch.float32,), device, row_stride=True)
    check_waypoints(rows, inputs.num_tokens)
