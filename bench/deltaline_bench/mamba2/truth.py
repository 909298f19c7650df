"""The Mamba2 recurrence in fp64, chunk by chunk: h = exp(g) h + u B^T; y = h C + D x.

Batched PyTorch, written apart from the kernels and their reference. Knows no lines and no rows of different lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_bench.mamba2.shape import Shape
from deltaline_bench.recurrence import tokens
from deltaline_bench.recurrence.shape import CHUNK
from deltaline_bench.recurrence.tokens import decays


@dataclass(frozen=True)
class Tokens(tokens.Tokens):
    """B, C `[..., G, S]`; u and D x, the skip, `[..., H, P]`; g `[..., H]`."""

    B: Tensor
    C: Tensor
    u: Tensor
    skip: Tensor
    g: Tensor

    def only(self, is_accepted: Tensor) -> Tokens:
        return replace(self, u=self.u * is_accepted[..., None, None], g=self.g * is_accepted[..., None])

    def record(self, state: Tensor) -> Tensor:
        return torch.cat((self.B.flatten(-2), self.u.flatten(-2), self.g), dim=-1)

    def advance(self, state: Tensor) -> tuple[Tensor, Tensor]:
        group = self.u.shape[2] // self.B.shape[2]
        outputs = []
        for begin in range(0, self.u.shape[1], CHUNK):
            part = self.map(lambda x, begin=begin: x[:, begin : begin + CHUNK].transpose(1, 2))  # type: ignore[misc]
            B, C = (x.repeat_interleave(group, dim=1) for x in (part.B, part.C))  # (R, H, C, S)
            total, decay = decays(part.g)
            seen = total.exp()[..., None] * (C @ state.transpose(-1, -2))
            outputs.append((seen + (C @ B.transpose(-1, -2) * decay) @ part.u + part.skip).transpose(1, 2))
            last = total[..., -1:]
            faded = part.u * (last - total).exp()[..., None]
            state = last.exp()[..., None] * state + faded.transpose(-1, -2) @ B
        return torch.cat(outputs, dim=1), state


def read_tokens(shape: Shape, packed: tuple[Tensor, ...], A_log: Tensor, D: Tensor, dt_bias: Tensor) -> Tokens:
    """Unpack `[T, channels]` and raw time steps `[T, H]`."""
    xBC, dt = (x.double() for x in packed)
    x, B, C = shape.split(xBC)
    step = F.softplus(dt + dt_bias.double())
    return Tokens(B, C, step[..., None] * x, D.double()[:, None] * x, -A_log.double().exp() * step)
