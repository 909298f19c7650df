"""KDA in fp64, token by token: h = exp(g) h; u = beta (v - h k); h += u k^T; o = h q, with a g of each key channel.

Batched PyTorch, written apart from the kernels and their reference. Knows no lines and no rows of different lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_bench.kda.shape import Shape
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
        _, u = self._write(state, 0)
        return torch.cat([x.flatten(-2) for x in (self.k, u[:, None], self.g)], dim=-1)

    def advance(self, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for i in range(self.v.shape[1]):
            state, u = self._write(state, i)
            state = state + u[..., None] * self._of_head(self.k, i)[..., None, :]
            outputs.append((state @ self._of_head(self.q, i)[..., None])[..., 0])
        return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(self.v), state

    def _write(self, state: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """Return the states `[R, HV, V, K]` decayed by token i, and its u `[R, HV, V]`."""
        decayed = state * self.g[:, i].exp()[..., None, :]
        seen = (decayed @ self._of_head(self.k, i)[..., None])[..., 0]
        return decayed, self.beta[:, i, :, None] * (self.v[:, i] - seen)

    def _of_head(self, x: Tensor, i: int) -> Tensor:
        """Return token i of keys or queries for each value head, `[R, HV, K]`."""
        return x[:, i].repeat_interleave(self.v.shape[2] // x.shape[2], dim=1)


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
