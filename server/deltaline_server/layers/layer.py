"""The layer: what a span is made of.

Layers compute on packed tokens; rows and lines are passed to the kernels. They follow the checkpoint's model in its
dtypes: norms in fp32 and rounded once, residuals in the dtype that the config asks for. They know nothing of sequences,
batching or files.

Everywhere `adapters` are the slots of a layer's projections, none on a server without adapters, and `tiles` the tokens
of a batch that have adapters, None where none has.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from deltaline_kernels import AdapterTiles, Rows


class Layer(Protocol):
    """What a span is made of."""

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`.

        state: what the pool keeps for a layer of this kind, a LayerState or a KvState.
        """
