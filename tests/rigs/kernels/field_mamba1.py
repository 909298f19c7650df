"""Mamba-1 of inference engines in plain loops: the truth that the engines' functions are tested against.

    d = softplus(dt + bias);  h = exp(A d) h + d x B^T;  y = (h C + D x) silu(z)

Written in fp64 from the engines' semantics, token by token and channel by channel, for reading. Shares nothing with
what it tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Packed tokens: x, dt, z `[T, H, P]`, B, C `[T, G, S]`; A `[H, P, S]`, D, bias `[H, P]`.

    z, D and bias may be None.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    bias: Tensor | None = None
    softplus: bool = True

    @property
    def values(self) -> Tensor:
        return self.x

    def advance(self, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return y `[H, P]` and the state `[H, P, S]` after token t, all in fp64."""
        num_heads, head_dim = self.x.shape[1:]
        y, after = torch.zeros(num_heads, head_dim).double(), torch.zeros(state.shape).double()
        for i in range(num_heads):
            for j in range(head_dim):
                group = (i * head_dim + j) // (num_heads * head_dim // self.B.shape[1])
                step, x = self.dt[t, i, j].double(), self.x[t, i, j].double()
                if self.bias is not None:
                    step = step + self.bias[i, j].double()
                if self.softplus:
                    step = torch.log1p(torch.exp(step)) if step < 20 else step
                decay = torch.exp(self.A[i, j].double() * step)
                after[i, j] = decay * state[i, j].double() + step * x * self.B[t, group].double()
                y[i, j] = after[i, j] @ self.C[t, group].double()
                if self.D is not None:
                    y[i, j] += self.D[i, j].double() * x
                if self.z is not None:
                    z = self.z[t, i, j].double()
                    y[i, j] *= z / (1.0 + torch.exp(-z))
        return y, after
