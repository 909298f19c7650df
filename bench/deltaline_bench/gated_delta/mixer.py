"""The decode mixer between its two projections: convolution, gated delta rule and gated norm in one call.

Its inputs are slices of one projection's output. Knows no figures and no bars.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_bench.case import Side
from deltaline_bench.gated_delta.batch import Batch
from deltaline_bench.gated_delta.sides import rows_of
from deltaline_kernels import causal_conv1d, gated_delta, gated_rms_norm

WIDTH = 4
EPS = 1e-6


class Mixer:
    """The mixer's inputs beside those of `batch`, whose qkv becomes what the convolution gives.

    Args:
        batch: DECODE rows. Mutated: its qkv.
    """

    def __init__(self, batch: Batch) -> None:
        shape = batch.shape
        self.batch = batch
        dtype, heads = shape.dtype, shape.num_value_heads
        # x | z | a | b
        self.projected = batch.normal(shape.num_rows, shape.channels + shape.values + 2 * heads).to(dtype)
        self.projected[:, -2 * heads :] = torch.cat((batch.a, batch.b), dim=1)
        self.weight = (batch.normal(WIDTH, shape.channels) * 0.5).to(dtype)
        self.norm = batch.normal(shape.value_dim) * 0.1 + 1
        size = (batch.num_lines, WIDTH - 1, shape.channels)
        self.first_lines = torch.full(size, torch.nan, dtype=dtype, device=batch.device)
        self.first_lines[batch.line_index] = batch.normal(shape.num_rows, *size[1:]).to(dtype)
        full = torch.cat((self.first_lines[batch.line_index], self.projected[:, None, : shape.channels]), dim=1)
        batch.qkv = F.silu((full.double() * self.weight.double()).sum(1)).to(dtype)
        self._line = full[:, 1:].float()

    def num_bytes(self) -> int:
        """Count what `Shape.num_bytes` counts with z, the lines read and written and the weights; nothing between."""
        shape, norm_bytes = self.batch.shape, self.norm.numel() * self.norm.element_size()
        lines = shape.num_rows * 2 * (WIDTH - 1) * shape.channels
        vectors = shape.num_rows * shape.values + lines + WIDTH * shape.channels
        return shape.num_bytes() + vectors * shape.dtype.itemsize + norm_bytes

    def num_flops(self) -> int:
        """Count the taps and the rule; the norm is small."""
        shape = self.batch.shape
        return shape.num_flops() + 2 * WIDTH * shape.num_rows * shape.channels

    def expected(self) -> dict[str, Tensor]:
        """Return the truth in fp32, rounded to the tokens' dtype where the parts hand over.

        o, state: of the rule alone. y: `[N, HV*V]`. line: `[N, W-1, D]`.
        """
        found = self.batch.expected()
        shape = self.batch.shape
        o = found["o"].to(shape.dtype).double()
        normal = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS) * self.norm.double()
        y = normal.flatten(1) * F.silu(self._z().double()).flatten(1)
        return found | {"y": y.float(), "line": self._line}

    def _z(self) -> Tensor:
        shape = self.batch.shape
        z = self.projected[:, shape.channels : shape.channels + shape.values]
        return z.view(shape.num_rows, shape.num_value_heads, shape.value_dim)

    def side(self) -> Side:
        """Make our side."""
        batch, shape = self.batch, self.batch.shape
        heads = shape.num_value_heads
        rows, state, drafts = rows_of(batch), batch.new_state(), batch.new_drafts()
        lines = self.first_lines.clone()
        x, z = self.projected[:, : shape.channels], self._z()
        a, b = self.projected[:, -2 * heads : -heads], self.projected[:, -heads:]

        def call() -> Any:
            qkv = causal_conv1d(x, self.weight, None, lines, rows)
            o = gated_delta(
                qkv, a, b, batch.A_log, batch.dt_bias, state, drafts, rows, num_key_heads=shape.num_key_heads
            )
            return gated_rms_norm(o, z, self.norm, EPS)

        def reset() -> None:
            batch.reset_state(state)
            lines.copy_(self.first_lines)

        return Side(
            call,
            lambda y: {"y": y, "state": state[batch.line_index], "line": lines[batch.line_index]},
            reset,
        )
