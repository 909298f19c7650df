"""The gated delta rule over packed rows: prefill, decode, verify and the replay of accepted drafts.

Validates and picks the path by device. Does not know about projections, convolution or norms.
"""

import math

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, MAX_HEAD_DIM, STATES, check_positive, check_tensor
from deltaline_kernels.gated_delta.cpu import gated_delta_cpu
from deltaline_kernels.gated_delta.heads import Heads
from deltaline_kernels.gated_delta.reference import gated_delta_reference
from deltaline_kernels.rows import Rows

__all__ = ["gated_delta", "gated_delta_reference"]


@torch.no_grad()
def gated_delta(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    *,
    num_key_heads: int,
    scale: float | None = None,
    eps: float = 1e-6,
    normalize: bool = True,
) -> Tensor:
    """Run every row's replayed drafts and tokens through the state of its read line; record nothing for gradients.

    Args:
        qkv: `[T, 2*H*K + HV*V]` (q | k | v) fp32, bf16 or fp16; a row stride is fine.
        a, b: `[T, HV]` in qkv.dtype or fp32; a row stride is fine. The log decay is -exp(A_log) * softplus(a + dt_bias)
            and the strength of the update sigmoid(b).
        A_log, dt_bias: `[HV]` in qkv.dtype or fp32, contiguous. Both None: a is the log decay, at most 0, and b is the
            strength: any real number, but of moderate size (0 to 2, say) for long rows of 16-bit values, where
            fp16 holds what becomes of it.
        state: `[L, HV, V, K]` fp32 or bf16. Mutated: the write lines.
        drafts: `[L, 2, M, H*K + HV*V + HV]` fp32: per token k as it enters the state, its update u and its log decay.
            Mutated: a half of the VERIFY rows' write lines. M is at least the length of a VERIFY row.
        scale: of q, positive; None is K**-0.5. eps: under the root of the L2 norm of q and k.
        normalize: divide q and k by their L2 norms. False: they are used as they come, q still times scale.

    Returns:
        `[T, HV, V]` in qkv.dtype; zero for skipped rows, unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    heads = _check(qkv, a, b, A_log, dt_bias, state, drafts, rows, num_key_heads, scale, eps)
    o = torch.empty(qkv.shape[0], heads.num_value_heads, heads.value_dim, dtype=qkv.dtype, device=qkv.device)
    if qkv.device.type == "cpu":
        gated_delta_cpu(qkv, a, b, A_log, dt_bias, state, drafts, rows, o, heads, normalize=normalize)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.gated_delta.launch import gated_delta_triton

        gated_delta_triton(qkv, a, b, A_log, dt_bias, state, drafts, rows, o, heads, normalize=normalize)
    return o


def _check(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    num_key_heads: int,
    scale: float | None,
    eps: float,
) -> Heads:
    for name, value, kind in (("qkv", qkv, Tensor), ("rows", rows, Rows)):
        if not isinstance(value, kind):
            raise TypeError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
    device = qkv.device
    check_positive("num_key_heads", num_key_heads)
    check_tensor("state", state, (None, None, None, None), STATES, device)
    num_lines, num_value_heads, value_dim, key_dim = state.shape
    if num_value_heads < 1 or num_value_heads % num_key_heads:
        raise ValueError(f"state: expected a multiple of {num_key_heads} value heads, got {num_value_heads}")
    for name, size in (("K", key_dim), ("V", value_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"state: expected {name} of 1..{MAX_HEAD_DIM}, got {size}")
    if scale is not None and not 0.0 < scale < math.inf:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    if not 0.0 < eps < math.inf:
        raise ValueError(f"eps: expected a positive number, got {eps}")
    heads = Heads(num_key_heads, num_value_heads, key_dim, value_dim, key_dim**-0.5 if scale is None else scale, eps)
    num_tokens = qkv.shape[0]
    check_tensor("qkv", qkv, (None, 2 * heads.keys + heads.values), ACTIVATIONS, device, row_stride=True)
    gates = (qkv.dtype, torch.float32)
    check_tensor("a", a, (num_tokens, num_value_heads), gates, device, row_stride=True)
    check_tensor("b", b, (num_tokens, num_value_heads), gates, device, row_stride=True)
    if (A_log is None) != (dt_bias is None):
        missing = "A_log" if A_log is None else "dt_bias"
        raise ValueError(
            f"{missing}: expected a tensor, or None for both A_log and dt_bias, got None for {missing} alone"
        )
    if A_log is not None and dt_bias is not None:
        check_tensor("A_log", A_log, (num_value_heads,), gates, device)
        check_tensor("dt_bias", dt_bias, (num_value_heads,), gates, device)
    check_tensor("drafts", drafts, (num_lines, 2, None, heads.record), (torch.float32,), device)
    if rows.control.device != device:
        raise ValueError(f"rows: expected device {device}, got {rows.control.device}")
    return heads
