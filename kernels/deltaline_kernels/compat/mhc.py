"""Hyper-connections as FlagGems, vLLM and SGLang call them, with leading dimensions of tokens, one or two.

Tensors of any strides; what is not contiguous is copied. Results are contiguous and have the residual's dtype, gates
fp32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels import mhc
from deltaline_kernels.checks import ACTIVATIONS, check_positive, parse_eps, parse_number
from deltaline_kernels.mhc.gates import MAX_STREAMS, Gates, prepare_gates
from deltaline_kernels.operators import operator


def _fake_post(residual: Tensor, **_: Any) -> Tensor:
    return residual.new_empty(residual.shape)


def _fake_pre(residual: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    *leading, streams, hidden = residual.shape
    post = residual.new_empty(*leading, streams, 1, dtype=torch.float32)
    comb = residual.new_empty(*leading, streams, streams, dtype=torch.float32)
    return post, comb, residual.new_empty(*leading, hidden)


def _fake_post_pre(residual: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return _fake_post(residual), *_fake_pre(residual)


@operator(_fake_post, name="compat_mhc_post")
def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """Return the streams `(..., S, H)` behind a sublayer: post x + comb^T residual.

    Args:
        x: `(..., H)` in residual.dtype.
        residual: `(N, S, H)` or `(B, T, S, H)` bf16, fp16 or fp32, S 1..8.
        post_layer_mix: `(..., S)` or `(..., S, 1)` fp32. comb_res_mix: `(..., S, S)` fp32.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    leading, _, _ = _check_residual(residual)
    y = mhc.mhc_post(*_flatten_mixed(x, residual, post_layer_mix, comb_res_mix, leading))
    return y.view(residual.shape)


@operator(_fake_pre, results=3, name="compat_mhc_pre")
def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return post `(..., S, 1)` and comb `(..., S, S)` fp32, and the sublayer's input `(..., H)` in residual.dtype.

    Args:
        residual: `(N, S, H)` or `(B, T, S, H)` bf16, fp16 or fp32, S 1..8.
        fn: `(S * (2 + S), S * H)`. hc_scale: `(3,)`. hc_base: `(S * (2 + S),)`. fp32; bf16 and fp16 are cast.
        rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat: those of `Gates`.
        n_splits: not used: how the products are split follows from the number of tokens.
        norm_weight: `(H,)` fp32, bf16 or fp16: the input is RMS-normalised in fp32 and multiplied by it; None: it is
            not. norm_eps: added to its mean square; not read without a weight.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    leading, streams, hidden = _check_residual(residual)
    check_positive("n_splits", n_splits)
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    gates = _prepare(residual, fn, hc_scale, hc_base, *numbers)
    norm = _prepare_norm(residual, norm_weight, norm_eps)
    y, post, comb = mhc.mhc_pre(residual.reshape(-1, streams, hidden).contiguous(), gates, **norm)
    return post.view(*leading, streams, 1), comb.view(*leading, streams, streams), y.view(*leading, hidden)


@operator(_fake_post_pre, results=4)
def mhc_fused_post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `mhc_post` does of the first four arguments, and what `mhc_pre` does of that and the others.

    tile_n is as little used as n_splits.

    Returns:
        The streams `(..., S, H)`, post `(..., S, 1)`, comb `(..., S, S)` and the next sublayer's input `(..., H)`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    leading, streams, hidden = _check_residual(residual)
    check_positive("n_splits", n_splits)
    check_positive("tile_n", tile_n)
    mixed = _flatten_mixed(x, residual, post_layer_mix, comb_res_mix, leading)
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    gates = _prepare(residual, fn, hc_scale, hc_base, *numbers)
    norm = _prepare_norm(residual, norm_weight, norm_eps)
    after, y, post, comb = mhc.mhc_post_pre(*mixed, gates, **norm)
    gated = post.view(*leading, streams, 1), comb.view(*leading, streams, streams)
    return after.view(residual.shape), *gated, y.view(*leading, hidden)


def _flatten_mixed(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, leading: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check what is mixed behind a sublayer, and return it as the native operation has it."""
    streams, hidden = residual.shape[-2:]
    _check("x", x, [(*leading, hidden)], residual.dtype, residual.device)
    shapes = [(*leading, streams), (*leading, streams, 1)]
    _check("post_layer_mix", post_layer_mix, shapes, torch.float32, residual.device)
    _check("comb_res_mix", comb_res_mix, [(*leading, streams, streams)], torch.float32, residual.device)
    return (
        x.reshape(-1, hidden).contiguous(),
        residual.reshape(-1, streams, hidden).contiguous(),
        post_layer_mix.reshape(-1, streams).contiguous(),
        comb_res_mix.reshape(-1, streams, streams).contiguous(),
    )


def _prepare(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
) -> Gates:
    """Check the parameters of a connection by the engines' names, and return them as Gates."""
    streams, hidden = residual.shape[-2:]
    rows = streams * (2 + streams)
    for name, tensor, shape in (
        ("fn", fn, (rows, streams * hidden)),
        ("hc_scale", hc_scale, (3,)),
        ("hc_base", hc_base, (rows,)),
    ):
        _check(name, tensor, [shape], None, residual.device)
    for name, value in (("hc_pre_eps", hc_pre_eps), ("hc_sinkhorn_eps", hc_sinkhorn_eps)):
        parse_eps(name, value)
    parse_number("hc_post_mult_value", hc_post_mult_value)
    return prepare_gates(
        fn,
        hc_scale,
        hc_base,
        rms_eps=rms_eps,
        pre_eps=hc_pre_eps,
        sinkhorn_eps=hc_sinkhorn_eps,
        post_multiplier=hc_post_mult_value,
        sinkhorn_repeat=sinkhorn_repeat,
        has_terms=False,
    )


def _prepare_norm(residual: Tensor, norm_weight: Tensor | None, norm_eps: float | None) -> dict[str, Any]:
    """Return the norm's arguments of the native operations."""
    if norm_weight is None:
        return {}
    _check("norm_weight", norm_weight, [tuple(residual.shape[-1:])], None, residual.device)
    return {"norm_weight": norm_weight.float().contiguous(), "norm_eps": norm_eps}


def _check_residual(residual: Tensor) -> tuple[tuple[int, ...], int, int]:
    """Return the leading dimensions, S and H."""
    if not isinstance(residual, Tensor):
        raise TypeError(f"residual: expected a tensor, got {type(residual).__name__}")
    if residual.dtype not in ACTIVATIONS:
        raise TypeError(f"residual: expected {' or '.join(map(str, ACTIVATIONS))}, got {residual.dtype}")
    shape = tuple(residual.shape)
    if len(shape) not in (3, 4) or not 1 <= shape[-2] <= MAX_STREAMS or shape[-1] < 1:
        raise ValueError(
            f"residual: expected shape (N, S, H) or (B, T, S, H) with 1..{MAX_STREAMS} streams, got {shape}"
        )
    return shape[:-2], shape[-2], shape[-1]


def _check(
    name: str, tensor: Tensor, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype | None, device: torch.device
) -> None:
    """Check one tensor of any strides; `dtype` None: any of an activation."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    dtypes = ACTIVATIONS if dtype is None else (dtype,)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device} as residual has, got {tensor.device}")
    if tuple(tensor.shape) not in shapes:
        raise ValueError(f"{name}: expected shape {' or '.join(map(str, shapes))}, got {tuple(tensor.shape)}")
