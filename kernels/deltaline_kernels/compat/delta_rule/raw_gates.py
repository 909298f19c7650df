"""Gates as a projection leaves them, which fla takes beside `use_gate_in_kernel` and `use_beta_sigmoid_in_kernel`."""

from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from deltaline_kernels.compat.arguments import check_flag, check_is, describe, parse_bound
from deltaline_kernels.compat.delta_inputs import pack_biases, pack_rates
from deltaline_kernels.compat.delta_rule.gate import fused_kda_gate
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs

Gate: TypeAlias = tuple[Tensor | None, Tensor | None, float | None]
"""A_log, dt_bias and the lower bound of the decays, which is KDA's alone."""


def parse_gate(
    told: bool | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
    *,
    implied: bool = False,
) -> Gate | None:
    """Return what the decays are computed of, or None where they are there.

    Args:
        told: `use_gate_in_kernel`, None where the caller does not say it.
        implied: then A_log says that they are computed, and a bound without it says nothing. Else parameters of a gate
            are an oversight, and are refused.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    for name, values in (("A_log", A_log), ("dt_bias", dt_bias)):
        # A scale, say, where another engine has that: it would be ignored where there is nothing to compute.
        if values is not None and not isinstance(values, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {describe(values)}")
    if told is None:
        told = implied and A_log is not None
        # Where A_log says it, a bound is handed on with decays that are there, too.
        bound = None if implied else lower_bound
        if not told:
            check_is(None, "as use_gate_in_kernel is not given", A_log=A_log, dt_bias=dt_bias, lower_bound=bound)
    check_flag("use_gate_in_kernel", told)
    return (A_log, dt_bias, lower_bound) if told else None


def with_gates(inputs: DeltaInputs, gate: Gate | None, sigmoid: bool, doubles: bool) -> DeltaInputs:
    """Return the tokens with their decays and strengths, or with what the kernels make these of.

    Args:
        gate: None where the decays are there.
        sigmoid: whether the strength is a sigmoid, and doubles: whether it is twice that.
    """
    check_flag("use_beta_sigmoid_in_kernel", sigmoid)
    check_flag("allow_neg_eigval", doubles)
    if doubles and not sigmoid:
        raise ValueError("allow_neg_eigval: expected False, as use_beta_sigmoid_in_kernel is False, got True")
    b = inputs.b
    if sigmoid and (doubles or gate is None):
        b = b.float().sigmoid() * (2.0 if doubles else 1.0)
    if gate is None:
        return replace(inputs, b=b)
    A_log, dt_bias, lower_bound = gate
    lower_bound = parse_bound("lower_bound", lower_bound)
    heads = inputs.heads
    if A_log is None and lower_bound is None:
        raise TypeError("A_log: expected a tensor, as lower_bound is None, got NoneType")
    zeros = torch.zeros(heads.num_decays, dtype=torch.float32, device=inputs.device)
    rates = zeros[: heads.num_value_heads] if A_log is None else pack_rates("A_log", A_log, inputs)
    biases = zeros if dt_bias is None else pack_biases("dt_bias", dt_bias, inputs)
    if sigmoid and not doubles:
        return replace(inputs, A_log=rates, dt_bias=biases, lower_bound=lower_bound)
    raw = inputs.a.unflatten(1, (heads.num_value_heads, -1))
    return replace(inputs, a=fused_kda_gate(raw, rates, biases, lower_bound).flatten(1), b=b)
