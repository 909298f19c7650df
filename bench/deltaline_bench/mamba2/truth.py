"""The Mamba2 recurrence in fp64, chunk by chunk: h = exp(g) h + u B^T; y = h C + D x.

Batched PyTorch, written apart from the kernels and their reference. Knows no lines and no rows of different lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_bench.gated_delta.shape import CHUNK
from deltaline_bench.mamba2.shape import Shape


@dataclass(frozen=True)
class Tokens:
    """fp64 tokens, the first dimensions alike: B, C `[..., G, S]`; u and D x, the skip, `[..., H, P]`; g `[..., H]`."""

    B: Tensor
    C: Tensor
    u: Tensor
    skip: Tensor
    g: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        """Apply `function` to every tensor."""
        return Tokens(*map(function, (self.B, self.C, self.u, self.skip, self.g)))

    def records(self) -> Tensor:
        """Return what drafts `[R, T, ...]` keep: B, u and g, `[R, T, G*S + H*P + H]`."""
        return torch.cat((self.B.flatten(-2), self.u.flatten(-2), self.g), dim=-1)


def read_tokens(shape: Shape, xBC: Tensor, dt: Tensor, A_log: Tensor, D: Tensor, dt_bias: Tensor) -> Tokens:
    """Unpack `[T, channels]` and raw time steps `[T, H]`."""
    x, B, C = xBC.double().split((shape.values, shape.keys, shape.keys), dim=-1)
    x = x.unflatten(-1, (shape.num_heads, shape.head_dim))
    B, C = (part.unflatten(-1, (shape.num_groups, shape.state_dim)) for part in (B, C))
    step = F.softplus(dt.double() + dt_bias.double())
    return Tokens(B, C, step[..., None] * x, D.double()[:, None] * x, -A_log.double().exp() * step)


def advance(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run tokens `[R, T, ...]` through states `[R, H, P, S]`; return y `[R, T, H, P]` and the states after them."""
    group = tokens.u.shape[2] // tokens.B.shape[2]
    outputs = []
    for begin in range(0, tokens.u.shape[1], CHUNK):
        part = tokens.map(lambda x, begin=begin: x[:, begin : begin + CHUNK].transpose(1, 2))  # type: ignore[misc]
        B, C = (x.repeat_interleave(group, dim=1) for x in (part.B, part.C))  # (R, H, C, S)
        total = part.g.cumsum(-1)
        lower = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).tril()
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
        seen = total.exp()[..., None] * (C @ state.transpose(-1, -2))
        outputs.append((seen + (C @ B.transpose(-1, -2) * decay) @ part.u + part.skip).transpose(1, 2))
        last = total[..., -1:]
        faded = part.u * (last - total).exp()[..., None]
        state = last.exp()[..., None] * state + faded.transpose(-1, -2) @ B
    return torch.cat(outputs, dim=1), state
