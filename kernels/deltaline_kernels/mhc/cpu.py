"""Hyper-connections on the CPU: vectorised PyTorch over blocks of tokens of one size.

Products of a block are computed with as many rows whatever a batch has, so a token's bits don't depend on its company.
"""

import torch
from torch import Tensor

from deltaline_kernels.mhc.gates import Gates
from deltaline_kernels.mhc.reference import normalize

# Tokens of a block of products. A last block with fewer is padded.
BLOCK_TOKENS = 16


def mhc_pre_cpu(
    residual: Tensor, gates: Gates, norm_weight: Tensor | None, norm_eps: float, y: Tensor, post: Tensor, comb: Tensor
) -> None:
    """Write y `[N, H]`, post `[N, S]` and comb `[N, S, S]`. Arguments are validated by `mhc_pre`."""
    streams = gates.num_streams
    sizes = (streams, streams, streams * streams)
    pre_base, post_base, comb_base = gates.base.split(sizes)
    for begin in range(0, residual.shape[0], BLOCK_TOKENS):
        own = slice(begin, begin + BLOCK_TOKENS)
        r = _padded(residual[own])
        count = y[own].shape[0]
        mixes = _mix(r, gates.weight, gates.rms_eps).split(sizes, dim=-1)
        pre = torch.sigmoid(mixes[0] * gates.scale[0] + pre_base) + gates.pre_eps
        post[own] = (torch.sigmoid(mixes[1] * gates.scale[1] + post_base) * gates.post_multiplier)[:count]
        logits = (mixes[2] * gates.scale[2] + comb_base).unflatten(-1, (streams, streams))
        comb[own] = normalize(logits, gates.sinkhorn_eps, gates.sinkhorn_repeat)[:count]
        part = _collapse(pre, r)
        if norm_weight is not None:
            part *= (part.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
            part *= norm_weight
        y[own] = part[:count].to(y.dtype)


def mhc_post_cpu(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, y: Tensor) -> None:
    """Write y `[N, S, H]`. Arguments are validated by `mhc_post`."""
    for begin in range(0, residual.shape[0], BLOCK_TOKENS):
        own = slice(begin, begin + BLOCK_TOKENS)
        r, own_x = residual[own].float(), x[own].float()
        for i in range(residual.shape[1]):
            # One stream after the other: a small product of matrices is rounded by how many there are.
            part = post[own, i, None] * own_x
            for j in range(residual.shape[1]):
                part += comb[own, j, i, None] * r[:, j]
            y[own, i] = part.to(y.dtype)


def mhc_head_cpu(
    residual: Tensor, weight: Tensor, scale: Tensor, base: Tensor, rms_eps: float, pre_eps: float, y: Tensor
) -> None:
    """Write y `[N, H]`. Arguments are validated by `mhc_head`."""
    for begin in range(0, residual.shape[0], BLOCK_TOKENS):
        own = slice(begin, begin + BLOCK_TOKENS)
        r = _padded(residual[own])
        pre = torch.sigmoid(_mix(r, weight, rms_eps) * scale + base) + pre_eps
        y[own] = _collapse(pre, r)[: y[own].shape[0]].to(y.dtype)


def _padded(residual: Tensor) -> Tensor:
    """Return the streams of a whole block in fp32, zeros behind its last token."""
    block = torch.zeros(BLOCK_TOKENS, *residual.shape[1:], dtype=torch.float32)
    block[: residual.shape[0]] = residual
    return block


def _mix(r: Tensor, weight: Tensor, rms_eps: float) -> Tensor:
    flat = r.flatten(1)
    return flat @ weight.T * (flat.square().mean(-1, keepdim=True) + rms_eps).rsqrt()


def _collapse(pre: Tensor, r: Tensor) -> Tensor:
    """Return the weighted sum of the streams, one after the other."""
    part = pre[:, 0, None] * r[:, 0]
    for j in range(1, r.shape[1]):
        part += pre[:, j, None] * r[:, j]
    return part
