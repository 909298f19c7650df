"""The tokens that engines pass to the gated delta rule, checked and packed as the native operation has them."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, MAX_HEAD_DIM
from deltaline_kernels.compat.arguments import INTEGERS, check_flag, check_number, check_operand
from deltaline_kernels.device.delta_rule.inputs import DeltaHeads, DeltaInputs

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


def narrow(x: Tensor | None) -> Tensor | None:
    """Return a tensor of fp64 in fp32, all else as it is."""
    return x.float() if isinstance(x, Tensor) and x.dtype == torch.float64 else x


def pack_delta(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    gates: Mapping[str, Tensor | None],
    scale: float | None,
    *,
    normalize: bool,
    flat_gates: bool = False,
    optional: Mapping[str, float] | None = None,
    keyed: bool = False,
) -> DeltaInputs:
    """Check and pack q, k `[batch, tokens, H, K]`, v `[batch, tokens, HV, V]` and the two gates `[batch, tokens, HV]`,
    of which the first is `[batch, tokens, HV, K]` if `keyed`.

    Each is used where it is if its heads are packed and its tokens are one distance apart, else copied. If q has more
    heads than k and v, theirs are repeated. q, k and v of several dtypes become fp32. A gate that is None has its value
    in `optional`. `flat_gates` accepts gates `[batch * tokens, HV]` too, and the first of them `[.., HV * K]`. The
    result takes the gates as they come.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_flag("use_qk_l2norm_in_kernel", normalize)
    q = check_operand("q", q, {"batch": None, "tokens": None, "H": None, "K": None})
    device, (batch, length, num_query_heads, key_dim) = q.device, q.shape
    tokens = {"batch": batch, "tokens": length}
    v = check_beside("v", v, {**tokens, "HV": None, "V": None}, ACTIVATIONS, device)
    num_value_heads, value_dim = v.shape[2:]
    for name, count in (("q", num_query_heads), ("v", num_value_heads)):
        if count < 1:
            raise ValueError(f"{name}: expected at least 1 head, got 0")
    num_key_heads = min(num_query_heads, num_value_heads)
    if keyed and num_query_heads > num_value_heads:
        raise ValueError(f"q: expected at most the {num_value_heads} heads of v, got {num_query_heads}")
    if max(num_query_heads, num_value_heads) % num_key_heads:
        raise ValueError(
            f"v: expected a multiple or a divisor of the {num_query_heads} heads of q, got {num_value_heads} heads"
        )
    k = check_beside("k", k, {**tokens, "H": num_key_heads, "K": key_dim}, ACTIVATIONS, device)
    if num_query_heads > num_key_heads:
        k, v = (x.repeat_interleave(num_query_heads // num_key_heads, dim=2) for x in (k, v))
        num_key_heads = num_value_heads = num_query_heads
    q, k, v = unite(q, k, v)
    for name, dim, size in (("q", "K", key_dim), ("v", "V", value_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected {dim} of 1..{MAX_HEAD_DIM}, got {size}")
    if scale is None:
        scale = key_dim**-0.5
    check_number("scale", scale, positive=True)
    packed = []
    for name, gate in gates.items():
        if gate is None:
            if optional is None or name not in optional:
                raise TypeError(f"{name}: expected a tensor, got NoneType")
            packed.append(
                torch.full((batch * length, num_value_heads), optional[name], dtype=torch.float32, device=device)
            )
            continue
        channels = key_dim if keyed and not packed else 0
        shape = _gate_shape(gate, tokens, num_value_heads, channels, flat=flat_gates)
        check_beside(name, gate, shape, ACTIVATIONS, device)
        packed.append(pack_gate(gate, batch * length, num_value_heads * max(channels, 1), q.dtype))
    heads = DeltaHeads(num_key_heads, num_value_heads, key_dim, value_dim, float(scale), EPS, keyed)
    q, k, v = (pack_rows(x, batch * length, x.shape[2] * x.shape[3]) for x in (q, k, v))
    a, b = packed
    return DeltaInputs(q, k, v, a, b, None, None, heads, normalize)


def _gate_shape(gate: Tensor | None, tokens: dict[str, int], num_heads: int, dim: int, *, flat: bool) -> dict[str, int]:
    """Return the shape that a gate of each head is expected to have, of each of its `dim` channels unless that is 0."""
    ndim = gate.ndim if flat and isinstance(gate, Tensor) else 0
    if ndim == 2 or (dim and ndim == 3 and gate is not None and gate.shape[-1] != num_heads * dim):
        tokens = {"batch * tokens": tokens["batch"] * tokens["tokens"]}
    if not dim:
        return {**tokens, "HV": num_heads}
    is_joined = ndim == len(tokens) + 1
    return {**tokens, "HV * K": num_heads * dim} if is_joined else {**tokens, "HV": num_heads, "K": dim}


def pack_rates(name: str, rates: Tensor, inputs: DeltaInputs) -> Tensor:
    """Check and return values of the heads, `(HV,)`, of keyed heads of any shape; flat and contiguous, of the tokens'
    dtype or fp32."""
    return _pack_values(name, rates, inputs.heads.num_value_heads, inputs)


def pack_biases(name: str, biases: Tensor, inputs: DeltaInputs) -> Tensor:
    """Check and return values of the decays, `(HV,)`, of keyed heads HV * K of any shape; flat and contiguous, of the
    tokens' dtype or fp32."""
    return _pack_values(name, biases, inputs.heads.num_decays, inputs)


def _pack_values(name: str, values: Tensor, count: int, inputs: DeltaInputs) -> Tensor:
    """Check and return so many values, flat and contiguous, of the tokens' dtype or fp32."""
    if inputs.heads.keyed:
        return widen(flatten_values(name, values, count, inputs.device, beside="q"), inputs.dtype)
    check_beside(name, values, {"HV": count}, ACTIVATIONS, inputs.device)
    return widen(values, inputs.dtype).contiguous()


def flatten_values(name: str, values: Tensor, count: int, device: torch.device, beside: str) -> Tensor:
    """Check and return so many values of any shape, flat and contiguous.

    KDA's layers keep a rate of each head as `(1, 1, H, 1)` or `(H,)`, and biases as `(H * K,)` or `(H, K)`.
    """
    shape = {f"dimension {i}": None for i in range(getattr(values, "ndim", 1))}
    check_operand(name, values, shape, ACTIVATIONS, device, beside=beside)
    if values.numel() != count:
        raise ValueError(f"{name}: expected {count} values, got shape {tuple(values.shape)}")
    return values.flatten().contiguous()


def widen(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in fp32 unless it is of `dtype`."""
    return x if x.dtype == dtype else x.float()


def unite(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as they are if they have one dtype, else in fp32."""
    return tensors if len({x.dtype for x in tensors}) == 1 else tuple(x.float() for x in tensors)


def pack_gate(gate: Tensor, num_tokens: int, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Return the gate as `[T, HV]` with contiguous heads, of `dtype` or fp32: a view where it can be one."""
    return pack_rows(widen(gate, dtype), num_tokens, num_heads)


def pack_rows(x: Tensor, num_rows: int, width: int) -> Tensor:
    """Return x as `[num_rows, width]` with contiguous, disjoint rows: a view where it can be one."""
    flat = x.reshape(num_rows, width)
    packed = (width == 1 or flat.stride(1) == 1) and (num_rows <= 1 or flat.stride(0) >= width)
    return flat if packed else flat.contiguous()


def join_columns(*parts: Tensor) -> Tensor:
    """Return tensors `[T, heads, size]` as the columns of one, `[T, channels]`: a view if they are that, else a copy.

    Parts of several dtypes become fp32.
    """
    num_tokens = parts[0].shape[0]
    flat = [pack_rows(x, num_tokens, x.shape[1] * x.shape[2]) for x in unite(*parts)]
    first, width = flat[0], sum(x.shape[1] for x in flat)
    stride = first.stride(0) if num_tokens > 1 else width
    begin, memory = first.data_ptr(), first.untyped_storage().data_ptr()
    shared = num_tokens > 0 and stride >= width
    for x in flat:
        near = x.data_ptr() == begin and x.untyped_storage().data_ptr() == memory
        shared = shared and near and (num_tokens <= 1 or x.stride(0) == stride)
        begin += x.shape[1] * x.element_size()
    return first.as_strided((num_tokens, width), (stride, 1)) if shared else torch.cat(flat, dim=1)
