"""KDA in fp64, chunk by chunk: h = exp(g) h; u = beta (v - h k); h += u k^T; o = h q, with a g of each key channel.

Batched PyTorch, written apart from the kernels and their reference. Knows no lines and no rows of different lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_bench.kda.shape import CHUNK, Shape
from deltaline_bench.recurrence import tokens

EPS = 1e-6


@dataclass(frozen=True)
class Tokens(tokens.Tokens):
    """q, k `[..., H, K]` normalised, q scaled; v `[..., HV, V]`; g `[..., HV, K]`; beta `[..., HV]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def only(self, is_accepted: Tensor) -> Tokens:
        return replace(self, g=self.g * is_accepted[..., None, None], beta=self.beta * is_accepted[..., None])

    def record(self, state: Tensor) -> Tensor:
        group = self.v.shape[2] // self.k.shape[2]
        decayed = state * self.g[:, 0].exp()[..., None, :]
        seen = (decayed @ self.k[:, 0].repeat_interleave(group, dim=1)[..., None])[..., 0]
        u = self.beta[:, 0, :, None] * (self.v[:, 0] - seen)
        return torch.cat([x.flatten(-2) for x in (self.k, u[:, None], self.g)], dim=-1)

    def advance(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run rows through states chunk by chunk, as the base says.

        With G the sums of g within a chunk, A_ij = sum of k_i k_j exp(G_i - G_j) over the channels below the diagonal,
        and T = (I + diag(beta) A)^-1, the chunk is one step: u = T beta (v - (exp(G) k) h^T), o = (exp(G) q) h^T + B u
        with B_ij = sum of q_i k_j exp(G_i - G_j), the diagonal with it. Differences of G alone are taken to powers,
        which are at most 1, whatever a channel forgets.
        """
        parts = [self.v[:, :0]]
        for begin in range(0, self.v.shape[1], CHUNK):
            o, state = self.map(lambda x, begin=begin: x[:, begin : begin + CHUNK])._step(state)  # type: ignore[misc]
            parts.append(o)
        return torch.cat(parts, dim=1), state

    def _step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The same of one chunk."""
        group = self.v.shape[2] // self.k.shape[2]
        q, k = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (self.q, self.k))  # (R, HV, C, K)
        v, beta = self.v.transpose(1, 2), self.beta.transpose(1, 2)[..., None]
        total = self.g.cumsum(1).transpose(1, 2)
        lower = torch.ones(v.shape[2], v.shape[2], dtype=torch.bool, device=v.device).tril()[..., None]
        between = total[:, :, :, None] - total[:, :, None]  # (R, HV, C, C, K)
        faded = between.masked_fill_(~lower, -torch.inf).exp_() * k[:, :, None]
        products, scores = ((faded @ x[..., None])[..., 0] for x in (k, q))
        decay, turned = total.exp(), state.transpose(-1, -2)
        # Its diagonal is taken to be one.
        u = torch.linalg.solve_triangular(
            beta * products, beta * (v - (decay * k) @ turned), upper=False, unitriangular=True
        )
        o = (decay * q) @ turned + scores @ u
        # What the chunk's last token has left of each.
        return o.transpose(1, 2), state * decay[:, :, -1:] + u.transpose(-1, -2) @ faded[:, :, -1]


def read_tokens(shape: Shape, packed: tuple[Tensor, ...], A_log: Tensor, dt_bias: Tensor) -> Tokens:
    """Unpack `[T, D]` and raw gates `[T, HV*K]` and `[T, HV]`."""
    qkv, a, b = (x.double() for x in packed)
    q, k, v = shape.split(qkv)
    rate = A_log.double().exp()[:, None]
    x = (a + dt_bias.double()).unflatten(-1, (shape.num_value_heads, shape.key_dim))
    g = -rate * F.softplus(x) if shape.lower_bound is None else shape.lower_bound * torch.sigmoid(rate * x)
    return Tokens(_normalise(q) * shape.key_dim**-0.5, _normalise(k), v, g, b.sigmoid())


def _normalise(x: Tensor) -> Tensor:
    norm = torch.sqrt(x.square().sum(-1, keepdim=True) + EPS)
    return x / norm
