"""The engines' selective state update in plain loops: the truth that the engines' function is tested against.

    h = exp(A dt) h + dt x B^T;  y = h C + D x;  y = y silu(z)

Written in fp64 from the engines' semantics, row by row, token by token and head by head, for reading. Shares nothing
with what it tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Packed tokens: x, z `[T, H, P]`, B, C `[T, G, S]`, raw dt `[T, H]`; A, D, bias `[H]`; z, D, bias may be None."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    bias: Tensor | None = None
    softplus: bool = True

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


def field_slots(tokens: Tokens, starts: Sequence[int], pool: Tensor, slots: Sequence[int], pad: int = -1) -> Tensor:
    """Return y `[T, H, P]` fp64, NaN where no row is; mutates pool `[slots, H, P, S]`, rounded once per row."""
    y = torch.full(tokens.x.shape, torch.nan, dtype=torch.float64)
    for i, slot in enumerate(slots):
        begin, end = starts[i], starts[i + 1]
        if slot < 0 or slot == pad:
            y[begin:end] = 0
        elif end > begin:
            h = pool[slot].double()
            for t in range(begin, end):
                y[t], h = tokens.advance(t, h)
            pool[slot] = h.to(pool.dtype)
    return y


def field_table(
    tokens: Tokens,
    starts: Sequence[int],
    pool: Tensor,
    table: Sequence[Sequence[int]],
    accepted: Sequence[int],
    pad: int = -1,
) -> Tensor:
    """Return y `[T, H, P]` fp64, NaN where no row is; mutates pool `[slots, H, P, S]`, rounded once per token."""
    y = torch.full(tokens.x.shape, torch.nan, dtype=torch.float64)
    for i, slots in enumerate(table):
        begin, end = starts[i], starts[i + 1]
        first = slots[min(max(accepted[i], 1), len(slots)) - 1]
        used = [first, *slots[: end - begin]]
        if end > begin and (min(used) < 0 or pad in used):
            y[begin:end] = 0
            continue
        state = pool[first].clone()
        for t in range(begin, end):
            y[t], after = tokens.advance(t, state)
            state = after.to(pool.dtype)
            pool[slots[t - begin]] = state
    return y
