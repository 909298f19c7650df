"""The gated delta rule over packed rows: prefill, decode, verify and the replay of accepted drafts."""

from typing import Any

from torch import Tensor

from deltaline_kernels.device.delta_rule.arguments import check_heads, check_inputs
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.gated_delta.cpu import gated_delta_cpu
from deltaline_kernels.gated_delta.reference import gated_delta_reference
from deltaline_kernels.operators import operator
from deltaline_kernels.rows import Rows, StateLines

__all__ = ["gated_delta", "gated_delta_reference", "run_gated_delta"]


def _fake(qkv: Tensor, state: Tensor, **_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape[0], *state.shape[1:3])


@operator(_fake, mutates=["state", "drafts"])
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
    """Run every row's replayed drafts and tokens through the state of its read line.

    Args:
        qkv: `[T, 2*H*K + HV*V]` (q | k | v) fp32, bf16 or fp16; a row stride is fine.
        a, b: `[T, HV]` in qkv.dtype or fp32; a row stride is fine. The log decay is -exp(A_log) * softplus(a + dt_bias)
            and the strength of the update sigmoid(b).
        A_log, dt_bias: `[HV]` in qkv.dtype or fp32, contiguous. Both None: a is the log decay, at most 0, and b is the
            strength: any real number, but of moderate size (0 to 2, say) for long rows of 16-bit values, where
            fp16 holds what becomes of it.
        state: `[L, HV, V, K]` fp32, bf16 or fp16; a line stride is fine. Mutated: the write lines, the token
            lines, and the lines of waypoints.
        drafts: `[L, 2, M, H*K + HV*V + HV]` fp32, a line stride is fine: per token k as it enters the state, its update
            u and its log decay. Mutated: a half of the VERIFY rows' write lines. M is at least the length of a VERIFY
            row.
        scale: of q, positive; None is K**-0.5. eps: under the root of the L2 norm of q and k.
        normalize: divide q and k by their L2 norms. False: they are used as they come, q still times scale.

    Returns:
        `[T, HV, V]` in qkv.dtype; zero for skipped rows, unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    heads = check_heads(qkv, state, rows, num_key_heads, scale, eps)
    inputs = DeltaInputs(*heads.split(qkv), a, b, A_log, dt_bias, heads, normalize)
    check_inputs(inputs, state, drafts, rows)
    o = inputs.empty_output()
    run_gated_delta(inputs, StateLines(state, drafts), rows, o)
    return o


def run_gated_delta(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Do what `gated_delta` does with checked arguments; writes to o `[T, HV, V]`, mutates `lines`."""
    if inputs.v.device.type == "cpu":
        gated_delta_cpu(inputs, lines, rows, o)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.gated_delta.launch import gated_delta_triton

        gated_delta_triton(inputs, lines, rows, o)
