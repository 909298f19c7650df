"""The layers: a Gated DeltaNet mixer, and the decoder block around it.

Computes on packed tokens; rows and lines are passed to the kernels. Follows the checkpoint's model in its dtypes: norms
in fp32 and rounded once, residuals in the model's dtype. Knows nothing of sequences, batching or files.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels import Rows, causal_conv1d, gated_delta, gated_rms_norm
from deltaline_server.model_config import GatedDeltaNetShape
from deltaline_server.state_pool import LayerState
from deltaline_server.weights import BlockWeights, MixerWeights


class Layer(Protocol):
    """What a span is made of."""

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""


class GatedDeltaNet:
    """A Gated DeltaNet mixer: project, convolve, run the gated delta rule, norm and gate, project back.

    With shared heads its output is one rank's summand.
    """

    def __init__(self, shape: GatedDeltaNetShape, weights: MixerWeights, eps: float) -> None:
        self._shape = shape
        self._weights = weights
        self._eps = eps
        heads = shape.num_value_heads
        self._sections = (shape.conv_channels, shape.values, heads, heads)

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        shape, weights = self._shape, self._weights
        qkv, z, b, a = F.linear(hidden, weights.in_proj).split(self._sections, dim=-1)
        qkv = causal_conv1d(qkv, weights.conv, None, state.conv, rows)
        o = gated_delta(
            qkv,
            a,
            b,
            weights.A_log,
            weights.dt_bias,
            state.recurrent,
            state.drafts,
            rows,
            num_key_heads=shape.num_key_heads,
        )
        z = z.unflatten(-1, (shape.num_value_heads, shape.value_dim))
        return F.linear(gated_rms_norm(o, z, weights.norm, self._eps), weights.out_proj)


class Block:
    """A decoder layer: norm, mixer, residual, norm, SwiGLU MLP, residual."""

    def __init__(self, mixer: GatedDeltaNet, weights: BlockWeights, eps: float) -> None:
        self._mixer = mixer
        self._weights = weights
        self._eps = eps

    def forward(self, hidden: Tensor, rows: Rows, state: LayerState) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        weights = self._weights
        hidden = hidden + self._mixer.forward(rms_norm(hidden, weights.input_norm, self._eps), rows, state)
        gate, up = F.linear(rms_norm(hidden, weights.post_norm, self._eps), weights.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, weights.down)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row of x `[T, D]` in fp32 and scale it by `weight` `[D]` fp32 (1 + w); rounded to x.dtype once."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
