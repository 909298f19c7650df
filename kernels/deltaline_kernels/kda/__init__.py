"""KDA, the delta rule with a decay per key channel, over packed rows: prefill, decode, verify and its replay."""

from typing import Any

from torch import Tensor

from deltaline_kernels.checks import parse_number
from deltaline_kernels.device.delta_rule.arguments import check_heads, check_inputs
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.kda.cpu import kda_cpu
from deltaline_kernels.kda.decays import find_decays
from deltaline_kernels.kda.reference import kda_reference
from deltaline_kernels.operators import operator
from deltaline_kernels.rows import Rows, StateLines

__all__ = ["find_decays", "kda", "kda_reference", "run_kda"]


def _fake(qkv: Tensor, state: Tensor, **_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape[0], *state.shape[1:3])


@operator(_fake, mutates=["state", "drafts"])
def kda(
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
    lower_bound: float | None = None,
) -> Tensor:
    """Run every row's replayed drafts and tokens through the state of its read line.

    Args:
        qkv: `[T, 2*H*K + HV*V]` (q | k | v) fp32, bf16 or fp16; a row stride is fine.
        a: `[T, HV*K]`, b: `[T, HV]`, in qkv.dtype or fp32; a row stride is fine. The log decay of a key channel is
            -exp(A_log) * softplus(a + dt_bias) and the strength of the update sigmoid(b).
        A_log: `[HV]`, dt_bias: `[HV*K]`, in qkv.dtype or fp32, contiguous. Both None: a is the log decay, at most 0,
            and b is the strength: any real number, but of moderate size (0 to 2, say) for long rows of 16-bit values.
        state: `[L, HV, V, K]` fp32, bf16 or fp16; a line stride is fine. Mutated: the write lines, the token
            lines, and the lines of waypoints.
        drafts: `[L, 2, M, H*K + HV*V + HV*K]` fp32, a line stride is fine: per token k as it enters the state, its
            update u and the log decays. Mutated: a half of the VERIFY rows' write lines. M is at least the length of a
            VERIFY row.
        scale: of q, positive; None is K**-0.5. eps: under the root of the L2 norm of q and k.
        normalize: divide q and k by their L2 norms. False: they are used as they come, q still times scale.
        lower_bound: below 0: the log decay is lower_bound * sigmoid(exp(A_log) * (a + dt_bias)). None beside gates that
            are None.

    Returns:
        `[T, HV, V]` in qkv.dtype; zero for skipped rows, unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    heads = check_heads(qkv, state, rows, num_key_heads, scale, eps, keyed=True)
    bound = None if lower_bound is None else _parse_lower_bound(lower_bound, is_raw=A_log is None)
    inputs = DeltaInputs(*heads.split(qkv), a, b, A_log, dt_bias, heads, normalize, bound)
    check_inputs(inputs, state, drafts, rows)
    o = inputs.empty_output()
    run_kda(inputs, StateLines(state, drafts), rows, o)
    return o


def run_kda(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Do what `kda` does with checked arguments; writes to o `[T, HV, V]`, mutates `lines`."""
    if inputs.v.device.type == "cpu":
        kda_cpu(inputs, lines, rows, o)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.kda.launch import kda_triton

        kda_triton(inputs, lines, rows, o)


def _parse_lower_bound(lower_bound: float, *, is_raw: bool) -> float:
    """Return the bound as a float; raise TypeError or ValueError unless it is below 0 and there is a gate to bound."""
    lower_bound = parse_number("lower_bound", lower_bound)
    if lower_bound >= 0:
        raise ValueError(f"lower_bound: expected a number below 0, got {lower_bound}")
    if is_raw:
        raise ValueError(f"lower_bound: expected None, as A_log and dt_bias are None, got {lower_bound}")
    return lower_bound
