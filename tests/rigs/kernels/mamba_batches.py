"""Random batches for the tests of the Mamba2 recurrence. Whatever no row may read is NaN, as in `batches`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rigs.kernels.batches import Recurrent, Row, plan_rows, poison
from rigs.kernels.paths import Path
from torch import Tensor

from deltaline_kernels import Rows, mamba2, mamba2_reference
from deltaline_kernels.mamba2.inputs import MambaHeads, MambaInputs
from deltaline_kernels.rows import StateLines


@dataclass(frozen=True)
class MambaLayer:
    H: int = 2
    G: int = 1
    P: int = 8
    S: int = 16
    M: int = 4
    dt_limit: tuple[float, float] = (0.0, math.inf)

    @property
    def channels(self) -> int:
        return self.H * self.P + 2 * self.G * self.S

    @property
    def record(self) -> int:
        return self.G * self.S + self.H * self.P + self.H


@dataclass(frozen=True)
class MambaBatch(Recurrent):
    PACKED = ("xBC", "dt")

    layer: MambaLayer
    rows: Rows
    xBC: Tensor
    dt: Tensor
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    state: Tensor
    drafts: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.xBC, self.dt, self.A_log, self.D, self.dt_bias

    def launch(self, lines: StateLines, rows: Rows, o: Tensor) -> None:
        from deltaline_kernels.mamba2.launch import mamba2_triton

        layer = self.layer
        heads = MambaHeads(layer.G, layer.H, layer.P, layer.S, layer.dt_limit)
        mamba2_triton(MambaInputs(*self.inputs, heads), lines, rows, o)

    def run_public(self) -> Tensor:
        return self._run(mamba2)

    def run_reference(self) -> Tensor:
        return self._run(mamba2_reference)

    def _run(self, operation: Callable[..., Tensor]) -> Tensor:
        layer, lines = self.layer, (self.state, self.drafts, self.rows)
        return operation(*self.inputs, *lines, num_groups=layer.G, dt_limit=layer.dt_limit)


def make_mamba_batch(
    rows: Sequence[Row],
    path: Path,
    layer: MambaLayer | None = None,
    *,
    max_short: int | None = None,
    seed: int = 0,
    state_dtype: torch.dtype = torch.float32,
    padding: int = 3,
) -> MambaBatch:
    """Make random inputs for `rows` on the path's device; the tokens of xBC lie `padding` values apart."""
    layer = layer or MambaLayer()
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    plan = plan_rows(rows, max_short or layer.M, path.device)
    num_tokens, num_lines = sum(row.length for row in rows), 2 * len(rows) + 2
    wide = normal(num_tokens, layer.channels + padding)
    # B and C of about unit length, so that outputs are as large as x.
    wide[:, layer.H * layer.P : layer.channels] /= layer.S**0.25
    dt = normal(num_tokens, layer.H)
    state = normal(num_lines, layer.H, layer.P, layer.S)
    keys = normal(num_lines, 2, layer.M, layer.G * layer.S) / layer.S**0.25
    updates = normal(num_lines, 2, layer.M, layer.H * layer.P)
    gates = -normal(num_lines, 2, layer.M, layer.H).abs()
    drafts = torch.cat((keys, updates, gates), dim=-1)
    poison(rows, (wide, dt), (state, drafts))
    to = path.device
    return MambaBatch(
        layer,
        plan,
        wide.to(to, path.dtype)[:, : layer.channels],
        dt.to(to, path.dtype),
        normal(layer.H).to(to),
        normal(layer.H).to(to),
        normal(layer.H).to(to),
        state.to(to, state_dtype),
        drafts.to(to),
    )
