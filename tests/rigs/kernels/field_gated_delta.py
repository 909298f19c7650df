"""The gated delta rule of inference engines in plain loops: the truth that the engines' functions are tested against.

    h = exp(g) h;  u = beta (v - h k);  h += u k^T;  o = h q

Written in fp64 from the engines' semantics, token by token and head by head, for reading. Shares nothing
with what it tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Packed tokens: q, k `[T, H, K]`, v `[T, HV, V]`, the log decay g and the strength beta `[T, HV]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float | None = None
    l2norm: bool = False

    @property
    def values(self) -> Tensor:
        return self.v

    def advance(self, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return o `[HV, V]` and the state `[HV, V, K]` after token t, all in fp64."""
        num_key_heads, key_dim = self.q.shape[1:]
        num_value_heads, value_dim = self.v.shape[1:]
        scale = key_dim**-0.5 if self.scale is None else self.scale
        o = torch.zeros(num_value_heads, value_dim, dtype=torch.float64)
        after = torch.zeros(state.shape, dtype=torch.float64)
        for i in range(num_value_heads):
            key_head = i // (num_value_heads // num_key_heads)
            q, k = self.q[t, key_head].double(), self.k[t, key_head].double()
            if self.l2norm:
                q = q / (q.dot(q) + 1e-6).sqrt()
                k = k / (k.dot(k) + 1e-6).sqrt()
            h = state[i].double() * self.g[t, i].double().exp()
            u = self.beta[t, i].double() * (self.v[t, i].double() - h.mv(k))
            after[i] = h + torch.outer(u, k)
            o[i] = after[i].mv(q * scale)
        return o, after


def field_gates(
    A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor, softplus_beta: float, softplus_threshold: float
) -> tuple[Tensor, Tensor]:
    """Return the log decay and the strength of each token and head, in fp64."""
    x = a.double() + dt_bias.double()
    soft = torch.log1p(torch.exp((softplus_beta * x).clamp(max=softplus_threshold))) / softplus_beta
    rise = torch.where(softplus_beta * x > softplus_threshold, x, soft)
    return -torch.exp(A_log.double()) * rise, 1.0 / (1.0 + torch.exp(-b.double()))
