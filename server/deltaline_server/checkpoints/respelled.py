"""Tensors that a checkpoint may store under other names, or in parts, and that are asked for by one name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import TensorInfo, TensorSource
from deltaline_server.checkpoints.modules import ALL


class RespelledTensors:
    """A source with names of its own for some tensors: each is one of the source's, or several, row behind row."""

    def __init__(self, source: TensorSource, spellings: Mapping[str, tuple[str, ...]]) -> None:
        """spellings: the end of a name that is asked for, and the ends of those that are stored in its place."""
        self._source, self._parts = source, dict[str, tuple[str, ...]]()
        stored = frozenset(source.names)
        for name in stored:
            for asked, parts in spellings.items():
                stem = name.removesuffix(f".{parts[0]}")
                whole = tuple(f"{stem}.{part}" for part in parts)
                if stem != name and stored.issuperset(whole) and f"{stem}.{asked}" not in stored:
                    self._parts[f"{stem}.{asked}"] = whole
        self._names = stored.difference(*self._parts.values()).union(self._parts)

    @property
    def names(self) -> Iterable[str]:
        return self._names

    def stored(self, name: str) -> tuple[str, ...]:
        """The source's tensors of which one of `names` is made."""
        return self._parts.get(name, (name,))

    def info(self, name: str) -> TensorInfo:
        """Tell about a tensor without reading it: its dtype is that of all its parts, or none that is read."""
        infos = [self._source.info(part) for part in self.stored(name)]
        sizes, dtypes = {info.shape[1:] for info in infos}, sorted({info.dtype for info in infos})
        if len(infos) == 1 or len(sizes) > 1 or not all(info.shape for info in infos):
            return infos[0]
        rows = sum(info.shape[0] for info in infos)
        return replace(infos[0], shape=(rows, *infos[0].shape[1:]), dtype=" and ".join(dtypes), fp8=None)

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read a part of a tensor."""
        parts = self.stored(name)
        if len(parts) == 1:
            return self._source.read(parts[0], rows, columns)
        return torch.cat([self._source.read(part, ALL, columns) for part in parts])[rows]
