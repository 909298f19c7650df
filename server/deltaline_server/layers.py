"""The layers: a Gated DeltaNet mixer, and the decoder block around it.

Computes on packed tokens; rows and lines are passed to the kernels. Follows the checkpoint's model in its dtypes: norms
in fp32 and rounded once, residuals in the model's dtype. Knows nothing of sequences, batching or files.

Everywhere `adapters` are the slots of a layer's projections, none on a server without adapters, and `tiles` the tokens
of a batch that have adapters, None where none has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows, causal_conv1d, gated_delta, gated_rms_norm
from deltaline_server.model_config import GatedDeltaNetShape
from deltaline_server.modules import Packed
from deltaline_server.projection import Projection
from deltaline_server.state_pool import LayerState
from deltaline_server.weights import BlockWeights, MixerWeights


class Layer(Protocol):
    """What a span is made of."""

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""


class GatedDeltaNet:
    """A Gated DeltaNet mixer: project, convolve, run the gated delta rule, norm and gate, project back.

    With shared heads its output is one rank's summand.
    """

    def __init__(
        self, shape: GatedDeltaNetShape, weights: MixerWeights, eps: float, adapters: Mapping[Packed, LoraWeights]
    ) -> None:
        self._shape = shape
        self._in_proj = Projection(weights.in_proj, adapters.get(Packed.IN_PROJ))
        self._out_proj = Projection(weights.out_proj, adapters.get(Packed.OUT_PROJ))
        self._conv, self._A_log, self._dt_bias = weights.conv, weights.A_log, weights.dt_bias
        self._norm, self._eps = weights.norm, eps
        heads = shape.num_value_heads
        self._sections = (shape.conv_channels, shape.values, heads, heads)

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        shape = self._shape
        qkv, z, b, a = self._in_proj(hidden, tiles).split(self._sections, dim=-1)
        qkv = causal_conv1d(qkv, self._conv, None, state.conv, rows)
        o = gated_delta(
            qkv,
            a,
            b,
            self._A_log,
            self._dt_bias,
            state.recurrent,
            state.drafts,
            rows,
            num_key_heads=shape.num_key_heads,
        )
        z = z.unflatten(-1, (shape.num_value_heads, shape.value_dim))
        return self._out_proj(gated_rms_norm(o, z, self._norm, self._eps), tiles)


class Block:
    """A decoder layer: norm, mixer, residual, norm, SwiGLU MLP, residual."""

    def __init__(
        self, mixer: GatedDeltaNet, weights: BlockWeights, eps: float, adapters: Mapping[Packed, LoraWeights]
    ) -> None:
        self._mixer = mixer
        self._input_norm, self._post_norm, self._eps = weights.input_norm, weights.post_norm, eps
        self._gate_up = Projection(weights.gate_up, adapters.get(Packed.GATE_UP))
        self._down = Projection(weights.down, adapters.get(Packed.DOWN))

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        hidden = hidden + self._mixer.forward(rms_norm(hidden, self._input_norm, self._eps), rows, state, tiles)
        gate, up = self._gate_up(rms_norm(hidden, self._post_norm, self._eps), tiles).chunk(2, dim=-1)
        return hidden + self._down(F.silu(gate) * up, tiles)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row of x `[T, D]` in fp32 and scale it by `weight` `[D]` fp32 (1 + w); rounded to x.dtype once."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
