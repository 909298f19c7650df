"""The code that Triton makes of attention over latents for a Hopper GPU; it is compiled here and runs nowhere."""

from __future__ import annotations

import os
import re

import pytest
import torch
from rigs.kernels.compiled import compile_launches

from deltaline_kernels import Modifiers, Rows, find_modifier, flex_decode

# What a program may have on a Hopper GPU.
SHARED_BYTES = 227 << 10
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)


@pytest.mark.parametrize(
    ("num_heads", "key_dim", "tokens"), [(32, 576, 1), (128, 576, 5), (64, 512, 512)], ids=["decode", "verify", "long"]
)
def test_latents_are_loaded_once_and_nothing_is_spilled(
    monkeypatch: pytest.MonkeyPatch, num_heads: int, key_dim: int, tokens: int
) -> None:
    """Rows of models' latents of 512 channels: 64 or none are behind them."""
    pytest.importorskip("triton")

    def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    short = 0 if tokens > 8 else 4
    rows = Rows(draw(7, 5, dtype=torch.int32), short, 8, tokens)
    pages, table = draw(200, 64, 1, key_dim), draw(5, 130, dtype=torch.int32)
    causal = Modifiers(mask=find_modifier("causal")(), device="meta")
    q = draw(4 * tokens, num_heads, key_dim)
    kernels = compile_launches(
        monkeypatch, lambda: flex_decode(q, pages, None, table, rows, modifiers=causal, value_dim=512)
    )
    assert [kernel.metadata.name for kernel in kernels] == ["attend_kernel", "combine_kernel"][: 2 if short else 1]
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_BYTES
        assert not re.search(r"\b(LDL|STL)\b", kernel.asm["sass"])
    # The first step of its loop is copied before it, and each copies a tile of 32 keys, 16 bytes of a thread at once.
    copied = 32 * key_dim * 2 // (kernels[0].metadata.num_warps * 32 * 16)
    assert kernels[0].asm["sass"].count("LDGSTS") == 2 * copied
