"""Manifold-constrained hyper-connections: several residual streams, mixed around every sublayer."""

from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, check_tensor, parse_eps
from deltaline_kernels.mhc.cpu import mhc_head_cpu, mhc_post_cpu, mhc_pre_cpu
from deltaline_kernels.mhc.gates import MAX_STREAMS, Gates, prepare_gates
from deltaline_kernels.mhc.reference import (
    mhc_head_reference,
    mhc_post_pre_reference,
    mhc_post_reference,
    mhc_pre_reference,
)
from deltaline_kernels.operators import operator

__all__ = [
    "MAX_STREAMS",
    "Gates",
    "mhc_head",
    "mhc_head_reference",
    "mhc_post",
    "mhc_post_pre",
    "mhc_post_pre_reference",
    "mhc_post_reference",
    "mhc_pre",
    "mhc_pre_reference",
    "prepare_gates",
]


def _fake_pre(residual: Tensor, out: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, streams, hidden = residual.shape
    post = residual.new_empty(num_tokens, streams, dtype=torch.float32)
    comb = residual.new_empty(num_tokens, streams, streams, dtype=torch.float32)
    return residual.new_empty(num_tokens, hidden) if out is None else out, post, comb


def _fake_post(residual: Tensor, **_: Any) -> Tensor:
    return residual.new_empty(residual.shape)


def _fake_post_pre(residual: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return _fake_post(residual), *_fake_pre(residual)


def _fake_head(residual: Tensor, **_: Any) -> Tensor:
    return residual.new_empty(residual.shape[0], residual.shape[2])


@operator(_fake_pre, mutates=["out"], results=3)
def mhc_pre(
    residual: Tensor,
    gates: Gates,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a sublayer's input and how its output and the streams are mixed behind it.

        mixes = (x weight^T) / sqrt(mean(x^2) + rms_eps)          x: the streams of a token, one behind the other
        pre   = sigmoid(mixes_pre scale_0 + base_pre) + pre_eps
        post  = sigmoid(mixes_post scale_1 + base_post) post_multiplier
        comb  = Sinkhorn(mixes_comb scale_2 + base_comb)
        input = sum over j of pre[j] residual[j]

    Args:
        residual: `[N, S, H]` fp32, bf16 or fp16; a row stride is fine. N may be 0.
        gates: for S streams of H channels.
        norm_weight: `[H]` fp32: the input is RMS-normalised and multiplied by it (1 + w where a checkpoint's norm says
            so). None: it is not. norm_eps: added to its mean square.
        out: `[N, H]` in residual.dtype, contiguous, for the input, apart from `residual`. Mutated. None: a new tensor.

    Returns:
        The input `[N, H]` in residual.dtype, rounded once; post `[N, S]` and comb `[N, S, S]` fp32. A token's bits
        depend neither on other tokens nor on N within a bucket of the plan.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    _check_gates(residual, gates)
    norm_eps = _parse_norm(residual, norm_weight, norm_eps)
    num_tokens, streams, hidden = residual.shape
    if out is None:
        out = torch.empty(num_tokens, hidden, dtype=residual.dtype, device=residual.device)
    else:
        check_tensor("out", out, (num_tokens, hidden), (residual.dtype,), residual.device)
    post = torch.empty(num_tokens, streams, dtype=torch.float32, device=residual.device)
    comb = torch.empty(num_tokens, streams, streams, dtype=torch.float32, device=residual.device)
    if num_tokens > 0:
        if residual.device.type == "cpu":
            mhc_pre_cpu(residual, gates, norm_weight, norm_eps, out, post, comb)
        else:
            # Imported here: only this path needs triton, which is installed on Linux alone.
            from deltaline_kernels.mhc.launch import mhc_pre_triton

            mhc_pre_triton(residual, gates, norm_weight, norm_eps, out, post, comb)
    return out, post, comb


@operator(_fake_post)
def mhc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the streams behind a sublayer: `out[i] = post[i] x + sum over j of comb[j, i] residual[j]`.

    Args:
        x: `[N, H]` in residual.dtype, what the sublayer returned; a row stride is fine.
        residual: `[N, S, H]` fp32, bf16 or fp16; a row stride is fine. N may be 0.
        post: `[N, S]` fp32. comb: `[N, S, S]` fp32. Both contiguous, as `mhc_pre` returns them.

    Returns:
        `[N, S, H]` in residual.dtype, contiguous, rounded once.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    _check_mixed(x, residual, post, comb)
    y = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    if y.numel() > 0:
        if y.device.type == "cpu":
            mhc_post_cpu(x, residual, post, comb, y)
        else:
            # Imported here: only this path needs triton, which is installed on Linux alone.
            from deltaline_kernels.mhc.launch import mhc_post_triton

            mhc_post_triton(x, residual, post, comb, y)
    return y


@operator(_fake_post_pre, results=4)
def mhc_post_pre(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    gates: Gates,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the streams behind a sublayer, and what `mhc_pre` returns of them for the next one.

    Arguments and errors are those of `mhc_post` and `mhc_pre`.

    Returns:
        The streams `[N, S, H]` and the input `[N, H]` in residual.dtype, post `[N, S]` and comb `[N, S, S]` fp32.
    """
    _check_mixed(x, residual, post, comb)
    _check_gates(residual, gates)
    if residual.device.type == "cpu" or residual.shape[0] == 0:
        mixed = mhc_post(x, residual, post, comb)
        return mixed, *mhc_pre(mixed, gates, norm_weight=norm_weight, norm_eps=norm_eps)
    norm_eps = _parse_norm(residual, norm_weight, norm_eps)
    num_tokens, streams, hidden = residual.shape
    mixed = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    out = torch.empty(num_tokens, hidden, dtype=residual.dtype, device=residual.device)
    new_post = torch.empty(num_tokens, streams, dtype=torch.float32, device=residual.device)
    new_comb = torch.empty(num_tokens, streams, streams, dtype=torch.float32, device=residual.device)
    # Imported here: only this path needs triton, which is installed on Linux alone.
    from deltaline_kernels.mhc.launch import mhc_post_pre_triton

    mhc_post_pre_triton(x, residual, post, comb, gates, norm_weight, norm_eps, mixed, out, new_post, new_comb)
    return mixed, out, new_post, new_comb


@operator(_fake_head)
def mhc_head(
    residual: Tensor, weight: Tensor, scale: Tensor, base: Tensor, rms_eps: float = 1e-6, pre_eps: float = 1e-6
) -> Tensor:
    """Return the hidden states behind the last layer: the streams of each token, weighted as `mhc_pre` does.

    Args:
        residual: `[N, S, H]` fp32, bf16 or fp16; a row stride is fine. N may be 0.
        weight: `[S, S*H]` fp32. scale: `[1]` fp32. base: `[S]` fp32. All contiguous.
        rms_eps: added to the mean square of a token's streams. pre_eps: added to the weights of the streams.

    Returns:
        `[N, H]` in residual.dtype, rounded once.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    num_tokens, streams, hidden = _check_residual(residual)
    fp32 = (torch.float32,)
    check_tensor("weight", weight, (streams, streams * hidden), fp32, residual.device)
    check_tensor("scale", scale, (1,), fp32, residual.device)
    check_tensor("base", base, (streams,), fp32, residual.device)
    rms_eps, pre_eps = parse_eps("rms_eps", rms_eps), parse_eps("pre_eps", pre_eps)
    y = torch.empty(num_tokens, hidden, dtype=residual.dtype, device=residual.device)
    if num_tokens > 0:
        if residual.device.type == "cpu":
            mhc_head_cpu(residual, weight, scale, base, rms_eps, pre_eps, y)
        else:
            # Imported here: only this path needs triton, which is installed on Linux alone.
            from deltaline_kernels.mhc.launch import mhc_head_triton

            mhc_head_triton(residual, weight, scale, base, rms_eps, pre_eps, y)
    return y


def _check_residual(residual: Tensor) -> tuple[int, int, int]:
    """Return N, S and H."""
    check_tensor("residual", residual, (None, None, None), ACTIVATIONS, None, row_stride=True)
    num_tokens, streams, hidden = residual.shape
    if not 1 <= streams <= MAX_STREAMS or hidden < 1:
        shape = list(residual.shape)
        raise ValueError(f"residual: expected 1..{MAX_STREAMS} streams of at least 1 channel, got shape {shape}")
    return num_tokens, streams, hidden


def _check_gates(residual: Tensor, gates: Gates) -> None:
    """Check the streams, and that the gates are for as many channels."""
    if not isinstance(gates, Gates):
        raise TypeError(f"gates: expected Gates, got {type(gates).__name__}")
    _, streams, hidden = _check_residual(residual)
    if (gates.num_streams, gates.hidden) != (streams, hidden):
        raise ValueError(
            f"gates: expected those of {streams} streams of {hidden} channels, "
            f"got those of {gates.num_streams} of {gates.hidden}"
        )
    if gates.weight.device != residual.device:
        raise ValueError(f"gates: expected device {residual.device}, got {gates.weight.device}")


def _parse_norm(residual: Tensor, norm_weight: Tensor | None, norm_eps: float) -> float:
    """Check the norm of a sublayer's input, and return what is added to its mean square: 0 where there is none."""
    if norm_weight is None:
        return 0.0
    check_tensor("norm_weight", norm_weight, residual.shape[2:], (torch.float32,), residual.device)
    return parse_eps("norm_eps", norm_eps)


def _check_mixed(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> None:
    """Check what `mhc_post` is given."""
    num_tokens, streams, hidden = _check_residual(residual)
    check_tensor("x", x, (num_tokens, hidden), (residual.dtype,), residual.device, row_stride=True)
    check_tensor("post", post, (num_tokens, streams), (torch.float32,), residual.device)
    check_tensor("comb", comb, (num_tokens, streams, streams), (torch.float32,), residual.device)
