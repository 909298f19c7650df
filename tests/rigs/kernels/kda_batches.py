"""Random batches for the tests of KDA. Whatever no row may read is NaN, as in `batches`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from rigs.kernels.batches import Recurrent, Row, plan_rows, poison
from rigs.kernels.paths import Path
from torch import Tensor

from deltaline_kernels import Rows, kda, kda_reference
from deltaline_kernels.device.delta_rule.inputs import DeltaHeads, DeltaInputs
from deltaline_kernels.rows import StateLines


@dataclass(frozen=True)
class KdaLayer:
    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 8
    M: int = 4
    lower_bound: float | None = None

    @property
    def heads(self) -> DeltaHeads:
        return DeltaHeads(self.H, self.HV, self.K, self.V, self.K**-0.5, 1e-6, keyed=True)


@dataclass(frozen=True)
class KdaBatch(Recurrent):
    PACKED = ("qkv", "a", "b")

    layer: KdaLayer
    rows: Rows
    qkv: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    state: Tensor
    drafts: Tensor
    normalize: bool = True

    @property
    def lower_bound(self) -> float | None:
        return None if self.A_log is None else self.layer.lower_bound

    def launch(self, lines: StateLines, rows: Rows, o: Tensor) -> None:
        from deltaline_kernels.kda.launch import kda_triton

        heads = self.layer.heads
        q, k, v = heads.split(self.qkv)
        weights, bound = (self.A_log, self.dt_bias), self.lower_bound
        inputs = DeltaInputs(q, k, v, self.a, self.b, *weights, heads, self.normalize, bound)
        kda_triton(inputs, lines, rows, o)

    def run_public(self) -> Tensor:
        return self._run(kda)

    def run_reference(self) -> Tensor:
        return self._run(kda_reference)

    def _run(self, operation: Callable[..., Tensor]) -> Tensor:
        gates, lines = (self.a, self.b, self.A_log, self.dt_bias), (self.state, self.drafts, self.rows)
        told = {"num_key_heads": self.layer.H, "normalize": self.normalize, "lower_bound": self.lower_bound}
        return operation(self.qkv, *gates, *lines, **told)

    def with_raw_gates(self) -> KdaBatch:
        """Return the batch with log decays for a and strengths of up to 2 for b."""
        return replace(self, a=-self.a.abs(), b=2 * self.b.sigmoid(), A_log=None, dt_bias=None)

    def without_norms(self) -> KdaBatch:
        """Return the batch with q and k of about unit length, as they come."""
        qkv = self.qkv.clone()
        qkv[:, : 2 * self.layer.H * self.layer.K] /= self.layer.K**0.5
        return replace(self, qkv=qkv, normalize=False)


def make_kda_batch(
    rows: Sequence[Row],
    path: Path,
    layer: KdaLayer | None = None,
    *,
    max_short: int | None = None,
    seed: int = 0,
    state_dtype: torch.dtype = torch.float32,
    padding: int = 3,
) -> KdaBatch:
    """Make random inputs for `rows` on the path's device; the tokens of qkv lie `padding` values apart."""
    layer = layer or KdaLayer()
    heads, generator = layer.heads, torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    plan = plan_rows(rows, max_short or layer.M, path.device)
    num_tokens, num_lines = sum(row.length for row in rows), 2 * len(rows) + 2
    wide = normal(num_tokens, heads.channels + padding)
    a, b = normal(num_tokens, heads.num_decays), normal(num_tokens, layer.HV)
    state = normal(num_lines, layer.HV, layer.V, layer.K)
    keys = torch.nn.functional.normalize(normal(num_lines, 2, layer.M, layer.H, layer.K), dim=-1).flatten(3)
    updates = normal(num_lines, 2, layer.M, heads.value_channels)
    gates = -normal(num_lines, 2, layer.M, heads.num_decays).abs()
    drafts = torch.cat((keys, updates, gates), dim=-1)
    poison(rows, (wide, a, b), (state, drafts))
    to = path.device
    return KdaBatch(
        layer,
        plan,
        wide.to(to, path.dtype)[:, : heads.channels],
        a.to(to, path.dtype),
        b.to(to, path.dtype),
        normal(layer.HV).to(to),
        normal(heads.num_decays).to(to),
        state.to(to, state_dtype),
        drafts.to(to),
    )
