"""Blocks that several layers of a model share, each use with low-rank matrices of its own, as Zamba2 stores them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import TensorInfo, TensorSource
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.modules import ALL

BLOCK = "shared_transformer."
_NAME = re.compile(rf"(.*layers\.)(\d+)\.{re.escape(BLOCK)}(.+)")
_ADAPTERS = "_adapter_list."
_ATTENTION = {f"self_attn.{part}_proj.weight": f"self_attn.linear_{part}_adapter_list" for part in "qkv"}
_MLP = {"feed_forward.gate_up_proj.weight": "feed_forward.gate_up_proj_adapter_list"}


class SharedBlocks:
    """A source in which every layer that uses a shared block has it under its own number, as it uses it: a weight with
    a pair of low-rank matrices W, A, B is W + B A.

    The file has a block where it is used first, and there the matrices of all its uses, by the use's number; or every
    layer has its own, as transformers writes where `tie_word_embeddings` is false.
    """

    def __init__(
        self, source: TensorSource, users: Sequence[int], num_blocks: int, *, attention_adapters: bool
    ) -> None:
        """users: the layers that use blocks, the k-th of them block k % num_blocks. attention_adapters: whether q, k
        and v have low-rank matrices beside those of the MLP."""
        self._source = source
        self._adapters = _MLP | (_ATTENTION if attention_adapters else {})
        # The stored name of each name that is asked for, and the beginning of its matrices' names.
        self._stored: dict[str, tuple[str, str]] = {}
        names, blocks = frozenset(source.names), dict[int, dict[str, str]]()
        self._names = {name for name in names if not _NAME.fullmatch(name)}
        for name in names:
            if (found := _NAME.fullmatch(name)) and _ADAPTERS not in name:
                blocks.setdefault(int(found[2]), {})[found[3]] = name
        for use, layer in enumerate(users):
            owner = layer if layer in blocks else users[use % num_blocks]
            for rest, stored in blocks.get(owner, {}).items():
                prefix = stored.removesuffix(f"{owner}.{BLOCK}{rest}")
                matrices = f"{prefix}{owner}.{BLOCK}{self._adapters[rest]}.{use}." if rest in self._adapters else ""
                self._stored[f"{prefix}{layer}.{BLOCK}{rest}"] = stored, matrices

    @property
    def names(self) -> Iterable[str]:
        return self._names.union(self._stored)

    def stored(self, name: str) -> tuple[str, ...]:
        """The source's tensors of which one of `names` is made."""
        stored, matrices = self._stored.get(name, (name, ""))
        return (stored, f"{matrices}0.weight", f"{matrices}1.weight") if matrices else (stored,)

    def info(self, name: str) -> TensorInfo:
        """Tell about a tensor without reading it. Raises ModelError where its low-rank matrices don't fit it."""
        stored, matrices = self._stored.get(name, (name, ""))
        info = self._source.info(stored)
        if not matrices:
            return info
        known = self._source.names
        for part in self.stored(name)[1:]:
            if part not in known:
                raise ModelError(f"{part}: expected a low-rank matrix of a shared block, found nothing")
        a, b = (self._source.info(f"{matrices}{i}.weight").shape for i in (0, 1))
        if len(a) != 2 or len(b) != 2 or (b[0], a[1]) != info.shape or a[0] != b[1]:
            expected = f"low-rank matrices of a weight of shape {list(info.shape)}"
            raise ModelError(f"{matrices}0.weight: expected {expected}, got {list(a)} and {list(b)}")
        return replace(info, fp8=None)

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read a part of a tensor; of one with low-rank matrices in fp32, rounded once to the weight's dtype."""
        stored, matrices = self._stored.get(name, (name, ""))
        weight = self._source.read(stored, rows, columns)
        if not matrices:
            return weight
        a = self._source.read(f"{matrices}0.weight", ALL, columns).float()
        b = self._source.read(f"{matrices}1.weight", rows, ALL).float()
        return torch.addmm(weight.float(), b, a).to(weight.dtype)
