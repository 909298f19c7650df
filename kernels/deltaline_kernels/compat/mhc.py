"""Hyper-connections as FlagGems calls them: `mhc_pre` and `mhc_post`, with leading dimensions of tokens, one or two.

Tensors of any strides; what is not contiguous is copied. Results are contiguous and have the residual's dtype, gates
fp32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels import mhc
from deltaline_kernels.checks import ACTIVATIONS, check_positive, parse_eps, parse_number
from deltaline_kernels.mhc.gates import MAX_STREAMS, prepare_gates
from deltaline_kernels.operators import operator


def _fake_post(residual: Tensor, **_: Any) -> Tensor:
    return residual.new_empty(residual.shape)


def _fake_pre(residual: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    *leading, streams, hidden = residual.shape
    post = residual.new_empty(*leading, streams, 1, dtype=torch.float32)
    comb = residual.new_empty(*leading, streams, streams, dtype=torch.float32)
    return post, comb, residual.new_empty(*leading, hidden)


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
    leading, streams, hidden = _check_residual(residual)
    _check("x", x, [(*leading, hidden)], residual.dtype, residual.device)
    shapes = [(*leading, streams), (*leading, streams, 1)]
    _check("post_layer_mix", post_layer_mix, shapes, torch.float32, residual.device)
    _check("comb_res_mix", comb_res_mix, [(*leading, streams, streams)], torch.float32, residual.device)
    y = mhc.mhc_post(
        x.reshape(-1, hidden).contiguous(),
        residual.reshape(-1, streams, hidden).contiguous(),
        post_layer_mix.reshape(-1, streams).contiguous(),
        comb_res_mix.reshape(-1, streams, streams).contiguous(),
    )
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return post `(..., S, 1)` and comb `(..., S, S)` fp32, and the sublayer's input `(..., H)` in residual.dtype.

    Args:
        residual: `(N, S, H)` or `(B, T, S, H)` bf16, fp16 or fp32, S 1..8.
        fn: `(S * (2 + S), S * H)`. hc_scale: `(3,)`. hc_base: `(S * (2 + S),)`. fp32; bf16 and fp16 are cast.
        rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat: those of `Gates`.
        n_splits: not used: how the products are split follows from the number of tokens.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    leading, streams, hidden = _check_residual(residual)
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
    check_positive("n_splits", n_splits)
    gates = prepare_gates(
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
    y, post, comb = mhc.mhc_pre(residual.reshape(-1, streams, hidden).contiguous(), gates)
    return post.view(*leading, streams, 1), comb.view(*leading, streams, streams), y.view(*leading, hidden)


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
