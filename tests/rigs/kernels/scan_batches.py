"""Random batches for the tests of the Mamba-1 recurrence. Whatever no row may read is NaN, as in `batches`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rigs.kernels.batches import Recurrent, Row, plan_rows, poison
from rigs.kernels.paths import Path
from torch import Tensor

from deltaline_kernels import Rows, mamba1, mamba1_reference
from deltaline_kernels.mamba1.inputs import ScanInputs, ScanSizes
from deltaline_kernels.rows import StateLines


@dataclass(frozen=True)
class ScanLayer:
    D: int = 10
    G: int = 1
    S: int = 16
    M: int = 4

    @property
    def record(self) -> int:
        return self.G * self.S + 2 * self.D


@dataclass(frozen=True)
class ScanBatch(Recurrent):
    PACKED = ("x", "dt", "BC", "z")

    layer: ScanLayer
    rows: Rows
    x: Tensor
    dt: Tensor
    BC: Tensor
    z: Tensor
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    state: Tensor
    drafts: Tensor
    gated: bool = True

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        z = self.z if self.gated else None
        return self.x, self.dt, self.BC, z, self.A_log, self.D, self.dt_bias

    def launch(self, lines: StateLines, rows: Rows, o: Tensor) -> None:
        from deltaline_kernels.mamba1.recurrent import mamba1_triton

        layer = self.layer
        mamba1_triton(ScanInputs(*self.inputs, ScanSizes(layer.G, layer.D, layer.S)), lines, rows, o)

    def run_public(self) -> Tensor:
        return self._run(mamba1)

    def run_reference(self) -> Tensor:
        return self._run(mamba1_reference)

    def _run(self, operation: Callable[..., Tensor]) -> Tensor:
        return operation(*self.inputs, self.state, self.drafts, self.rows, num_groups=self.layer.G)


def make_scan_batch(
    rows: Sequence[Row],
    path: Path,
    layer: ScanLayer | None = None,
    *,
    max_short: int | None = None,
    seed: int = 0,
    state_dtype: torch.dtype = torch.float32,
    padding: int = 3,
) -> ScanBatch:
    """Make random inputs for `rows` on the path's device; what tokens have lies `padding` values apart."""
    layer = layer or ScanLayer()
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    plan = plan_rows(rows, max_short or layer.M, path.device)
    num_tokens, num_lines = sum(row.length for row in rows), 2 * len(rows) + 2
    sizes = (layer.D, layer.D, 2 * layer.G * layer.S, layer.D)
    packed = [normal(num_tokens, size + padding) for size in sizes]
    # B and C of about unit length, so that outputs are as large as x.
    packed[2] /= layer.S**0.25
    state = normal(num_lines, layer.D, layer.S)
    keys = normal(num_lines, 2, layer.M, layer.G * layer.S) / layer.S**0.25
    updates = normal(num_lines, 2, layer.M, layer.D)
    steps = normal(num_lines, 2, layer.M, layer.D).abs()
    drafts = torch.cat((keys, updates, steps), dim=-1)
    poison(rows, packed, (state, drafts))
    to = path.device
    x, dt, BC, z = (wide.to(to, path.dtype)[:, :size] for wide, size in zip(packed, sizes, strict=True))
    return ScanBatch(
        layer,
        plan,
        x,
        dt,
        BC,
        z,
        normal(layer.D, layer.S).to(to),
        normal(layer.D).to(to),
        normal(layer.D).to(to),
        state.to(to, state_dtype),
        drafts.to(to),
    )
