"""Mamba2 of inference engines in plain loops: the truth that the engines' functions are tested against.

    d = clamp(softplus(dt + bias));  h = exp(A d) h + d x B^T;  y = (h C + D x) silu(z)

Written in fp64 from the engines' semantics, token by token and head by head, for reading. Shares nothing
with what it tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rigs.kernels.field_recurrence import field_rows
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Packed tokens: x, z `[T, H, P]`, B, C `[T, G, S]`, raw dt `[T, H]`; A, bias `[H]`, D `[H]` or `[H, P]`.

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
    limits: tuple[float, float] = (0.0, math.inf)

    @property
    def values(self) -> Tensor:
        return self.x

    def advance(self, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return y `[H, P]` and the state `[H, P, S]` after token t, all in fp64."""
        num_heads = self.x.shape[1]
        y = torch.zeros(self.x.shape[1:], dtype=torch.float64)
        after = torch.zeros(state.shape, dtype=torch.float64)
        for i in range(num_heads):
            group = i // (num_heads // self.B.shape[1])
            step = self.dt[t, i].double()
            if self.bias is not None:
                step = step + self.bias[i].double()
            if self.softplus:
                step = torch.log1p(torch.exp(step)) if step <= 20 else step
            step = step.clamp(*self.limits)
            x = self.x[t, i].double()
            h = state[i].double() * torch.exp(self.A[i].double() * step)
            after[i] = h + torch.outer(step * x, self.B[t, group].double())
            y[i] = after[i].mv(self.C[t, group].double())
            if self.D is not None:
                y[i] += self.D[i].double() * x
            if self.z is not None:
                z = self.z[t, i].double()
                y[i] *= z / (1.0 + torch.exp(-z))
        return y, after


def field_scan(
    told: dict[str, Tensor | None], starts: Sequence[int], limits: tuple[float, float], *, softplus: bool
) -> tuple[Tensor, Tensor]:
    """Return y `[T, H, P]` and the final states `[N, H, P, S]`; `told` has the chunked function's tensors by name."""
    host: Any = {name: None if value is None else value.detach().cpu() for name, value in told.items()}
    weights = (host["D"], host["z"], host["dt_bias"])
    tokens = Tokens(host["x"], host["dt"], host["A"], host["B"], host["C"], *weights, softplus, limits)
    initial = host["initial_states"]
    if initial is None:
        initial = torch.zeros(len(starts) - 1, *tokens.x.shape[1:], tokens.B.shape[2])
    return field_rows(tokens, starts, initial)
