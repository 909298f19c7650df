"""The chunked Mamba2 of inference engines in plain loops: the truth that the engines' function is tested against.

    d = clamp(softplus(dt + dt_bias));  h = exp(A d) h + d x B^T;  y = (h C + D x) silu(z)

Written in fp64 from the engines' semantics, sequence by sequence, token by token and head by head, for reading. Shares
nothing with what it tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def field_scan(
    told: dict[str, Tensor | None], starts: Sequence[int], limits: tuple[float, float], *, softplus: bool
) -> tuple[Tensor, Tensor]:
    """Return y `[T, H, P]` and the final states `[N, H, P, S]` in fp64; `told` has the function's tensors by name."""
    tensors = {name: None if value is None else value.detach().double().cpu() for name, value in told.items()}
    x, dt, A, B, C = (tensors[name] for name in ("x", "dt", "A", "B", "C"))
    assert x is not None and dt is not None and A is not None and B is not None and C is not None
    D, z, bias, initial = (tensors[name] for name in ("D", "z", "dt_bias", "initial_states"))
    num_heads, head_dim = x.shape[1:]
    num_groups, state_dim = B.shape[1:]
    y = torch.zeros(x.shape, dtype=torch.float64)
    states = torch.zeros(len(starts) - 1, num_heads, head_dim, state_dim, dtype=torch.float64)
    for row in range(len(starts) - 1):
        for head in range(num_heads):
            group = head // (num_heads // num_groups)
            h = states[row, head] if initial is None else initial[row, head].clone()
            for t in range(starts[row], starts[row + 1]):
                step = float(dt[t, head]) + (0.0 if bias is None else float(bias[head]))
                if softplus:
                    step = step if step > 20 else math.log1p(math.exp(step))
                step = min(max(step, limits[0]), limits[1])
                h = math.exp(float(A[head]) * step) * h + step * torch.outer(x[t, head], B[t, group])
                out = h.mv(C[t, group])
                if D is not None:
                    out = out + D[head] * x[t, head]
                if z is not None:
                    out = out * z[t, head] / (1.0 + torch.exp(-z[t, head]))
                y[t, head] = out
            states[row, head] = h
    return y, states
