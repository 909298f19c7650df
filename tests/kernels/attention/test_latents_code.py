"""The code that Triton makes of attention over latents for a Hopper GPU; it is compiled here and runs nowhere."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from rigs.kernels.compiled import compile_launches

from deltaline_kernels import Modifiers, Rows, find_modifier, flex_decode

# What a program may have on a Hopper GPU.
SHARED_BYTES = 227 << 10
LOCAL = re.compile(r"\b(LDL|STL)\b")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)


def compile_rows(
    monkeypatch: pytest.MonkeyPatch, num_heads: int, key_dim: int, tokens: int, *, page: int, num_short: int
) -> list[Any]:
    """Return the kernels of 32 rows of so many tokens, which find room in shared memory."""
    pytest.importorskip("triton")

    def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = Rows(draw(7, 33, dtype=torch.int32), num_short, 8, tokens)
    pages, table = draw(200, page, 1, key_dim), draw(33, 130 * 64 // page, dtype=torch.int32)
    causal = Modifiers(mask=find_modifier("causal")(), device="meta")
    q = draw(32 * tokens, num_heads, key_dim)
    kernels = compile_launches(
        monkeypatch, lambda: flex_decode(q, pages, None, table, rows, modifiers=causal, value_dim=512)
    )
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_BYTES
    return kernels


@pytest.mark.parametrize(
    ("num_heads", "key_dim", "tokens"), [(32, 576, 1), (128, 576, 5), (64, 512, 512)], ids=["decode", "verify", "long"]
)
def test_latents_are_loaded_once_and_nothing_is_spilled(
    monkeypatch: pytest.MonkeyPatch, num_heads: int, key_dim: int, tokens: int
) -> None:
    """Rows of models' latents of 512 channels: 64 or none are behind them. In pages that a block of keys of the kernel
    for Hopper does not fit in, where they are short."""
    page, num_short = (64, 0) if tokens > 8 else (32, 32)
    kernels = compile_rows(monkeypatch, num_heads, key_dim, tokens, page=page, num_short=num_short)
    assert [kernel.metadata.name for kernel in kernels] == ["attend_kernel", "combine_kernel"][: 2 if num_short else 1]
    assert not any(LOCAL.search(kernel.asm["sass"]) for kernel in kernels)
    # The first step of its loop is copied before it, and each copies a tile of 32 keys, 16 bytes of a thread at once.
    copied = 32 * key_dim * 2 // (kernels[0].metadata.num_warps * 32 * 16)
    assert kernels[0].asm["sass"].count("LDGSTS") == 2 * copied


@pytest.mark.parametrize(
    ("num_heads", "key_dim", "tokens"),
    [(16, 576, 1), (32, 576, 1), (64, 512, 1), (32, 576, 5), (128, 576, 5)],
    ids=["few", "decode", "alone", "verify", "many"],
)
def test_short_rows_of_a_hopper_have_one_copy_of_keys(
    monkeypatch: pytest.MonkeyPatch, num_heads: int, key_dim: int, tokens: int
) -> None:
    """No operand of a product is in registers: those of the second are read the other way round where they lie. From
    the first product to the next copy no sum is spilled, at most an address or two."""
    kernels = compile_rows(monkeypatch, num_heads, key_dim, tokens, page=64, num_short=32)
    assert [kernel.metadata.name for kernel in kernels] == ["attend_short_kernel", "combine_kernel"]
    code = kernels[0].asm["sass"]
    assert len(LOCAL.findall(code[code.index("HGMMA") : code.rindex("UTMALDG")])) <= 4
    products = re.findall(r"HGMMA\S+ R\d+, (\S+?)\[\S+\](\S*),", code)
    warps, columns = kernels[0].metadata.num_warps, 32 if num_heads * tokens == 32 else 16 if num_heads == 16 else 64
    assert {operand for operand, _ in products} == {"gdesc"} and warps == (8 if columns == 64 else 4)
    # A group of 4 warps has 64 keys, or channels, of a product, and 16 of what it sums up.
    turned = [turn for _, turn in products if ".tnspA" in turn]
    assert (len(products) - len(turned), len(turned)) == (key_dim // 16, 512 // 16 // (warps // 4))
