"""Products of tokens with a weight, against their reference."""

from __future__ import annotations

import os
import re

import pytest
import torch
from rigs.kernels.compiled import compile_launches
from rigs.kernels.draws import normal
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import linear, linear_reference
from deltaline_kernels.linear import plan

# Tokens, inputs, outputs.
SHAPES = {"one": (1, 8, 1), "odd": (5, 24, 37), "wide": (16, 264, 70), "some": (17, 136, 33), "most": (64, 136, 66)}


def draw(path: Path, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * normal(*shape, seed=seed)).to(path.device, path.dtype)


def tokens(path: Path, num_tokens: int, inputs: int) -> torch.Tensor:
    """Rows that lie apart, with NaN between."""
    wide = torch.full((num_tokens, inputs + 8), torch.nan).to(path.device, path.dtype)
    wide[:, :inputs] = draw(path, num_tokens, inputs)
    return wide[:, :inputs]


@pytest.mark.parametrize("shape", SHAPES)
def test_products_match_the_reference(path: Path, shape: str) -> None:
    num_tokens, inputs, outputs = SHAPES[shape]
    x, weight = tokens(path, num_tokens, inputs), draw(path, outputs, inputs, seed=1, scale=inputs**-0.5)
    got = path.linear(x, weight)
    assert got.dtype == path.dtype
    assert_close("y", got, linear_reference(x.double(), weight.double()), path.dtype)


def test_a_row_does_not_depend_on_its_neighbours(path: Path) -> None:
    if path.device == "cpu" and path.dtype != torch.float16:
        pytest.skip("on the CPU products are torch's, of which this does not hold")
    for num_tokens in (16, 64):
        x, weight = draw(path, num_tokens, 136), draw(path, 68, 136, seed=1, scale=0.1)
        got = path.linear(x, weight)
        assert same_bits(path.linear(x.roll(3, 0), weight).roll(-3, 0), got)
        alone = torch.full_like(x, torch.nan)
        alone[5] = x[5]
        assert same_bits(path.linear(alone, weight)[5], got[5])


def test_products_name_the_wrong_argument() -> None:
    x, weight = torch.zeros(3, 8), torch.zeros(6, 8)
    with pytest.raises(ValueError, match=r"^weight: expected shape \[\*, 8\]"):
        linear(x, weight[:, :4].contiguous())
    with pytest.raises(TypeError, match=r"^weight: expected"):
        linear(x, weight.half())
    with pytest.raises(ValueError, match=r"^weight: expected at least 1 row and 1 column"):
        linear(x, weight[:0])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none")
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64])
def test_code_for_hopper_reads_weights_16_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    """And takes no operand of an asynchronous product from registers, which an assembler may overwrite."""
    pytest.importorskip("triton")
    x = torch.empty(num_tokens, 5120, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(16480, 5120, dtype=torch.bfloat16, device="meta")
    [kernel] = compile_launches(monkeypatch, lambda: linear(x, weight))
    assert kernel.metadata.shared <= 227 << 10
    ptx = kernel.asm["ptx"]
    assert "cp.async.cg" in ptx and not re.search(r"cp\.async\.ca|ld\.global\.b16", ptx)
    assert set(re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\S)", ptx)) <= {"%"}
    assert "griddepcontrol.wait" in ptx and "cp.async.bulk.prefetch.L2" in ptx


def test_plans_have_all_numbers_of_few_tokens() -> None:
    for num_tokens in range(1, plan.MAX_TOKENS + 1):
        assert plan.choose_plan(num_tokens).rows >= num_tokens
