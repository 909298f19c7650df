"""Weights that are stored in FP8 with scales, as the fp32 values that they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import DTYPES, E8M0, FP8, TensorInfo, TensorSource
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.modules import ALL

# What stands behind a weight's name in that of its scales, whose products with the stored values are the weight.
SCALES = ("_scale_inv", "_scale")
SCALE_DTYPES = (*DTYPES, E8M0)
# Scales of a module's inputs, which nothing is computed with: beside `weight`, and behind the name of stacked experts.
INPUT_SCALES = ("input_scale", "activation_scale")
MAX_E4M3 = 448.0


class DequantisedTensors:
    """A source without scales: a weight in e4m3 is what its values and its scales make, fp32; others are as they are.

    A weight is `[rows, columns]`, or of stacked experts `[experts, rows, columns]`. Its scales are those of blocks of
    each matrix, those at the end cut, or one of a matrix, or of a matrix of stacked experts the two of its halves, as
    transformers has them of gate and up. Parts of one weight are read one after the other: its scales are kept until
    another is asked for. What keeps a weight in e4m3 reads it by the `fp8` of its info.
    """

    def __init__(
        self,
        source: TensorSource,
        block: tuple[int, int] | None,
        *,
        usual: tuple[int, int] | None = None,
        stays: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """block: rows and columns that have one scale, None where a matrix has one; usual: then, those
        of a weight whose scales are not that, None where there must be one. stays: whether weights may stay in
        e4m3, else they are read as what they stand for alone. dtype: the model's, which must hold that."""
        self._source, self._size, self._usual = source, block, usual
        self._stays, self._limits = stays, torch.finfo(dtype)
        stored = frozenset(source.names)
        self._scales = dict[str, list[str]]()
        for name in stored:
            for suffix in SCALES:
                weight = name.removesuffix(suffix)
                if weight != name and weight in stored:
                    self._scales.setdefault(weight, []).append(name)
        inputs = {_input_scale(weight, suffix) for weight in self._scales for suffix in INPUT_SCALES}
        self._names = stored.difference(inputs, *self._scales.values())
        self._name, self._values = "", torch.empty(0)

    @property
    def names(self) -> Iterable[str]:
        return self._names

    def stored(self, name: str) -> tuple[str, ...]:
        """The source's tensors of which one of `names` is made, as they are read."""
        return (*self._scales.get(name, ()), name)

    def info(self, name: str) -> TensorInfo:
        """Tell about a tensor without reading it. Raises ModelError where a weight and its scales don't fit."""
        info = self._source.info(name)
        if info.dtype != FP8:
            self._check_plain(name, info)
            return info
        block = self._block_of(name, info.shape)
        return replace(info, dtype="F32", fp8=_Stored(self, name, block) if self._stays else None)

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read a part of a tensor. Raises ModelError as `info`, and where scales are no positive finite numbers."""
        info = self._source.info(name)
        if info.dtype != FP8:
            return self._source.read(name, rows, columns)
        block, scales = self._block_of(name, info.shape), self.read_scales(name)
        part = self._source.read(name, rows, columns).float()
        if len(info.shape) == 3:
            return _scale(part, scales[rows], block, columns.indices(info.shape[1])[0], 0)
        first_row, first_column = rows.indices(info.shape[0])[0], columns.indices(info.shape[1])[0]
        return _scale(part, scales, block, first_row, first_column)

    def read_values(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read a part of a weight in e4m3 as it is stored."""
        return self._source.read(name, rows, columns)

    def read_scales(self, name: str) -> Tensor:
        """Read the scales of a weight in e4m3: fp32, of every matrix `[block rows, block columns]`. Raises ModelError
        where they are no positive finite numbers."""
        if name != self._name:
            self._name = ""
            self._values = self._check_scales(name, self._source.info(name).shape)
            self._name = name
        return self._values

    def _check_plain(self, name: str, info: TensorInfo) -> None:
        """Raise ModelError where a tensor that is not in e4m3 has scales, or is otherwise quantised."""
        if info.dtype not in DTYPES:
            raise ModelError(f"{name}: expected dtype {' or '.join((*DTYPES, FP8))}, got {info.dtype}")
        if scales := self._scales.get(name):
            raise ModelError(f"{scales[0]}: expected none beside a weight of dtype {info.dtype}, found one")

    def _block_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that have one scale, of a weight in e4m3. Raises ModelError unless its scales fit it."""
        scales = self._scales.get(name, [])
        if len(scales) != 1:
            found = " and ".join(sorted(scales)) or "nothing"
            raise ModelError(f"{name}{SCALES[0]}: expected the scales of a weight of dtype {FP8}, found {found}")
        if len(shape) not in (2, 3) or 0 in shape:
            raise ModelError(f"{name}: expected 2 or 3 dimensions of 1 or more in {FP8}, got {list(shape)}")
        info = self._source.info(scales[0])
        if info.dtype not in SCALE_DTYPES:
            raise ModelError(f"{scales[0]}: expected dtype {' or '.join(SCALE_DTYPES)}, got {info.dtype}")
        block = None if self._usual is None else _fitting(info.shape, shape, self._usual)
        block = block or _fitting(info.shape, shape, self._size)
        if block is not None:
            return block
        grid = _grid(shape, self._size or shape[-2:])
        size = "one, as config.json has no" if self._size is None else f"{list(self._size)}, the"
        why = f"shape {list(grid)} of a weight {list(shape)} ({size} weight_block_size)"
        raise ModelError(f"{scales[0]}: expected {why}, got {list(info.shape)}")

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read the scales of a weight, which fit it: fp32, of every matrix `[block rows, block columns]`."""
        [scales] = self._scales[name]
        values = self._source.read(scales, ALL, ALL).float()
        if not bool(((values > 0) & (values * MAX_E4M3 <= self._limits.max)).all()):
            what = f"positive numbers that times {MAX_E4M3:.0f} are finite in {self._limits.dtype}"
            raise ModelError(f"{scales}: expected {what}, got others")
        if values.ndim == len(shape):
            return values
        return values.reshape((-1, 1, 1)[-len(shape) :]).expand(*shape[:-2], 1, 1)


@dataclass(frozen=True)
class _Stored:
    """A weight of a source as it is stored, a StoredFp8."""

    source: DequantisedTensors
    name: str
    block: tuple[int, int]

    def read(self, rows: slice, columns: slice) -> Tensor:
        self.source.read_scales(self.name)  # first, as they are read ahead
        return self.source.read_values(self.name, rows, columns).view(torch.uint8)

    def read_scales(self) -> Tensor:
        return self.source.read_scales(self.name)


def _grid(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight's blocks."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _fitting(scales: tuple[int, ...], shape: tuple[int, ...], size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns that have one scale where scales of this shape are those of blocks of this size, None for a
    whole matrix; None where they are not."""
    (*experts, rows, _), (height, width) = shape, size or shape[-2:]
    grid = _grid(shape, (height, width))
    if scales == grid or (size is None and scales in ((), (1,), tuple(experts), (*experts, 1))):
        return height, width
    if experts and grid[1] == 1 and rows % 2 == 0 and scales == (*experts, 2, grid[2]):
        return rows // 2, width
    return None


def _input_scale(weight: str, suffix: str) -> str:
    """The name of the scale of what a weight is multiplied with."""
    module = weight.removesuffix(".weight")
    return f"{weight}_{suffix}" if module == weight else f"{module}.{suffix}"


def _scale(part: Tensor, scales: Tensor, block: tuple[int, int], first_row: int, first_column: int) -> Tensor:
    """Multiply a part `[..., rows, columns]` of a weight in place by its blocks' scales `[..., blocks, blocks]`; return
    it. first_row, first_column: where in the weight it begins."""
    rows, columns = part.shape[-2:]
    of_columns = torch.arange(first_column, first_column + columns, device=part.device) // block[1]
    scales = scales[..., of_columns]
    begin = 0
    while begin < rows:
        row = (first_row + begin) // block[0]
        end = min(rows, (row + 1) * block[0] - first_row)
        part[..., begin:end, :].mul_(scales[..., row : row + 1, :])
        begin = end
    return part
