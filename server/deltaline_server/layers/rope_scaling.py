"""What configs make of the frequencies of rotary embeddings, for longer contexts than a model was first trained for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies are divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequencies that turn less than `low` times in the first context are divided by `factor`, those that turn more
    than `high` times stay, and those between are blended (Llama 3.1)."""

    factor: float
    low: float
    high: float
    first_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """Channels that turn more than `fast` times in the first context keep their frequencies, those that turn less than
    `slow` times have them divided by `factor`, and a ramp over the channels is between (YaRN, arXiv:2309.00071).

    truncates: whether the ramp begins and ends at whole channels. attention_factor: what cos and sin are multiplied by.
    """

    factor: float
    fast: float
    slow: float
    first_positions: int
    truncates: bool
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
