"""Random batches for the kernel tests. Whatever no row may read is NaN: line 0, spare lines, tokens of skipped rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rigs.kernels.paths import Path
from torch import Tensor

from deltaline_kernels import Rows, gated_delta_reference


@dataclass(frozen=True)
class Layer:
    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 8
    W: int = 4
    M: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V

    @property
    def record(self) -> int:
        return self.H * self.K + self.HV * self.V + self.HV


@dataclass(frozen=True)
class Row:
    """One row; its lines are 2i+1 (read and written) unless told: `to` "other" is line 2i+2, or -1, or 0."""

    length: int
    verify: bool = False
    replayed: int = 0
    half: int = 0
    fresh: bool = False
    to: str = "same"
    skipped: bool = False


@dataclass(frozen=True)
class Batch:
    layer: Layer
    rows: Rows
    qkv: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    lines: Tensor
    state: Tensor
    drafts: Tensor
    weight: Tensor
    bias: Tensor
    normalize: bool = True

    def clone(self) -> Batch:
        """Return the batch with its own copies of what an operation mutates."""
        return replace(self, lines=self.lines.clone(), state=self.state.clone(), drafts=self.drafts.clone())

    def run_delta(self, path: Path) -> Tensor:
        return path.delta(
            self.qkv,
            self.a,
            self.b,
            self.A_log,
            self.dt_bias,
            self.state,
            self.drafts,
            self.rows,
            self.layer.H,
            normalize=self.normalize,
        )

    def run_delta_reference(self) -> Tensor:
        return gated_delta_reference(
            self.qkv,
            self.a,
            self.b,
            self.A_log,
            self.dt_bias,
            self.state,
            self.drafts,
            self.rows,
            num_key_heads=self.layer.H,
            normalize=self.normalize,
        )

    def with_raw_gates(self) -> Batch:
        """Return the batch with log decays for a and strengths of up to 2 for b."""
        return replace(self, a=-self.a.abs(), b=2 * self.b.sigmoid(), A_log=None, dt_bias=None)

    def without_norms(self) -> Batch:
        """Return the batch with q and k of about unit length, as they come."""
        qkv = self.qkv.clone()
        keys = 2 * self.layer.H * self.layer.K
        qkv[:, :keys] /= self.layer.K**0.5
        return replace(self, qkv=qkv, normalize=False)


def plan_rows(rows: Sequence[Row], max_short: int, device: str) -> Rows:
    """Give the rows their lines."""
    reads, writes = [], []
    for i, row in enumerate(rows):
        line = 2 * i + 1
        reads.append(-1 if row.skipped else 0 if row.fresh else line)
        targets = {"same": line, "other": line + 1, "nowhere": -1, "null": 0}
        writes.append(-1 if row.skipped else targets[row.to])
    return Rows.build(
        [row.length for row in rows],
        reads,
        writes,
        [0 if row.verify else row.length for row in rows],
        [row.replayed for row in rows],
        [row.half for row in rows],
        max_short=max_short,
        device=device,
    )


def poison(rows: Sequence[Row], packed: Sequence[Tensor], lined: Sequence[Tensor]) -> None:
    """Fill with NaN the packed tokens of skipped rows and, in what has lines, those that no row may read."""
    start = 0
    for i, row in enumerate(rows):
        if row.skipped:
            for tokens in packed:
                tokens[start : start + row.length] = torch.nan
        start += row.length
        for lines in lined:
            if row.skipped or row.fresh:
                lines[2 * i + 1] = torch.nan
            lines[2 * i + 2] = torch.nan
    for lines in lined:
        lines[0] = torch.nan


def make_batch(
    rows: Sequence[Row],
    path: Path,
    layer: Layer | None = None,
    *,
    max_short: int | None = None,
    seed: int = 0,
    state_dtype: torch.dtype = torch.float32,
    padding: int = 3,
) -> Batch:
    """Make random inputs for `rows` on the path's device; the tokens of qkv lie `padding` values apart."""
    layer = layer or Layer()
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    plan = plan_rows(rows, max_short or layer.M, path.device)
    num_tokens, num_lines = sum(row.length for row in rows), 2 * len(rows) + 2
    wide = normal(num_tokens, layer.channels + padding)
    a, b = normal(num_tokens, layer.HV), normal(num_tokens, layer.HV)
    lines = normal(num_lines, layer.W - 1 + layer.M, layer.channels)
    state = normal(num_lines, layer.HV, layer.V, layer.K)
    keys = torch.nn.functional.normalize(normal(num_lines, 2, layer.M, layer.H, layer.K), dim=-1).flatten(3)
    updates = normal(num_lines, 2, layer.M, layer.HV * layer.V)
    gates = -normal(num_lines, 2, layer.M, layer.HV).abs()
    drafts = torch.cat((keys, updates, gates), dim=-1)
    poison(rows, (wide, a, b), (lines, state, drafts))
    to = path.device
    return Batch(
        layer,
        plan,
        wide.to(to, path.dtype)[:, : layer.channels],
        a.to(to, path.dtype),
        b.to(to, path.dtype),
        normal(layer.HV).to(to),
        normal(layer.HV).to(to),
        lines.to(to, path.dtype),
        state.to(to, state_dtype),
        drafts.to(to),
        normal(layer.W, layer.channels).to(to),
        normal(layer.channels).to(to),
    )
