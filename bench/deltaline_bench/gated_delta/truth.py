"""The gated delta rule in fp64, chunk by chunk: h = exp(g) h; u = beta (v - h k); h += u k^T; o = h q.

Batched PyTorch, written apart from the kernels and their reference. Knows no lines and no rows of different lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_bench.gated_delta.shape import CHUNK, Shape

EPS = 1e-6


@dataclass(frozen=True)
class Tokens:
    """fp64 tokens, the first dimensions alike: q, k `[..., H, K]` normalised, q scaled; v `[..., HV, V]`; g, beta."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        """Apply `function` to every tensor."""
        return Tokens(function(self.q), function(self.k), function(self.v), function(self.g), function(self.beta))

    def records(self, state: Tensor) -> Tensor:
        """Return what drafts `[R, T, ...]` keep that follow `state` `[R, HV, V, K]`.

        k, u and g, `[R, T, H*K + HV*V + HV]`.
        """
        group = self.v.shape[2] // self.k.shape[2]
        updates = []
        for i in range(self.v.shape[1]):
            token = self.map(itemgetter((slice(None), slice(i, i + 1))))
            seen = (state @ token.k[:, 0].repeat_interleave(group, dim=1)[..., None])[..., 0]
            decayed = token.g[:, 0, :, None].exp() * seen
            updates.append(token.beta[:, 0, :, None] * (token.v[:, 0] - decayed))
            state = advance(token, state)[1]
        return torch.cat((self.k.flatten(-2), torch.stack(updates, dim=1).flatten(-2), self.g), dim=-1)


def read_tokens(shape: Shape, qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tokens:
    """Unpack `[T, D]` and raw gates `[T, HV]`."""
    q, k, v = qkv.double().split((shape.keys, shape.keys, shape.values), dim=-1)
    q, k = (_normalise(x.unflatten(-1, (shape.num_key_heads, shape.key_dim))) for x in (q, k))
    v = v.unflatten(-1, (shape.num_value_heads, shape.value_dim))
    g = -A_log.double().exp() * F.softplus(a.double() + dt_bias.double())
    return Tokens(q * shape.key_dim**-0.5, k, v, g, b.double().sigmoid())


def advance(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run tokens `[R, T, ...]` through states `[R, HV, V, K]`; return o `[R, T, HV, V]` and the states after it.

    With G the sums of g within a chunk, T = (I + tril(diag(beta) (k k^T * exp(G_i - G_j)), -1))^-1 turns the chunk
    into one step: u = T beta (v - exp(G) k h^T), o = exp(G) q h^T + tril(q k^T * exp(G_i - G_j)) u.
    """
    length = tokens.v.shape[1]
    chunk = min(CHUNK, length)
    num_chunks = -(-length // chunk)

    def blocks(x: Tensor) -> Tensor:
        """Return `[R, heads, chunks, C, ...]`; tokens that pad the last chunk are zero and change nothing."""
        padding = [0, 0] * (x.ndim - 2) + [0, num_chunks * chunk - length]
        padded: Tensor = F.pad(x, padding)
        return padded.reshape(len(x), num_chunks, chunk, *x.shape[2:]).movedim(3, 1)

    group = tokens.v.shape[2] // tokens.k.shape[2]
    q, k = (blocks(x).repeat_interleave(group, dim=1) for x in (tokens.q, tokens.k))
    v, beta = blocks(tokens.v), blocks(tokens.beta)[..., None]
    total = blocks(tokens.g).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
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


def _normalise(x: Tensor) -> Tensor:
    norm = torch.sqrt(x.square().sum(-1, keepdim=True) + EPS)
    return x / norm
