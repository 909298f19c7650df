"""The tokens that engines pass to the selective state update, checked and packed as a native operation has them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deltaline_kernels.checks import MAX_HEAD_DIM
from deltaline_kernels.compat.arguments import check_flag, check_operand
from deltaline_kernels.compat.delta_inputs import join_columns, pack_gate, widen
from deltaline_kernels.compat.selective_scan import check_groups, pack_scan
from deltaline_kernels.mamba1.inputs import ScanInputs
from deltaline_kernels.mamba2.inputs import MambaHeads, MambaInputs


def pack_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    *,
    softplus: bool,
) -> MambaInputs | ScanInputs:
    """Check and pack x, dt, z `[batch, nheads, dim]`, A `[nheads, dim, dstate]`, B, C `[batch, ngroups, dstate]` and D,
    dt_bias `[nheads, dim]`.

    Those of Mamba2 where all of a head have one A, dt, D and dt_bias, expanded over the rest; z is left to the caller
    then. Else those of Mamba-1. x, B and C of Mamba2 that are the columns of one tensor, in this order, are used where
    they are; others are copied, to fp32 if they have several dtypes.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_flag("dt_softplus", softplus)
    check_operand("x", x, {"batch": None, "nheads": None, "dim": None})
    device, (batch, num_heads, head_dim) = x.device, x.shape
    check_operand("A", A, {"nheads": num_heads, "dim": head_dim, "dstate": None}, device=device)
    state_dim = A.shape[2]
    check_operand("B", B, {"batch": batch, "ngroups": None, "dstate": state_dim}, device=device)
    num_groups = B.shape[1]
    check_operand("C", C, {"batch": batch, "ngroups": num_groups, "dstate": state_dim}, device=device)
    if num_groups < 1 or num_heads < 1:
        raise ValueError(f"x: expected a multiple of the {num_groups} groups of B, got {num_heads} heads")
    check_groups("x", num_groups, num_heads * head_dim, state_dim)
    for name, given in (("dt", dt), ("z", z)):
        if name == "dt" or given is not None:
            check_operand(name, given, {"batch": batch, "nheads": num_heads, "dim": head_dim}, device=device)
    for name, weight in (("D", D), ("dt_bias", dt_bias)):
        if weight is not None:
            check_operand(name, weight, {"nheads": num_heads, "dim": head_dim}, device=device)
    per_head = _is_tied(A, 2) and all(part is None or _is_tied(part, 1) for part in (dt, D, dt_bias))
    if per_head and head_dim <= MAX_HEAD_DIM and num_heads % num_groups == 0:
        heads = MambaHeads(num_groups, num_heads, head_dim, state_dim)
        xBC = join_columns(x, B, C)
        steps, rates = pack_gate(dt[:, :, 0], batch, num_heads, xBC.dtype), _values(A[:, 0, 0], x)
        skip, bias = (None if values is None else _values(values[:, 0], x) for values in (D, dt_bias))
        return MambaInputs(xBC, steps, rates, skip, bias, heads, log_rate=False, softplus=softplus)
    gates, skips, biases = (None if part is None else part.flatten(-2) for part in (z, D, dt_bias))
    return pack_scan(x.flatten(1), dt.flatten(1), A.flatten(0, 1), B, C, skips, gates, biases, softplus=softplus)


def join_tokens(parts: Mapping[str, Tensor | None], sizes: Mapping[str, int | None]) -> list[Any]:
    """Check `(batch, T, ...)` parts of these sizes; return them as `(batch * T, ...)`, and None as it is."""
    return [None if part is None else _join(name, part, sizes) for name, part in parts.items()]


def _join(name: str, part: Tensor, sizes: Mapping[str, int | None]) -> Tensor:
    check_operand(name, part, sizes)
    if part.stride(-1) == 0:  # one value that is expanded stays one, where the rest may have to be copied
        return part[..., :1].flatten(0, 1).expand(-1, -1, part.shape[-1])
    return part.flatten(0, 1)


def _is_tied(values: Tensor, dims: int) -> bool:
    """Return whether the last `dims` dimensions are expanded from one value."""
    sizes, strides = values.shape[-dims:], values.stride()[-dims:]
    return all(size <= 1 or stride == 0 for size, stride in zip(sizes, strides, strict=True))


def _values(values: Tensor, x: Tensor) -> Tensor:
    return widen(values, x.dtype).contiguous()
