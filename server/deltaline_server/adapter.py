"""An adapter as it is served: low-rank factors for each module of the served layers, in host memory.

Values. Knows neither files (adapter_file.py) nor names and slots (adapter_registry.py, adapter_slots.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deltaline_server.modules import Packed


@dataclass(frozen=True)
class AdapterWeights:
    """What an adapter adds to one module W `[out, in]` of a served projection: y += scale * B (A x).

    With `factor` (DoRA) it is y = factor * (W x + scale * B (A x)) instead, row by row.

    layer: as in the checkpoint. packed: the served projection; the module is its rows start .. start + out - 1.
    a `[R, in]` and b `[out, R]` have the model's dtype, b's rows in the order of the projection's; of a rank's share
    they have its columns and its rows. scale: rounded to fp32. factor `[out]` fp32, or None.
    """

    layer: int
    packed: Packed
    start: int
    a: Tensor
    b: Tensor
    scale: float
    factor: Tensor | None

    @property
    def rank(self) -> int:
        """R, from 1."""
        return self.a.shape[0]


@dataclass(frozen=True)
class Adapter:
    """An adapter. Immutable; all its tensors are parts of `memory` (uint8), from multiples of ALIGNMENT bytes.

    content_hash: SHA-256 over what it does to the whole model: equal on every server, whatever it serves, for equal
    factors and scales (adapter_file.py). rank: its largest. weights: by layer, and by place in the layer.
    num_elsewhere: modules that it changes and that are not served here.
    """

    content_hash: bytes
    rank: int
    weights: tuple[AdapterWeights, ...]
    num_elsewhere: int
    memory: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self.memory.numel()
