"""A dense MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows, silu_and_mul
from deltaline_server.checkpoints.activation import Activation
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Packed
from deltaline_server.layers.projection import load_projection, scaled


class Mlp:
    """An MLP. Ranks share its inner channels."""

    def __init__(
        self,
        reader: LayerReader,
        adapters: Mapping[Packed, LoraWeights],
        *,
        activation: Activation = Activation.SILU,
        has_bias: bool,
        scales: Sequence[float] = (1.0, 1.0),
        limit: float = 0.0,
    ) -> None:
        """Load it. The rows of gate_up are gate | up, or up alone. scales: of gates, and of the output. limit: of gates
        and what they multiply, with silu, 0 for none."""
        self._activation = activation
        self._gate_scale, self._scale = scales
        self._limit = limit
        self.gate_up = load_projection(reader, Packed.GATE_UP, adapters, has_bias=has_bias)
        self.down = load_projection(reader, Packed.DOWN, adapters, has_bias=has_bias)

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; it has no state."""
        inner = self.gate_up(hidden, tiles)
        if self._activation is Activation.RELU2:
            return self.down(F.relu(inner).square(), tiles)
        if self._gate_scale != 1.0:
            inner.chunk(2, dim=-1)[0].mul_(self._gate_scale)
        if self._activation is Activation.GELU:
            gate, up = inner.chunk(2, dim=-1)
            return scaled(self.down(F.gelu(gate).mul_(up), tiles), self._scale)
        return scaled(self.down(silu_and_mul(inner, self._limit), tiles), self._scale)
