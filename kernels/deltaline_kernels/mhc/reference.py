"""Hyper-connections as they are written: the truth that the other paths are tested against.

Written for reading. Computes in fp32 (fp64 when the residual is fp64), on any device, without speed. The formulas are
those of DeepSeek-V4's hyper-connections.
"""

import torch
from torch import Tensor

from deltaline_kernels.mhc.gates import Gates


def mhc_pre_reference(
    residual: Tensor, gates: Gates, *, norm_weight: Tensor | None = None, norm_eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `mhc_pre` does."""
    streams, r = gates.num_streams, _compute(residual)
    mixes = _mix(r, gates.weight, gates.rms_eps)
    scale, base = gates.scale.to(r.dtype), gates.base.to(r.dtype)
    pre, post, comb = mixes.split((streams, streams, streams * streams), dim=-1)
    pre_base, post_base, comb_base = base.split((streams, streams, streams * streams))
    pre = torch.sigmoid(pre * scale[0] + pre_base) + gates.pre_eps
    post = torch.sigmoid(post * scale[1] + post_base) * gates.post_multiplier
    comb = normalize(
        (comb * scale[2] + comb_base).unflatten(-1, (streams, streams)), gates.sinkhorn_eps, gates.sinkhorn_repeat
    )
    y = (pre[..., None] * r).sum(-2)
    if norm_weight is not None:
        y = y * (y.square().mean(-1, keepdim=True) + norm_eps).rsqrt() * norm_weight.to(r.dtype)
    return y.to(residual.dtype), post, comb


def normalize(comb: Tensor, eps: float, repeat: int) -> Tensor:
    """Return `[..., S, S]` with rows and columns of sum 1, nearly: softmax, then Sinkhorn and Knopp, columns last."""
    comb = torch.softmax(comb, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def mhc_post_reference(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return what `mhc_post` does: comb is summed over its first index."""
    r = _compute(residual)
    y = post[..., None].to(r.dtype) * x[:, None].to(r.dtype) + torch.einsum("nji,njh->nih", comb.to(r.dtype), r)
    return y.to(residual.dtype)


def mhc_post_pre_reference(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    gates: Gates,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `mhc_post_pre` does."""
    r = mhc_post_reference(x, residual, post, comb)
    return r, *mhc_pre_reference(r, gates, norm_weight=norm_weight, norm_eps=norm_eps)


def mhc_head_reference(
    residual: Tensor, weight: Tensor, scale: Tensor, base: Tensor, rms_eps: float = 1e-6, pre_eps: float = 1e-6
) -> Tensor:
    """Return what `mhc_head` does."""
    r = _compute(residual)
    pre = torch.sigmoid(_mix(r, weight, rms_eps) * scale.to(r.dtype) + base.to(r.dtype)) + pre_eps
    return (pre[..., None] * r).sum(-2).to(residual.dtype)


def _mix(r: Tensor, weight: Tensor, rms_eps: float) -> Tensor:
    """Return the products `[N, rows]` of the RMS-normalised streams; the norm commutes with them."""
    flat = r.flatten(-2)
    return flat @ weight.to(r.dtype).T * (flat.square().mean(-1, keepdim=True) + rms_eps).rsqrt()


def _compute(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
