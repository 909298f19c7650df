"""The code that the kernels of KDA become on a Hopper GPU, for which they are compiled here."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import pytest
import torch
from rigs.kernels.batches import Row
from rigs.kernels.compiled import compile_launches, on_meta
from rigs.kernels.kda_batches import KdaLayer, make_kda_batch
from rigs.kernels.paths import Path

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)


def compile_rows(monkeypatch: pytest.MonkeyPatch, layer: KdaLayer, dtype: torch.dtype) -> list[Any]:
    """Return what a short and a long row launch."""
    pytest.importorskip("triton", reason="triton is not installed")
    batch = make_kda_batch([Row(1), Row(70)], Path("cpu", dtype), layer, padding=8)
    moved = batch.replaced(**{field.name: on_meta(getattr(batch, field.name)) for field in fields(batch)})
    return compile_launches(monkeypatch, moved.run_public)


def test_products_of_chunks_are_synchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of asynchronous ones the assembler may overwrite operands in registers: docs/kernels.md."""
    kernels = compile_rows(monkeypatch, KdaLayer(H=1, HV=1, K=128, V=128), torch.bfloat16)
    assert [kernel.metadata.name for kernel in kernels] == ["_recurrent", "_transform", "_advance"]
    for kernel in kernels[1:]:
        assert "mma.sync" in kernel.asm["ptx"] and "wgmma" not in kernel.asm["ptx"]


@pytest.mark.parametrize(("size", "dtype"), [(64, torch.float32), (256, torch.bfloat16)], ids=["fp32", "keys-of-256"])
def test_rows_without_chunks_go_token_by_token(monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype) -> None:
    kernels = compile_rows(monkeypatch, KdaLayer(H=1, HV=1, K=size, V=32, lower_bound=-5.0), dtype)
    assert [kernel.metadata.name for kernel in kernels] == ["_recurrent", "_recurrent"]
