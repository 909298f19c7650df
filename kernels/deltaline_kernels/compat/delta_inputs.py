"""The tokens that engines pass to the gated delta rule, checked and packed as the native operation has them."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, MAX_HEAD_DIM
from deltaline_kernels.compat.arguments import INTEGERS, check_number, check_operand
from deltaline_kernels.gated_delta.inputs import DeltaHeads, DeltaInputs

# Under the root of the norms of q and k, in every engine.
EPS = 1e-6


# Checks one tensor of any strides that has to be where q is.
check_beside = partial(check_operand, beside="q")


def check_counts(name: str, tensor: Tensor, num_rows: int, device: torch.device, columns: str | None = None) -> None:
    """Check integers `(rows,)`, or `(rows, columns)` where `columns` names those; more rows are not read."""
    shape = {"rows": None} if columns is None else {"rows": None, columns: None}
    check_beside(name, tensor, shape, INTEGERS, device)
    if tensor.shape[0] < num_rows:
        raise ValueError(f"{name}: expected at least {num_rows} rows, got {tensor.shape[0]}")


def pack_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor | None],
    scale: float | None,
    *,
    normalize: bool,
    flat_gates: bool = False,
    optional: str | None = None,
) -> DeltaInputs:
    """Check and pack q, k `[batch, tokens, H, K]`, v `[batch, tokens, HV, V]` and the two gates `[batch, tokens, HV]`.

    q, k and v that are the columns of one tensor, in this order, are used where they are; others are copied. The gate
    named `optional` is 1 where it is None. `flat_gates` accepts gates `[batch * tokens, HV]` too. The result takes the
    gates as they come.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_operand("q", q, {"batch": None, "tokens": None, "H": None, "K": None})
    device, (batch, length, num_key_heads, key_dim) = q.device, q.shape
    tokens = {"batch": batch, "tokens": length}
    check_beside("k", k, {**tokens, "H": num_key_heads, "K": key_dim}, (q.dtype,), device)
    check_beside("v", v, {**tokens, "HV": None, "V": None}, (q.dtype,), device)
    num_value_heads, value_dim = v.shape[2:]
    if num_key_heads < 1:
        raise ValueError("q: expected at least 1 head, got 0")
    if num_value_heads < 1 or num_value_heads % num_key_heads:
        raise ValueError(f"v: expected a multiple of the {num_key_heads} heads of q, got {num_value_heads} heads")
    for name, dim, size in (("q", "K", key_dim), ("v", "V", value_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected {dim} of 1..{MAX_HEAD_DIM}, got {size}")
    if scale is None:
        scale = key_dim**-0.5
    check_number("scale", scale, positive=True)
    packed = []
    for name, gate in gates.items():
        if gate is None:
            if name != optional:
                raise TypeError(f"{name}: expected a tensor, got NoneType")
            packed.append(torch.ones((batch * length, num_value_heads), dtype=torch.float32, device=device))
            continue
        flat = flat_gates and isinstance(gate, Tensor) and gate.ndim == 2
        rows = {"batch * tokens": batch * length} if flat else tokens
        check_beside(name, gate, {**rows, "HV": num_value_heads}, ACTIVATIONS, device)
        packed.append(pack_gate(gate, batch * length, num_value_heads, q.dtype))
    heads = DeltaHeads(num_key_heads, num_value_heads, key_dim, value_dim, float(scale), EPS)
    qkv = share_columns(q, k, v)
    if qkv is None:
        qkv = torch.cat([x.reshape(batch * length, x.shape[2] * x.shape[3]) for x in (q, k, v)], dim=1)
    a, b = packed
    return DeltaInputs(qkv, a, b, None, None, heads, normalize)


def pack_rates(name: str, rates: Tensor, inputs: DeltaInputs) -> Tensor:
    """Check and return `(HV,)` values of the heads, contiguous, of qkv's dtype or fp32."""
    check_beside(name, rates, {"HV": inputs.heads.num_value_heads}, ACTIVATIONS, inputs.device)
    return widen(rates, inputs.qkv.dtype).contiguous()


def widen(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in fp32 unless it is of `dtype`."""
    return x if x.dtype == dtype else x.float()


def pack_gate(gate: Tensor, num_tokens: int, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Return the gate as `[T, HV]` with contiguous heads: a view where it can be one."""
    flat = widen(gate.reshape(num_tokens, num_heads), dtype)
    packed = (num_heads == 1 or flat.stride(1) == 1) and (num_tokens <= 1 or flat.stride(0) >= num_heads)
    return flat if packed else flat.contiguous()


def share_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Return `[T, 2*H*K + HV*V]` over the memory of q, k and v if they are its columns, else None."""
    batch, length = q.shape[:2]
    columns = [x.shape[2] * x.shape[3] for x in (q, k, v)]
    stride = q.stride(1) if length > 1 else q.stride(0) if batch > 1 else sum(columns)
    begin, memory = q.data_ptr(), q.untyped_storage().data_ptr()
    for x, size in zip((q, k, v), columns, strict=True):
        packed = (
            (x.shape[3] == 1 or x.stride(3) == 1)
            and (x.shape[2] == 1 or x.stride(2) == x.shape[3])
            and (length <= 1 or x.stride(1) == stride)
            and (batch <= 1 or x.stride(0) == stride * length)
        )
        if not packed or x.data_ptr() != begin or x.untyped_storage().data_ptr() != memory:
            return None
        begin += size * x.element_size()
    if batch * length == 0 or stride < sum(columns):
        return None
    return q.as_strided((batch * length, sum(columns)), (stride, 1))
