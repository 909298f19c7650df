"""The decode mixer between its two projections: convolution, gated delta rule and gated norm in one call.

Its inputs are slices of one projection's output. Knows no figures and no bars.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_bench.case import Side
from deltaline_bench.gated_delta.batch import Batch
from deltaline_bench.gated_delta.shape import Shape
from deltaline_bench.recurrence.sides import on_lines
from deltaline_kernels import Rows, causal_conv1d, gated_delta, gated_rms_norm

WIDTH = 4
EPS = 1e-6


class Mixer(Batch):
    """DECODE rows whose qkv is what the convolution gives, and the mixer's inputs.

    Args:
        projected: x | z | a | b, `[N, D + HV*V + 2 HV]`.
    """

    def __init__(self, shape: Shape, seed_name: str, device: torch.device) -> None:
        super().__init__(shape, seed_name, device)
        dtype, heads = shape.dtype, shape.num_value_heads
        _, a, b = self.packed
        self.projected = self.normal(shape.num_rows, shape.channels + shape.values + 2 * heads, dtype=dtype)
        self.projected[:, -2 * heads :] = torch.cat((a, b), dim=1)
        self.weight = (self.normal(WIDTH, shape.channels) * 0.5).to(dtype)
        self.norm = self.normal(shape.value_dim) * 0.1 + 1
        size = (self.num_lines, WIDTH - 1, shape.channels)
        self.first_lines = torch.full(size, torch.nan, dtype=dtype, device=device)
        self.first_lines[self.line_index] = self.normal(shape.num_rows, *size[1:], dtype=dtype)
        full = torch.cat((self.first_lines[self.line_index], self.projected[:, None, : shape.channels]), dim=1)
        self.packed = (F.silu((full.double() * self.weight.double()).sum(1)).to(dtype), a, b)
        self._line = full[:, 1:].float()

    def num_bytes(self) -> int:
        """Count what the rule needs with z, the lines read and written and the weights; nothing between."""
        shape, norm_bytes = self.shape, self.norm.numel() * self.norm.element_size()
        lines = shape.num_rows * 2 * (WIDTH - 1) * shape.channels
        vectors = shape.num_rows * shape.values + lines + WIDTH * shape.channels
        return super().num_bytes() + vectors * shape.dtype.itemsize + norm_bytes

    def num_flops(self) -> int:
        """Count the taps and the rule; the norm is small."""
        return super().num_flops() + 2 * WIDTH * self.shape.num_rows * self.shape.channels

    def expected(self) -> dict[str, Tensor]:
        """Return the truth in fp32, rounded to the tokens' dtype where the parts hand over.

        o, state: of the rule alone. y: `[N, HV*V]`. line: `[N, W-1, D]`.
        """
        found = super().expected()
        o = found["o"].to(self.shape.dtype).double()
        normal = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS) * self.norm.double()
        y = normal.flatten(1) * F.silu(self._z().double()).flatten(1)
        return found | {"y": y.float(), "line": self._line}

    def _z(self) -> Tensor:
        shape = self.shape
        z = self.projected[:, shape.channels : shape.channels + shape.values]
        return z.view(shape.num_rows, shape.num_value_heads, shape.value_dim)

    def side(self) -> Side:
        """Make our side."""
        shape, heads = self.shape, self.shape.num_value_heads
        lines = self.first_lines.clone()
        x, z = self.projected[:, : shape.channels], self._z()
        a, b = self.projected[:, -2 * heads : -heads], self.projected[:, -heads:]

        def mix(state: Tensor, drafts: Tensor, rows: Rows) -> Tensor:
            qkv = causal_conv1d(x, self.weight, None, lines, rows)
            keys = shape.num_key_heads
            o = gated_delta(qkv, a, b, self.A_log, self.dt_bias, state, drafts, rows, num_key_heads=keys)
            return gated_rms_norm(o, z, self.norm, EPS)

        def reset() -> None:
            rule.reset()
            lines.copy_(self.first_lines)

        rule = on_lines(self, mix)
        return replace(
            rule,
            outputs=lambda y: {"y": y, "state": rule.outputs(y)["state"], "line": lines[self.line_index]},
            reset=reset,
        )
