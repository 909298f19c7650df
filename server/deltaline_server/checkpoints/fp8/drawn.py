"""Drawn weights in FP8, as a checkpoint with such a config has them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import TensorInfo
from deltaline_server.checkpoints.fp8.quantization import Quantization
from deltaline_server.checkpoints.random_tensors import RandomTensors

ALGORITHM = "e4m3"
"""How what is drawn becomes FP8; another name is another model."""
# Standard deviation of the values: the largest that are drawn are four times as large, and e4m3 goes up to 448.
DEVIATION = 64.0


class DrawnFp8:
    """Tensors that are drawn, a TensorSource: those that a config quantises in e4m3, all scales of each the same."""

    def __init__(self, source: RandomTensors, quantization: Quantization, *, stays: bool = True) -> None:
        """stays: whether weights may stay in e4m3, else they are read as what they stand for alone."""
        self._source, self._quantization, self._stays = source, quantization, stays

    @property
    def names(self) -> Iterable[str]:
        return self._source.names

    def info(self, name: str) -> TensorInfo:
        info = self._source.info(name)
        if not self._quantization.covers(name, info.shape):
            return info
        return replace(info, fp8=self._drawn(name)) if self._stays else info

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Draw a part of a tensor, fp32; of one in e4m3 what its values and its scale stand for."""
        if not self._quantization.covers(name, self._source.info(name).shape):
            return self._source.read(name, rows, columns)
        values = self._drawn(name).read(rows, columns).view(torch.float8_e4m3fn)
        return values.float().mul_(_scale(self._source, name))

    def _drawn(self, name: str) -> _Drawn:
        shape = self._source.info(name).shape
        return _Drawn(self._source, name, self._quantization.weight_block_size or (shape[-2], shape[-1]))


def _scale(source: RandomTensors, name: str) -> float:
    """What the values of a tensor are multiplied with: its numbers have the deviation of one over the root of its
    inputs."""
    return float(source.info(name).shape[-1] ** -0.5 / DEVIATION)


@dataclass(frozen=True)
class _Drawn:
    """A weight as it were stored, a StoredFp8."""

    source: RandomTensors
    name: str
    block: tuple[int, int]

    def read(self, rows: slice, columns: slice) -> Tensor:
        part = self.source.read(self.name, rows, columns)
        return part.div_(_scale(self.source, self.name)).to(torch.float8_e4m3fn).view(torch.uint8)

    def read_scales(self) -> Tensor:
        *matrices, rows, columns = self.source.info(self.name).shape
        grid = math.ceil(rows / self.block[0]), math.ceil(columns / self.block[1])
        return torch.full((*matrices, *grid), _scale(self.source, self.name), dtype=torch.float32)
