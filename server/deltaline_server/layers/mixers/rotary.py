"""The table of rotations of positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deltaline_server.layers.rope_scaling import LinearScaling, RopeScaling, YarnScaling
from deltaline_server.layers.shapes import PagedShape


def rotary_table(shape: PagedShape) -> Tensor:
    """Return what each position is rotated by, fp32 `[max_positions, R]`: cos of R/2 angles | sin of R/2 angles.

    As transformers computes them (compute_default_rope_parameters, modeling_rope_utils), whose wavelengths are
    theta ** (2 i / R) before they are scaled. Where nothing is rotated, two channels are by an angle of 0.
    """
    if shape.rotary_dim == 0:
        return torch.tensor([[1.0, 0.0]]).repeat(shape.max_positions, 1)
    exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32) / shape.rotary_dim
    frequencies, scaling = 1.0 / shape.rope_theta**exponents, shape.rope_scaling
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling, shape.rope_theta)
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float32), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return table * scaling.attention_factor if isinstance(scaling, YarnScaling) else table


def _scaled(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """What becomes of frequencies `[R / 2]`, whose wavelengths have the base theta (of YaRN, above 1)."""
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnScaling):
        divided = _ramp(scaling, len(frequencies), theta)
        return frequencies * (1 - divided) + frequencies / scaling.factor * divided
    turns = scaling.first_positions * frequencies / (2 * math.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _ramp(scaling: YarnScaling, pairs: int, theta: float) -> Tensor:
    """How much of each pair's frequency YaRN divides: 0 up to the channel that turns `fast` times, 1 from the one on
    that turns `slow` times."""
    channels = 2 * pairs
    first, last = (
        channels * math.log(scaling.first_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.fast, scaling.slow)
    )
    if scaling.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    length = last - first or 0.001
    return ((torch.arange(pairs, dtype=torch.float32) - first) / length).clamp(0, 1)
