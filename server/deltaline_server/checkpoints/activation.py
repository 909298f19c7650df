"""What an MLP does between its projections."""

from __future__ import annotations

from enum import StrEnum


class Activation(StrEnum):
    """What an MLP does with its inner channels: multiplies half of them with a function of the other half, its gate, or
    computes them alone."""

    SILU = "silu"
    """silu(gate) * up"""
    GELU = "gelu"
    """gelu(gate) * up"""
    RELU2 = "relu2"
    """relu(up) ** 2"""

    @property
    def is_gated(self) -> bool:
        return self is not Activation.RELU2
