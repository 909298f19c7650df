"""The streams, weights and truth of one case of hyper-connections. Knows no implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_bench import batch

EPS, MULTIPLIER, REPEAT = 1e-6, 2.0, 20
# What of a call's results each work has.
POST, PRE, FUSED, HEAD = "post", "pre", "post, pre and norm", "head"


@dataclass(frozen=True)
class Shape(batch.Shape):
    """`work` on `num_tokens` tokens with `streams` streams of `hidden` channels."""

    work: str
    num_tokens: int
    hidden: int
    streams: int = 4
    dtype: torch.dtype = torch.bfloat16

    @property
    def outs(self) -> int:
        """Count the products of a token: of a head fewer."""
        return self.streams if self.work == HEAD else self.streams * (2 + self.streams)

    def words(self) -> dict[str, str]:
        return {"residual": f"[{self.num_tokens}, {self.streams}, {self.hidden}]"}

    def num_bytes(self) -> int:
        """Count streams, inputs, gates and weights read once, and what is written once."""
        n, streams = self.num_tokens, self.streams
        row, gates = self.hidden * self.dtype.itemsize, 4 * n * streams * (1 + streams)
        weight = 4 * self.outs * streams * self.hidden
        return {
            POST: n * row * (1 + 2 * streams) + gates,
            PRE: n * row * (1 + streams) + gates + weight,
            FUSED: n * row * (2 + 2 * streams) + 2 * gates + weight + 4 * self.hidden,
            HEAD: n * row * (1 + streams) + weight,
        }[self.work]

    def num_flops(self) -> int:
        """Count a multiplication and an addition per product."""
        n, streams, hidden = self.num_tokens, self.streams, self.hidden
        post = 2 * n * streams * (streams + 1) * hidden
        pre = 2 * n * streams * hidden * (self.outs + 2)
        return {POST: post, PRE: pre, FUSED: post + pre, HEAD: pre}[self.work]


class Batch(batch.Batch[Shape]):
    """The streams of tokens, what a layer gives and the weights."""

    def __init__(self, shape: Shape, seed_name: str, device: torch.device) -> None:
        super().__init__(shape, seed_name, device)
        n, streams, hidden = shape.num_tokens, shape.streams, shape.hidden
        self.x = self.normal(n, hidden, dtype=shape.dtype)
        self.residual = self.normal(n, streams, hidden, dtype=shape.dtype)
        self.post = 2 * torch.sigmoid(self.normal(n, streams))
        self.comb = torch.softmax(self.normal(n, streams, streams), dim=-1)
        self.weight = self.normal(shape.outs, streams * hidden) * (streams * hidden) ** -0.5
        self.scale = self.normal(1 if shape.work == HEAD else 3)
        self.base = self.normal(shape.outs)
        self.norm = 1 + 0.1 * self.normal(hidden)

    def expected(self) -> dict[str, Tensor]:
        """Return what the work gives, computed in fp64 a block of tokens at a time."""
        parts = [self._expected(slice(i, i + 256)) for i in range(0, self.shape.num_tokens, 256)]
        return {name: torch.cat([part[name].float() for part in parts]) for name in parts[0]}

    def _expected(self, own: slice) -> dict[str, Tensor]:
        shape, streams = self.shape, self.residual[own].double()
        if shape.work in (POST, FUSED):
            mixed = torch.einsum("nji,njh->nih", self.comb[own].double(), streams)
            mixed += self.post[own].double()[:, :, None] * self.x[own].double()[:, None]
            if shape.work == POST:
                return {"residual": mixed}
            streams = mixed.to(shape.dtype).double()
        flat = streams.flatten(1)
        mixes = flat @ self.weight.double().T / (flat.square().mean(1, keepdim=True) + EPS).sqrt()
        if shape.work == HEAD:
            pre = torch.sigmoid(mixes * self.scale.double() + self.base.double()) + EPS
            return {"y": (pre[:, :, None] * streams).sum(1)}
        n, scale, base = shape.streams, self.scale.double(), self.base.double()
        pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + EPS
        post = torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n]) * MULTIPLIER
        comb = torch.softmax((mixes[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n)), dim=2) + EPS
        comb = comb / (comb.sum(1, keepdim=True) + EPS)
        for _ in range(REPEAT - 1):
            comb = comb / (comb.sum(2, keepdim=True) + EPS)
            comb = comb / (comb.sum(1, keepdim=True) + EPS)
        y = (pre[:, :, None] * streams).sum(1)
        if shape.work == PRE:
            return {"y": y, "post": post, "comb": comb}
        y = y / (y.square().mean(1, keepdim=True) + EPS).sqrt() * self.norm.double()
        return {"residual": mixed, "y": y, "post": post, "comb": comb}
