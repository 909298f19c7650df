"""The tokens that engines pass to the selective state update, checked and packed as the native operation has them."""

from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, MAX_HEAD_DIM
from deltaline_kernels.compat.arguments import check_flag, check_operand
from deltaline_kernels.compat.delta_inputs import join_columns, pack_gate, widen
from deltaline_kernels.mamba2.inputs import MambaHeads, MambaInputs


def pack_mamba(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor | None, *, softplus: bool
) -> MambaInputs:
    """Check and pack x and dt `[batch, nheads, dim]`, A `[nheads, dim, dstate]`, B and C `[batch, ngroups, dstate]`.

    x, B and C that are the columns of one tensor, in this order, are used where they are; others are copied, to fp32 if
    they have several dtypes.

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
    if num_groups < 1 or num_heads < 1 or num_heads % num_groups:
        raise ValueError(f"x: expected a multiple of the {num_groups} groups of B, got {num_heads} heads")
    for name, dim, size in (("x", "dim", head_dim), ("A", "dstate", state_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected {dim} of 1..{MAX_HEAD_DIM}, got {size}")
    check_operand("dt", dt, {"batch": batch, "nheads": num_heads, "dim": head_dim}, device=device)
    _check_tied("dt", dt, 1)
    _check_tied("A", A, 2)
    bias = None if dt_bias is None else pack_head_values("dt_bias", dt_bias, x)
    heads = MambaHeads(num_groups, num_heads, head_dim, state_dim)
    xBC = join_columns(x, B, C)
    steps = pack_gate(dt[:, :, 0], batch, num_heads, xBC.dtype)
    rates = _values(A[:, 0, 0], x)
    return MambaInputs(xBC, steps, rates, None, bias, heads, log_rate=False, softplus=softplus)


def pack_head_values(name: str, values: Tensor, x: Tensor) -> Tensor:
    """Check `(nheads, dim)` values that are the same for all of a head; return one for each, contiguous."""
    check_operand(name, values, {"nheads": x.shape[1], "dim": x.shape[2]}, ACTIVATIONS, x.device)
    _check_tied(name, values, 1)
    return _values(values[:, 0], x)


def _check_tied(name: str, values: Tensor, dims: int) -> None:
    """Raise ValueError unless the last `dims` dimensions are expanded from one value."""
    sizes, strides = values.shape[-dims:], values.stride()[-dims:]
    if any(size > 1 and stride != 0 for size, stride in zip(sizes, strides, strict=True)):
        raise ValueError(
            f"{name}: expected one value per head, expanded over the rest as Mamba2 layers have it, got strides "
            f"{values.stride()}"
        )


def _values(values: Tensor, x: Tensor) -> Tensor:
    return widen(values, x.dtype).contiguous()
