"""The code that Triton makes of the activation for a Hopper GPU; it is compiled here and runs nowhere."""

from __future__ import annotations

import os
import re

import pytest
import torch
from rigs.kernels.compiled import compile_launches

from deltaline_kernels import silu_and_mul


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none")
@pytest.mark.parametrize("width", [512, 17408])
def test_tokens_are_read_and_written_16_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    pytest.importorskip("triton")
    gate_up = torch.empty(3, 2 * width, dtype=torch.bfloat16, device="meta")
    [kernel] = compile_launches(monkeypatch, lambda: silu_and_mul(gate_up))
    moves = re.findall(r"(?:ld|st)\.global\S*", kernel.asm["ptx"])
    assert moves and all(".v4." in move for move in moves), set(moves)
