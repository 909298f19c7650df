"""The fingerprint of what a server's states mean: the same wherever the same weights compute in the same way.

Digests of weights find mistakes, not forgers: who can write the weights can have any model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import TensorInfo, TensorSource, part_of
from deltaline_server.checkpoints.modules import ALL

# What is hashed below, and how; it changes when that does.
VERSION = 1


class HashedTensors:
    """Tensors of a source, each hashed whole when a part of it is read for the first time.

    So ranks, which read different parts, find the same digests. Parts of one tensor are read one after the other: the
    whole is kept until another is asked for, and no file is read twice.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._digests: dict[str, bytes] = {}
        self._name, self._whole = "", torch.empty(0)

    @property
    def names(self) -> Iterable[str]:
        return self._source.names

    def info(self, name: str) -> TensorInfo:
        """Tell about a tensor without reading it."""
        return self._source.info(name)

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read a part of a tensor, which shares memory with the whole."""
        if name != self._name:
            self._whole = self._source.read(name, ALL, ALL).contiguous()
            self._name = name
            if name not in self._digests:
                self._digests[name] = xxhash.xxh3_128_digest(self._whole.flatten().view(torch.uint8).numpy().data)
        return part_of(self._whole, rows, columns)

    def identity(self) -> list[list[object]]:
        """Of each tensor that was read: see identity_of."""
        return identity_of(self._source, self._digests)


def identity_of(source: TensorSource, digests: Mapping[str, bytes]) -> list[list[object]]:
    """Name, shape, dtype and digest of each tensor that has one, by name."""
    infos = ((name, source.info(name), digest) for name, digest in sorted(digests.items()))
    return [[name, list(info.shape), info.dtype, digest.hex()] for name, info, digest in infos]


def fingerprint(identity: Mapping[str, Any]) -> bytes:
    """Return the 32 bytes that stand for these JSON values, in whatever order their keys are."""
    text = json.dumps({"version": VERSION, **identity}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()
