"""The Mamba-1 recurrence in fp64, token by token: h = exp(d A) h + u B^T; y = (h C + D x) silu(z).

Batched PyTorch, written apart from the kernels and their reference. Knows no lines and no rows of different lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from deltaline_bench.recurrence import tokens


@dataclass(frozen=True)
class Tokens(tokens.Tokens):
    """B, C `[..., S]`; u, the time steps, D x (the skip) and silu(z) (the gate), `[..., D]`; rate `[D, S]` of all."""

    B: Tensor
    C: Tensor
    u: Tensor
    step: Tensor
    skip: Tensor
    gate: Tensor
    rate: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        mapped = {name: function(x) for name, x in vars(self).items() if name != "rate"}
        return replace(self, **mapped)

    def only(self, is_accepted: Tensor) -> Tokens:
        accepted = is_accepted[..., None]
        return replace(self, u=self.u * accepted, step=self.step * accepted)

    def record(self, state: Tensor) -> Tensor:
        return torch.cat((self.B, self.u, self.step), dim=-1)

    def advance(self, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(self.u.shape[1]):
            decay = (self.step[:, t, :, None] * self.rate).exp()
            state = decay[:, None] * state + (self.u[:, t, :, None] * self.B[:, t, None])[:, None]
            seen = (state @ self.C[:, t, None, :, None])[..., 0]  # (R, 1, D)
            outputs.append((seen + self.skip[:, t, None]) * self.gate[:, t, None])
        return torch.stack(outputs, dim=1), state
