"""The gated delta rule in fp64, chunk by chunk: h = exp(g) h; u = beta (v - h k); h += u k^T; o = h q.

Batched PyTorch, written apart from the kernels and their reference. Knows no lines and no rows of different lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_bench.gated_delta.shape import Shape
from deltaline_bench.recurrence import tokens
from deltaline_bench.recurrence.shape import CHUNK
from deltaline_bench.recurrence.tokens import decays

EPS = 1e-6


@dataclass(frozen=True)
class Tokens(tokens.Tokens):
    """q, k `[..., H, K]` normalised, q scaled; v `[..., HV, V]`; g, beta `[..., HV]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def only(self, is_accepted: Tensor) -> Tokens:
        return replace(self, g=self.g * is_accepted[..., None], beta=self.beta * is_accepted[..., None])

    def record(self, state: Tensor) -> Tensor:
        group = self.v.shape[2] // self.k.shape[2]
        seen = (state @ self.k[:, 0].repeat_interleave(group, dim=1)[..., None])[..., 0]
        u = self.beta[:, 0, :, None] * (self.v[:, 0] - self.g[:, 0, :, None].exp() * seen)
        return torch.cat((self.k.flatten(-2), u[:, None].flatten(-2), self.g), dim=-1)

    def advance(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run rows through states, as the base says.

        With G the sums of g within a chunk, T = (I + tril(diag(beta) (k k^T * exp(G_i - G_j)), -1))^-1 turns the
        chunk into one step: u = T beta (v - exp(G) k h^T), o = exp(G) q h^T + tril(q k^T * exp(G_i - G_j)) u.
        """
        length = self.v.shape[1]
        chunk = min(CHUNK, length)
        num_chunks = -(-length // chunk)

        def blocks(x: Tensor) -> Tensor:
            """Return `[R, heads, chunks, C, ...]`; tokens that pad the last chunk are zero and change nothing."""
            padding = [0, 0] * (x.ndim - 2) + [0, num_chunks * chunk - length]
            padded: Tensor = F.pad(x, padding)
            return padded.reshape(len(x), num_chunks, chunk, *x.shape[2:]).movedim(3, 1)

        group = self.v.shape[2] // self.k.shape[2]
        q, k = (blocks(x).repeat_interleave(group, dim=1) for x in (self.q, self.k))
        v, beta = blocks(self.v), blocks(self.beta)[..., None]
        total, decay = decays(blocks(self.g))
        keys = k.transpose(-1, -2)
        triangle = (beta * (k @ keys) * decay).tril(-1)
        right = beta * torch.cat((v, k * total.exp()[..., None]), dim=-1)
        # Its diagonal is taken to be one.
        solved = torch.linalg.solve_triangular(triangle, right, upper=False, unitriangular=True)
        new, seen = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
        scores = (q @ keys) * decay
        outputs = []
        for i in range(num_chunks):
            turned = state.transpose(-1, -2)
            u = new[:, :, i] - seen[:, :, i] @ turned
            outputs.append(total[:, :, i].exp()[..., None] * (q[:, :, i] @ turned) + scores[:, :, i] @ u)
            last = total[:, :, i, -1:]
            faded = u * (last - total[:, :, i]).exp()[..., None]
            state = last.exp()[..., None] * state + faded.transpose(-1, -2) @ k[:, :, i]
        return torch.cat(outputs, dim=2).transpose(1, 2)[:, :length], state


def read_tokens(shape: Shape, packed: tuple[Tensor, ...], A_log: Tensor, dt_bias: Tensor) -> Tokens:
    """Unpack `[T, D]` and raw gates `[T, HV]`."""
    qkv, a, b = (x.double() for x in packed)
    q, k, v = shape.split(qkv)
    g = -A_log.double().exp() * F.softplus(a + dt_bias.double())
    return Tokens(_normalise(q) * shape.key_dim**-0.5, _normalise(k), v, g, b.sigmoid())


def _normalise(x: Tensor) -> Tensor:
    norm = torch.sqrt(x.square().sum(-1, keepdim=True) + EPS)
    return x / norm
