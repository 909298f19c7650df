"""The code that Triton makes of the experts' kernels for a Hopper GPU; it is compiled here and runs nowhere."""

from __future__ import annotations

import os
import re

import pytest
import torch
from rigs.kernels.compiled import ADA, HOPPER, RTX_BLACKWELL, Gpu, compile_launches, take_place_of

from deltaline_kernels import run_experts
from deltaline_kernels.moe import plan

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)


def compile_experts(
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    activation: str = "silu",
    *,
    in_fp8: bool = False,
    gpu: Gpu = HOPPER,
) -> dict[str, list[str]]:
    """Return the code of the kernels by their names for a model with 16 of 35B-A3B's experts; check that they fit."""
    pytest.importorskip("triton")

    def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = 1024 if activation == "silu" else 512
    of_weights = torch.float8_e4m3fn if in_fp8 else torch.bfloat16
    x, gate_up, down = (
        draw(num_tokens, 2048),
        draw(16, rows, 2048, dtype=of_weights),
        draw(16, 2048, 512, dtype=of_weights),
    )
    scales = [draw(16, size // 128, inputs // 128, dtype=torch.float32) for size, inputs in ((rows, 2048), (2048, 512))]
    weights, experts = draw(num_tokens, 9, dtype=torch.float32), draw(num_tokens, 9, dtype=torch.int32)
    found: dict[str, list[str]] = {}
    given = x, gate_up, down, weights, experts, activation, *(scales if in_fp8 else ())
    for kernel in compile_launches(monkeypatch, lambda: run_experts(*given), gpu):
        assert kernel.metadata.shared <= gpu.shared_bytes
        found.setdefault(kernel.metadata.name, []).append(kernel.asm["ptx"])
    return found


@pytest.mark.parametrize("rows", [64, 128])
def test_products_take_no_operand_from_registers(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Where they do, in a loop that loads ahead, an assembler overwrites the operand before the product has read it."""
    chosen = next(bucket.plan for bucket in plan.BUCKETS if bucket.plan.rows == rows)
    monkeypatch.setattr(plan, "BUCKETS", (plan.Bucket(plan.ANY, chosen),))
    monkeypatch.setattr(plan, "SORTED_CHOICES", plan.ANY)
    for ptx in compile_experts(monkeypatch, 64)["_multiply"]:
        products = re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\S)", ptx)
        assert products and set(products) == {"%"}
        assert "mma.sync" not in ptx


@pytest.mark.parametrize(
    ("num_tokens", "activation"), [(1, "silu"), (8, "silu"), (40, "silu"), (1, "relu2"), (40, "relu2")]
)
def test_weights_are_read_16_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch, num_tokens: int, activation: str) -> None:
    found = compile_experts(monkeypatch, num_tokens, activation)
    for name in {"_first", "_second", "_multiply"} & found.keys():
        for ptx in found[name]:
            assert "cp.async.cg" in ptx if name == "_multiply" else "ld.global.v4" in ptx
            assert not re.search(r"ld\.global\.b16|cp\.async\.ca", ptx)


@pytest.mark.parametrize("num_tokens", [1, 8, 40, 100, 4096])
def test_weights_in_fp8_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    """16 bytes at a time, and no operand of an asynchronous product lies in registers; each is waited for, as its sum
    meets a scale."""
    for name, codes in compile_experts(monkeypatch, num_tokens, in_fp8=True).items():
        for ptx in codes if name in ("_first", "_second", "_multiply", "_up", "_down") else ():
            assert "e4m3x2" in ptx
            assert re.search(r"cp\.async\.cg|cp\.async\.bulk\.tensor|ld\.global\.v4", ptx)
            assert not re.search(r"ld\.global\.b16|cp\.async\.ca", ptx)
            assert set(re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\S)", ptx)) <= {"%"}
            assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", ptx)) <= {"0"}
            assert ("wgmma" in ptx) == (num_tokens >= 100)


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_many_tokens_are_sorted(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    """Their products take no operand from registers either, and those of down copy whole tiles."""
    found = compile_experts(monkeypatch, 4096, activation)
    assert found.keys() == {"_count", "_add_up", "_place", "_up", "_down", "_combine"}
    for name in ("_up", "_down"):
        [ptx] = found[name]
        products = re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\S)", ptx)
        assert products and set(products) == {"%"}
    assert "cp.async.bulk.tensor" in found["_down"][0] and "cp.async.cg" in found["_up"][0]


def test_experts_of_many_tokens_fit_where_there_is_less_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compile_experts(monkeypatch, 4096, gpu=RTX_BLACKWELL)
    assert "_multiply" in found and "_up" not in found


@pytest.mark.parametrize(
    ("gpu", "size", "dtype", "expected"),
    [
        (HOPPER, (256, 2048, 512), torch.bfloat16, True),
        (HOPPER, (1024, 2048, 512), torch.float16, True),
        (RTX_BLACKWELL, (1024, 2048, 512), torch.float16, False),
        (HOPPER, (256, 2048, 512), torch.float32, False),
        (ADA, (256, 2048, 512), torch.bfloat16, False),
        (HOPPER, (256, 2044, 512), torch.bfloat16, False),
        (HOPPER, (256, 2048, 500), torch.bfloat16, False),
    ],
    ids=str,
)
def test_where_choices_are_sorted(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Gpu,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    expected: bool,
) -> None:
    take_place_of(monkeypatch, gpu)
    x, down = torch.empty(1, size[1], dtype=dtype, device="meta"), torch.empty(size, dtype=dtype, device="meta")
    assert not plan.is_sorted(1 << 20, 1, x, down[:, :, :-8].to(torch.float8_e4m3fn))  # rows of 504 bytes
    least = plan.SORTED_CHOICES * size[0]
    assert plan.is_sorted(least, 1, x, down) is expected
    assert not plan.is_sorted(least - 1, 1, x, down)
