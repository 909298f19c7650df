"""The code that the kernels of KDA become on a Hopper GPU, for which they are compiled here."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from functools import cache, partial
from typing import Any

import pytest
import torch
from rigs.kernels.batches import Row
from rigs.kernels.compiled import PRODUCT, compile_launches, find_overwritten_operands, instructions, on_meta
from rigs.kernels.kda_batches import KdaBatch, KdaLayer, make_kda_batch
from rigs.kernels.paths import Path
from rigs.kernels.walks import ALIGNED, cut_rows

from deltaline_kernels.compat import flash_kda_fwd

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)
LAYER = KdaLayer(H=1, HV=1, K=128, V=128)
LOCAL = re.compile(r"\b(LDL|STL)\b")


def compile_rows(monkeypatch: pytest.MonkeyPatch, layer: KdaLayer, dtype: torch.dtype) -> list[Any]:
    """Return what a short and a long row launch."""
    rows = [Row(1), Row(70)]
    return compile_batch(monkeypatch, make_kda_batch(rows, Path("cpu", dtype), layer, padding=ALIGNED, max_short=1))


def compile_batch(monkeypatch: pytest.MonkeyPatch, batch: KdaBatch) -> list[Any]:
    pytest.importorskip("triton", reason="triton is not installed")
    moved = batch.replaced(**{field.name: on_meta(getattr(batch, field.name)) for field in fields(batch)})
    return compile_launches(monkeypatch, moved.run_public)


@cache
def compile_long() -> dict[str, list[str]]:
    """Return the instructions of what a long row launches, in parts and of many heads, by its name."""
    chunk = pytest.importorskip("deltaline_kernels.kda.chunk", reason="triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        cut_rows(patch, chunk, 64)
        _, pairs, inverse, ends, join, walk = compile_rows(patch, LAYER, torch.bfloat16)
        cut_rows(patch, chunk, 0)
        patch.setattr(pytest.importorskip("deltaline_kernels.kda.hopper_chunk"), "MANY_HEADS", 1)
        *_, wide = compile_rows(patch, LAYER, torch.bfloat16)
    assert (walk.metadata.num_warps, wide.metadata.num_warps) == (4, 8)
    kernels = {"pairs": pairs, "inverse": inverse, "ends": ends, "join": join, "walk": walk, "wide walk": wide}
    return {name: instructions(kernel) for name, kernel in kernels.items()}


def test_long_rows_take_the_kernels_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compile_rows(monkeypatch, LAYER, torch.bfloat16)
    assert [kernel.metadata.name for kernel in kernels] == ["_recurrent_keyed", "pair_kernel", "_invert", "walk_kernel"]


def test_other_products_of_chunks_are_synchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of asynchronous ones the assembler may overwrite operands in registers: docs/kernels.md."""
    kernels = compile_rows(monkeypatch, KdaLayer(H=1, HV=1, K=70, V=35), torch.bfloat16)
    assert [kernel.metadata.name for kernel in kernels] == ["_recurrent_keyed", "_transform", "_invert", "_advance"]
    for kernel in kernels[1:]:
        assert "mma.sync" in kernel.asm["ptx"] and "wgmma" not in kernel.asm["ptx"]


def test_operands_of_pairs_are_in_shared_memory() -> None:
    products = [line for line in compile_long()["pairs"] if "HGMMA" in line]
    assert products and not [line for line in products if PRODUCT.search(line)]


@pytest.mark.parametrize("name", ["ends", "walk", "wide walk"])
def test_walks_spill_nothing_and_overwrite_no_operand_of_a_running_product(name: str) -> None:
    """The state and the updates are operands in registers, which an assembler may hand to something else too early."""
    code = compile_long()[name]
    assert not [line for line in code if LOCAL.search(line)]
    assert [line for line in code if PRODUCT.search(line)] and not find_overwritten_operands(code)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("row", "dtype"),
    [(Row(1), torch.bfloat16), (Row(5, verify=True, replayed=3), torch.float32)],
    ids=["decode", "verify-fp32"],
)
def test_many_heads_token_by_token_spill_nothing(
    monkeypatch: pytest.MonkeyPatch, row: Row, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    layer = KdaLayer(H=16, HV=32, K=128, V=128, M=5)
    (kernel,) = compile_batch(
        monkeypatch, make_kda_batch([row] * 8, Path("cpu", dtype), layer, state_dtype=state_dtype)
    )
    assert kernel.metadata.num_warps == 1
    assert not [line for line in instructions(kernel) if LOCAL.search(line)]


@pytest.mark.parametrize(("size", "dtype"), [(64, torch.float32), (256, torch.bfloat16)], ids=["fp32", "keys-of-256"])
def test_rows_without_chunks_go_token_by_token(monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype) -> None:
    kernels = compile_rows(monkeypatch, KdaLayer(H=1, HV=1, K=size, V=32, lower_bound=-5.0), dtype)
    assert [kernel.metadata.name for kernel in kernels] == ["_recurrent_keyed", "_recurrent_keyed"]


def test_an_output_that_begins_anywhere_is_not_written_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a caller: the copy engine writes at multiples of 16 bytes alone."""
    pytest.importorskip("triton", reason="triton is not installed")

    def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    tokens, heads, dim = 70, 2, 64
    given = {name: draw(1, tokens, heads, dim) for name in ("q", "k", "v", "g")} | {"beta": draw(1, tokens, heads)}
    gates = {"A_log": draw(heads, dtype=torch.float32), "dt_bias": draw(heads, dim, dtype=torch.float32)}
    found = []
    for first in (0, 1):
        out = draw(tokens * heads * dim + 1)[first:][: tokens * heads * dim].view(1, tokens, heads, dim)
        call = partial(flash_kda_fwd, **given, **gates, scale=1.0, lower_bound=-5.0, out=out)
        found.append([kernel.metadata.name for kernel in compile_launches(monkeypatch, call)])
    assert [names[-1] for names in found] == ["walk_kernel", "_advance"]
