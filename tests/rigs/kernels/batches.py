"""Random batches for the kernel tests. Whatever no row may read is NaN: line 0, spare lines, tokens of skipped rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from rigs.kernels.paths import InterpretedPath, Path
from torch import Tensor

from deltaline_kernels import Rows, gated_delta, gated_delta_reference
from deltaline_kernels.device.delta_rule.inputs import DeltaHeads, DeltaInputs
from deltaline_kernels.rows import StateLines


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


class Recurrent:
    """A batch of a recurrence; what a test does with it is the same for all of them."""

    PACKED: ClassVar[tuple[str, ...]]  # names of the tensors of tokens
    layer: Any
    rows: Rows
    state: Tensor
    drafts: Tensor

    def launch(self, lines: StateLines, rows: Rows, o: Tensor) -> None:
        """Launch the Triton kernels for the batch's tokens, with lines, rows and outputs of one's own."""
        raise NotImplementedError

    def run_public(self) -> Tensor:
        raise NotImplementedError

    def run_reference(self) -> Tensor:
        raise NotImplementedError

    def run(self, path: Path) -> Tensor:
        if not isinstance(path, InterpretedPath):
            return self.run_public()
        tokens = getattr(self, self.PACKED[0])
        o = torch.empty(len(tokens), *self.state.shape[1:-1], dtype=tokens.dtype)
        self.launch(StateLines(self.state, self.drafts), self.rows, o)
        return o

    def clone(self) -> Self:
        """Return the batch with its own copies of what an operation mutates."""
        return self.replaced(state=self.state.clone(), drafts=self.drafts.clone())

    def replaced(self, **changes: Any) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]

    def take(self, begin: int, end: int, *rows: Row) -> Self:
        """Return the tokens begin..end, as one row unless told which; it shares the lines."""
        plan = plan_rows(rows or [Row(end - begin)], self.rows.max_short, self.state.device.type)
        return self.replaced(rows=plan, **{name: getattr(self, name)[begin:end] for name in self.PACKED})

    def run_part(self, path: Path, begin: int, end: int, *rows: Row) -> Tensor:
        return self.take(begin, end, *rows).run(path)


@dataclass(frozen=True)
class Batch(Recurrent):
    """Of the gated delta rule, and of the convolution before it."""

    PACKED = ("qkv", "a", "b")

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
    eps: float = 1e-6

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.qkv, self.a, self.b, self.A_log, self.dt_bias

    def clone(self) -> Batch:
        return replace(super().clone(), lines=self.lines.clone())

    def launch(self, lines: StateLines, rows: Rows, o: Tensor) -> None:
        from deltaline_kernels.gated_delta.launch import gated_delta_triton

        layer = self.layer
        heads = DeltaHeads(layer.H, layer.HV, layer.K, layer.V, layer.K**-0.5, self.eps)
        q, k, v = heads.split(self.qkv)
        inputs = DeltaInputs(q, k, v, self.a, self.b, self.A_log, self.dt_bias, heads, self.normalize)
        gated_delta_triton(inputs, lines, rows, o)

    def run_public(self) -> Tensor:
        return self._run(gated_delta)

    def run_reference(self) -> Tensor:
        return self._run(gated_delta_reference)

    def _run(self, operation: Callable[..., Tensor]) -> Tensor:
        lines = (self.state, self.drafts, self.rows)
        return operation(*self.inputs, *lines, num_key_heads=self.layer.H, eps=self.eps, normalize=self.normalize)

    def with_raw_gates(self) -> Batch:
        """Return the batch with log decays for a and strengths of up to 2 for b."""
        return replace(self, a=-self.a.abs(), b=2 * self.b.sigmoid(), A_log=None, dt_bias=None)

    def without_norms(self) -> Batch:
        """Return the batch with q and k of about unit length, as they come."""
        qkv = self.qkv.clone()
        keys = 2 * self.layer.H * self.layer.K
        qkv[:, :keys] /= self.layer.K**0.5
        return replace(self, qkv=qkv, normalize=False)

    def with_queries(self, *sizes: float) -> Batch:
        """Return the batch with queries of these sizes in turns, and an eps that tells in the norms of small ones."""
        queries = self.layer.H * self.layer.K
        qkv = self.qkv.clone()
        for i, size in enumerate(sizes):
            qkv[i :: len(sizes), :queries] *= size
        return replace(self, qkv=qkv, eps=1e-2)


def plan_rows(
    rows: Sequence[Row], max_short: int, device: str, waypoints: Sequence[tuple[int, int, int]] | None = None
) -> Rows:
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
        waypoints=waypoints,
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
