"""Weights that are drawn: each value by the seed, its tensor's name and its place in it alone.

So they are the same on every device and rank, whatever part of a tensor is read, and in whatever order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import TensorInfo

ALGORITHM = "splitmix64"
"""How values are drawn; another name is another model."""
# Values of a tensor that are drawn at once: as many as a core's cache holds of them, or a device soon fills.
AT_ONCE = {"cpu": 1 << 16}
AT_ONCE_ON_DEVICE = 1 << 24
# Its increment and its factors, as int64.
_GOLDEN, _FIRST, _SECOND = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class RandomTensors:
    """Tensors drawn from a seed, a TensorSource.

    Linear weights keep the scale of their input, norms are near one, and gates forget over 10 to 1000 tokens.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int, device: torch.device) -> None:
        """device: where they are drawn and lie, but for vectors, which are drawn on the CPU: only there are logarithms
        the same everywhere."""
        self._shapes, self._seed, self._device = shapes, seed, device

    @property
    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def info(self, name: str) -> TensorInfo:
        return TensorInfo("", self._shapes[name], "F32")

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Draw a part of a tensor, fp32: `rows` of its first dimension, `columns` of its second where it has two."""
        shape = self._shapes[name]
        key = int.from_bytes(hashlib.sha256(f"{self._seed}:{name}".encode()).digest()[:8], "little", signed=True)
        is_rate = name.endswith(".A_log")  # of KDA perhaps of four dimensions, all but one of which are 1
        if len(shape) > 1 and not (is_rate and math.prod(shape) == max(shape)):
            values = _normal(key, shape, rows, columns, self._device)
            return values.mul_(shape[-1] ** -0.5)
        generator = torch.Generator().manual_seed(key)
        if is_rate:
            vector = torch.empty(shape).uniform_(1, 16, generator=generator).log_()
        elif name.endswith(".dt_bias"):
            # The inverse of softplus, of time steps whose logarithm is uniform.
            step = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
            vector = step.expm1().log_()
        else:
            centre = 1.0 if name.endswith((".norm.weight", ".D", "_hc.scale", ".hc_scale")) else 0.0
            vector = torch.empty(shape).normal_(centre, 0.1, generator=generator)
        return vector[rows].to(self._device)


def _normal(key: int, shape: tuple[int, ...], rows: slice, columns: slice, device: torch.device) -> Tensor:
    """A part of a tensor whose values are nearly normal, with mean 0 and variance 1: fp32 [rows, columns, ...]."""
    top, bottom, _ = rows.indices(shape[0])
    left, right, _ = columns.indices(shape[1])
    inner = math.prod(shape[2:])
    values = torch.empty(bottom - top, (right - left) * inner, device=device)
    if values.numel() == 0:
        return values.view(bottom - top, right - left, *shape[2:])
    within = torch.arange(left * inner, right * inner, device=device)
    at_once = max(1, AT_ONCE.get(device.type, AT_ONCE_ON_DEVICE) // len(within))
    for first in range(0, len(values), at_once):
        some = values[first : first + at_once]
        start = (torch.arange(len(some), device=device) + (top + first)).mul_(shape[1] * inner)
        # The sum of four numbers of 16 bits: integers, so that no device rounds otherwise.
        summed = _mixed(start[:, None] + within, key).view(torch.int16).unflatten(1, (-1, 4)).sum(2, dtype=torch.int32)
        some.copy_(summed)
    return values.add_(2.0).mul_(math.sqrt(3) / 2**16).view(bottom - top, right - left, *shape[2:])


def _mixed(number: Tensor, key: int) -> Tensor:
    """SplitMix64 (Steele, Lea, Flood 2014) of numbers of a sequence: int64, in place; of 64 bits each is random."""
    number.mul_(_GOLDEN).add_(key)
    for bits, factor in ((30, _FIRST), (27, _SECOND)):
        number.bitwise_xor_((number >> bits).bitwise_and_(2 ** (64 - bits) - 1)).mul_(factor)
    return number.bitwise_xor_((number >> 31).bitwise_and_(2**33 - 1))
