"""The code that Triton makes of the norms of hidden states for a Hopper GPU; it is compiled here and runs nowhere."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
import torch
from rigs.kernels.compiled import compile_launches
from torch import Tensor

from deltaline_kernels import add_rms_norm, rms_norm

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)
BF16 = torch.bfloat16


def draw(*size: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


CALLS: dict[str, Callable[[int], object]] = {
    "norm": lambda width: rms_norm(draw(3, width), draw(width, dtype=torch.float32), 1e-6),
    "sum": lambda width: add_rms_norm(draw(3, width), draw(3, width), draw(width, dtype=torch.float32), 1e-6),
}


@pytest.mark.parametrize("width", [2048, 5120, 8192])
@pytest.mark.parametrize("call", CALLS)
def test_tokens_are_read_and_written_16_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch, call: str, width: int) -> None:
    pytest.importorskip("triton")
    [kernel] = compile_launches(monkeypatch, lambda: CALLS[call](width))
    moves = re.findall(r"(?:ld|st)\.global\S*", kernel.asm["ptx"])
    assert moves and all(".v4." in move for move in moves), set(moves)
    assert ".local" not in kernel.asm["ptx"]
