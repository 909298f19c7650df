"""The ways through the chunks of long rows: by which walk, and in how many parts."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from deltaline_kernels.device.row_splits import RowSplits

# Values between packed tokens: with 8 they begin at multiples of 16 bytes and tiles are copied whole.
ALIGNED = 8


def cut_rows(monkeypatch: pytest.MonkeyPatch, chunk: ModuleType, length: int) -> None:
    """Have a family's module `chunk` cut rows into parts of `length` tokens; 0 leaves them whole."""

    def choose(_heads: object, _num_rows: int, _num_tokens: int, max_length: int) -> RowSplits:
        num_parts = -(-max_length // length) if length else 1
        return RowSplits(max(num_parts, 1), length or max(max_length, 1))

    monkeypatch.setattr(chunk, "choose_plan", choose)


def use_walk(monkeypatch: pytest.MonkeyPatch, chunk: Any, walk: str) -> list[str]:
    """Let only the one walk run; what is returned says in the end which one did."""
    ran: list[str] = []
    if walk == "triton":
        monkeypatch.setattr(chunk, "can_walk", lambda *_: False)
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    launch_walk = chunk.launch_walk

    def spy(*args: Any, **kwargs: Any) -> None:
        ran.append("hopper")
        launch_walk(*args, **kwargs)

    monkeypatch.setattr(chunk, "launch_walk", spy)
    return ran
