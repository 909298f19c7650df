"""One token of each row with its gates, packed as the convolution leaves it, as vLLM and SGLang call it."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from deltaline_kernels.checks import STATES
from deltaline_kernels.compat.arguments import check_operand, parse_bound
from deltaline_kernels.compat.delta_inputs import check_counts, pack_biases, pack_delta, pack_rates
from deltaline_kernels.compat.delta_rule.sequences import check_states, lay_out, run_rule
from deltaline_kernels.compat.slots import Slots, advance_slots
from deltaline_kernels.operators import operator


def _fake_packed(out: Tensor, initial_state: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return out, initial_state


@operator(_fake_packed, mutates=["initial_state", "out"], results=2)
def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run one token of each row, with g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b).

    Args:
        mixed_qkv: `[batch, 2*H*K + HV*V]` (q | k | v), HV a multiple of H, fp32, bf16 or fp16; a row stride is fine.
        a, b: `[batch, HV]`; A_log, dt_bias: `(HV,)`, any of the three dtypes.
        scale: of q, above 0.
        initial_state: `[slots, HV, V, K]`, any of the three dtypes, packed states at any distance. Mutated: the slots
            of the rows, each state rounded when it is stored.
        out: `[batch, 1, HV, V]` contiguous, in the dtype of mixed_qkv. Mutated.
        ssm_state_indices: `(batch,)`, the slot of each row, perhaps more. A row with a negative slot is skipped: its
            outputs are zero, no slot is touched. Slot 0 is an ordinary one.
        use_qk_l2norm_in_kernel: divide q and k by their norms.

    Returns:
        out and initial_state.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    gates = (a, b, A_log, dt_bias, None)
    _advance(mixed_qkv, gates, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel, keyed=False)
    return out, initial_state


@operator(_fake_packed, mutates=["initial_state", "out"], results=2)
def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Do what `fused_recurrent_gated_delta_rule_packed_decode` does with a decay of each key channel.

    Args:
        a: `[batch, HV*K]`; A_log: HV values, dt_bias: HV * K, both of any shape; any of the three dtypes.
        lower_bound: at most 0: g = lower_bound sigmoid(exp(A_log) (a + dt_bias)). None: there is none.
        mixed_qkv, b, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel: as there.

    Returns:
        out and initial_state.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    gates = (a, b, A_log, dt_bias, lower_bound)
    _advance(mixed_qkv, gates, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel, keyed=True)
    return out, initial_state


def _advance(
    mixed_qkv: Tensor,
    gates: tuple[Tensor, Tensor, Tensor, Tensor, float | None],
    scale: float,
    pool: Tensor,
    out: Tensor,
    indices: Tensor,
    normalize: bool,
    *,
    keyed: bool,
) -> None:
    """Check the arguments, of which `gates` are a, b, A_log, dt_bias and the lower bound, and run the rows."""
    check_operand("mixed_qkv", mixed_qkv, {"batch": None, "channels": None})
    batch, channels = mixed_qkv.shape
    check_operand(
        "initial_state", pool, dict.fromkeys(("slots", "HV", "V", "K")), STATES, mixed_qkv.device, "mixed_qkv"
    )
    HV, V, K = pool.shape[1:]
    H, rest = divmod(channels - HV * V, max(2 * K, 1))
    if rest or H < 1 or HV % H:
        raise ValueError(f"mixed_qkv: expected 2 * H * {K} + {HV} * {V} channels, H a divisor of {HV}, got {channels}")
    parts = mixed_qkv.split((H * K, H * K, HV * V), dim=1)
    q, k, v = (x.unflatten(1, heads)[:, None] for x, heads in zip(parts, ((H, K), (H, K), (HV, V)), strict=True))
    a, b, A_log, dt_bias, lower_bound = gates
    lower_bound = parse_bound("lower_bound", lower_bound)
    inputs = pack_delta(q, k, v, {"a": a, "b": b}, scale, normalize=normalize, flat_gates=True, keyed=keyed)
    rates, biases = pack_rates("A_log", A_log, inputs), pack_biases("dt_bias", dt_bias, inputs)
    inputs = replace(inputs, A_log=rates, dt_bias=biases, lower_bound=lower_bound)
    sizes = {"batch": batch, "tokens": 1, "HV": HV, "V": V}
    check_operand("out", out, sizes, (v.dtype,), v.device, beside="mixed_qkv", contiguous=True)
    check_counts("ssm_state_indices", indices, batch, v.device)
    slots = Slots("ssm_state_indices", check_states("initial_state", pool, inputs), indices)
    advance_slots(run_rule, inputs, lay_out(v, None), slots, out[:, 0])
