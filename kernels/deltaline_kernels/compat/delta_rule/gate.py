"""The decays of KDA from what a projection leaves, as fla calls it."""

from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS
from deltaline_kernels.compat.arguments import check_operand, describe, parse_bound
from deltaline_kernels.compat.delta_inputs import flatten_values
from deltaline_kernels.kda import find_decays
from deltaline_kernels.operators import operator


def _fake(g: Tensor, output_dtype: torch.dtype, **_: Any) -> Tensor:
    return g.new_empty(g.shape, dtype=output_dtype)


@operator(_fake)
def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)).

    Args:
        g: `[.., H, K]`, fp32, bf16 or fp16, of any strides.
        A_log: of H values, None for zeros; dt_bias: of H * K values, None for zeros; of any shape and any of the three
            dtypes.
        lower_bound: at most 0; None: there is none.
        output_dtype: one of the three.

    Returns:
        `[.., H, K]` in output_dtype, computed in fp32 and rounded once.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    if not isinstance(g, Tensor) or g.ndim < 2:
        got = f"shape {tuple(g.shape)}" if isinstance(g, Tensor) else type(g).__name__
        raise (ValueError if isinstance(g, Tensor) else TypeError)(f"g: expected a tensor (.., H, K), got {got}")
    check_operand("g", g, {f"dimension {i}": None for i in range(g.ndim)})
    lower_bound = parse_bound("lower_bound", lower_bound)
    if output_dtype not in ACTIVATIONS:
        raise TypeError(f"output_dtype: expected {' or '.join(map(str, ACTIVATIONS))}, got {describe(output_dtype)}")
    num_heads, key_dim = g.shape[-2:]
    given = (("A_log", A_log, num_heads), ("dt_bias", dt_bias, num_heads * key_dim))
    rates, biases = (
        torch.zeros(count, dtype=torch.float32, device=g.device)
        if values is None
        else flatten_values(name, values, count, g.device, beside="g")
        for name, values, count in given
    )
    flat = g.reshape(-1, num_heads * key_dim)
    out = torch.empty(flat.shape, dtype=output_dtype, device=g.device)
    find_decays(flat, rates, biases, lower_bound, out)
    return out.view(g.shape)
