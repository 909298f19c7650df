"""The code that Triton makes of attention of short rows for a Hopper GPU; it is compiled here and runs nowhere."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from rigs.kernels.compiled import compile_launches

from deltaline_kernels import Modifiers, Rows, find_modifier, flex_decode
from deltaline_kernels.attention import and_masks
from deltaline_kernels.attention.plan import AttentionHeads, choose_hopper_tile

# Shared memory of a Hopper GPU's multiprocessor, and what a program takes of it unasked.
SHARED_BYTES, TAKEN_BYTES = 228 << 10, 1 << 10
REGISTERS = 64 << 10
LOCAL = re.compile(r"\b(LDL|STL)\b")
PRODUCT = re.compile(r"HGMMA\S+ R\d+, (\S+?)\[\S+\](\S*),")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)


def compile_rows(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int],
    tokens: int,
    *,
    page: int = 64,
    num_pages: int = 200,
    max_short: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    modified: bool = False,
    gated: bool = False,
) -> list[Any]:
    """Return the kernels of 32 rows of so many tokens, with (heads, heads of keys, channels) of these sizes."""
    pytest.importorskip("triton")
    num_queries, num_keys, dim = sizes

    def draw(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = Rows(draw(7, 33, dtype=torch.int32), 32 if tokens <= max_short else 0, max_short, tokens)
    pages, table = draw(num_pages, page, num_keys, dim), draw(33, 130 * 64 // page, dtype=torch.int32)
    causal, window, cap = (find_modifier(name) for name in ("causal", "sliding_window", "soft_cap"))
    modifiers = Modifiers(mask=causal(), device="meta")
    if modified:
        modifiers = Modifiers([cap(30.0)], and_masks(causal(), window(4096)), device="meta")
    q = draw(32 * tokens, num_queries, dim)
    return compile_launches(
        monkeypatch,
        lambda: flex_decode(q, pages, pages, table, rows, modifiers=modifiers, gate=q if gated else None),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "tokens", "columns"),
    [
        ((16, 2, 256), 1, 16),
        ((24, 4, 256), 5, 32),
        ((16, 2, 256), 5, 64),
        ((32, 8, 128), 1, 16),
        ((32, 8, 128), 5, 32),
        ((64, 4, 128), 5, 64),
        ((16, 2, 64), 1, 16),
        ((16, 2, 64), 5, 64),
    ],
    ids=str,
)
def test_short_rows_of_a_hopper_have_their_operands_in_shared_memory(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], tokens: int, columns: int, dtype: torch.dtype
) -> None:
    """No operand of a product is in registers, nothing is spilled, and as many programs as are launched find room."""
    kernels = compile_rows(monkeypatch, sizes, tokens, dtype=dtype)
    assert [kernel.metadata.name for kernel in kernels] == ["attend_short_kernel", "combine_kernel"]
    code, warps, dim = kernels[0].asm["sass"], kernels[0].metadata.num_warps, sizes[2]
    heads = AttentionHeads(*sizes, dim, 1.0)
    programs = choose_hopper_tile(heads, heads.group, 32, tokens).programs
    assert not any(LOCAL.search(kernel.asm["sass"]) for kernel in kernels)
    assert programs * (kernels[0].metadata.shared + TAKEN_BYTES) <= SHARED_BYTES
    assert programs * warps * 32 * (1 + max(map(int, re.findall(r"\bR(\d+)\b", code)))) <= REGISTERS
    products = PRODUCT.findall(code)
    assert {operand for operand, _ in products} == {"gdesc"}
    assert set(re.findall(r"HGMMA\.64x(\d+)x16", code)) == {str(columns), str(columns * 4 // warps)}
    # A group of 4 warps has 64 keys, or channels, of a product, and 16 of what it sums up.
    turned = [turn for _, turn in products if ".tnspA" in turn]
    assert (len(products) - len(turned), len(turned)) == (dim // 16, dim // 16 // (warps // 4))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_modifiers_and_gates_spill_nothing(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    (kernel, _) = compile_rows(monkeypatch, (16, 2, dim), 5, modified=True, gated=True)
    assert kernel.metadata.name == "attend_short_kernel" and not LOCAL.search(kernel.asm["sass"])


def test_keys_and_values_are_asked_for_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the keys' place is asked for before the product with the values begins."""
    code = compile_rows(monkeypatch, (16, 2, 256), 1)[0].asm["sass"]
    marks = re.findall(r"(?:HGMMA|UTMALDG)\S*[^\n]*", code)
    kinds = ["copy" if "UTMALDG" in mark else "turned" if ".tnspA" in mark else "scores" for mark in marks]
    runs = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert runs == ["copy", "scores", "copy", "turned", "copy"]


@pytest.mark.parametrize(("sizes", "page"), [((16, 2, 256), 32), ((4, 2, 96), 64), ((128, 1, 64), 64)], ids=str)
def test_other_rows_have_the_kernel_of_all_attention(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], page: int
) -> None:
    """Pages that no block of keys fits in, other sizes of heads, and more heads of a group than a tile has columns."""
    assert compile_rows(monkeypatch, sizes, 1, page=page)[0].metadata.name == "attend_kernel"


@pytest.mark.parametrize("max_short", [8, 4], ids=["short", "long"])
def test_rows_over_no_pages_have_the_kernel_of_all_attention(monkeypatch: pytest.MonkeyPatch, max_short: int) -> None:
    """Of nothing the copy engine has no tiles."""
    found = compile_rows(monkeypatch, (16, 2, 256), 5, num_pages=0, max_short=max_short)
    assert found[0].metadata.name == "attend_kernel"
