"""The code that Triton makes of products with FP8 weights for a Hopper GPU; it is compiled here and runs nowhere."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from rigs.kernels.compiled import compile_launches

from deltaline_kernels import multiply_fp8

# What a program may have on a Hopper GPU.
SHARED_BYTES = 227 << 10
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)


def compile_product(
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    size: tuple[int, int] = (5120, 17408),
) -> str:
    """Return the kernel's code for a projection of a 27b model; check that it fits."""
    pytest.importorskip("triton")

    def draw(*shape: int, dtype: torch.dtype) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    outputs, inputs = size
    x, out = draw(num_tokens, inputs, dtype=dtype), draw(num_tokens, outputs, dtype=dtype)
    weight = draw(outputs, -(-inputs // 128) * 32, dtype=torch.int32)
    scales = draw(-(-outputs // 128), -(-inputs // 128), dtype=torch.float32)
    kernels = compile_launches(monkeypatch, lambda: multiply_fp8(x, weight, scales, out))
    assert all(kernel.metadata.shared <= SHARED_BYTES for kernel in kernels)
    ptx: str = kernels[0].asm["ptx"]
    return ptx


@pytest.mark.parametrize("num_tokens", [2, 17, 64, 128])
def test_products_are_waited_for(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    """An assembler gives away registers that an asynchronous product still reads, unless it is over by then."""
    ptx = compile_product(monkeypatch, num_tokens)
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", ptx)
    assert set(waits) <= {"0"} and len(waits) == ptx.count("wgmma.commit_group")
    assert waits or "mma.sync" in ptx
    between = re.findall(r"wgmma\.commit_group\S*;(.*?)wgmma\.wait_group", ptx, re.DOTALL)
    words = {word for text in between for word in re.findall(r"^\s+([a-z][\w.]*)", text, re.MULTILINE)}
    # None of what makes the next operands.
    assert words <= {"mov.b32", "cvt.u64.u32"}, words


@pytest.mark.parametrize("num_tokens", [2, 17, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_words_go_from_shared_memory_to_where_they_are_multiplied(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, dtype: torch.dtype
) -> None:
    ptx = compile_product(monkeypatch, num_tokens, dtype)
    assert "cp.async.cg" in ptx and re.search(r"ld\.shared\.v[24]\.b32", ptx)
    assert not re.search(r"ld\.shared\S*\.b(8|16)|ld\.global\S*\.(b8|b16)", ptx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_token_reads_weights_16_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    ptx = compile_product(monkeypatch, 1, dtype)
    assert "ld.global.v4.b32" in ptx and "cvt.rn.f16x2.e4m3x2" in ptx and "mma" not in ptx


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, (5120, 17408)), (torch.bfloat16, (71, 37))])
def test_odd_sizes_and_fp32_compile(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: tuple[int, int]) -> None:
    for num_tokens in (1, 20, 300):
        assert "st.global" in compile_product(monkeypatch, num_tokens, dtype, size)
