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
    weight = draw(outputs, inputs, dtype=torch.float8_e4m3fn)
    scales = draw(-(-outputs // 128), -(-inputs // 128), dtype=torch.float32)
    [kernel] = compile_launches(monkeypatch, lambda: multiply_fp8(x, weight, scales, out))
    assert kernel.metadata.shared <= SHARED_BYTES
    ptx: str = kernel.asm["ptx"]
    return ptx


@pytest.mark.parametrize("num_tokens", [64, 256, 4096])
def test_products_take_no_operand_from_registers_and_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """An assembler overwrites operands in registers too early, and the next step those in shared memory."""
    ptx = compile_product(monkeypatch, num_tokens)
    assert set(re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\S)", ptx)) == {"%"}
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", ptx)) == {"0"}
    assert "mma.sync" not in ptx


@pytest.mark.parametrize("num_tokens", [1, 17, 64, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_come_as_they_are_16_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, dtype: torch.dtype
) -> None:
    ptx = compile_product(monkeypatch, num_tokens, dtype)
    assert "cp.async.cg" in ptx and "cvt.rn.f16x2.e4m3x2" in ptx
    assert not re.search(r"ld\.global\S*\.(b8|b16|v2)|cp\.async\.ca", ptx)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, (5120, 17408)), (torch.bfloat16, (71, 37))])
def test_odd_sizes_and_fp32_compile(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: tuple[int, int]) -> None:
    for num_tokens in (1, 300):
        assert "e4m3x2" in compile_product(monkeypatch, num_tokens, dtype, size)
