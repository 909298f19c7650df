"""The code that the Mamba-1 kernel becomes on a Hopper GPU, for which it is compiled here."""

from __future__ import annotations

import os
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from rigs.kernels.batches import Row
from rigs.kernels.compiled import compile_launches, on_meta
from rigs.kernels.paths import Path
from rigs.kernels.scan_batches import ScanLayer, make_scan_batch

from deltaline_kernels.mamba1.plan import Tile, choose_tile

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)


def compile_rows(
    monkeypatch: pytest.MonkeyPatch, layer: ScanLayer, dtype: torch.dtype, padding: int, state: torch.dtype
) -> list[Any]:
    """Return what a short and a long row launch, at most two tokens at once: more of the same takes a minute."""
    pytest.importorskip("triton", reason="triton is not installed")
    from deltaline_kernels.mamba1 import recurrent

    def choose_few(*args: Any, **told: Any) -> Tile:
        tile = choose_tile(*args, **told)
        return replace(tile, at_once=min(2, tile.at_once))

    monkeypatch.setattr(recurrent, "choose_tile", choose_few)
    batch = make_scan_batch([Row(1), Row(70)], Path("cpu", dtype), layer, padding=padding, state_dtype=state)
    moved = batch.replaced(**{field.name: on_meta(getattr(batch, field.name)) for field in fields(batch)})
    kernels = compile_launches(monkeypatch, moved.run_public)
    assert [kernel.metadata.name for kernel in kernels] == ["_scan", "_scan"]
    return kernels


def test_threads_exchange_nothing_while_a_row_is_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer as they are the states stay in registers, and keys come in the registers that they are asked in."""
    kernels = compile_rows(monkeypatch, ScanLayer(D=256), torch.bfloat16, 8, torch.float32)
    assert all(".local" not in kernel.asm["ptx"] for kernel in kernels)
    walk = _longest_loop(kernels[1].asm["ptx"])
    assert walk.count("ex2.approx") >= 16 and "ld.global.v2.b32" in walk
    assert ".shared" not in walk and "prmt" not in walk


@pytest.mark.parametrize(
    ("layer", "dtype", "padding", "state"),
    [
        pytest.param(ScanLayer(D=64), torch.float32, 0, torch.float32, id="fp32"),
        pytest.param(ScanLayer(D=64), torch.float16, 8, torch.float16, id="fp16"),
        pytest.param(ScanLayer(D=64), torch.bfloat16, 3, torch.bfloat16, id="keys-anywhere"),
        pytest.param(ScanLayer(D=66, G=2, S=5), torch.bfloat16, 8, torch.float32, id="odd-states"),
        pytest.param(ScanLayer(D=9, S=70), torch.bfloat16, 0, torch.float32, id="wide-states"),
    ],
)
def test_rows_of_every_kind_compile(
    monkeypatch: pytest.MonkeyPatch, layer: ScanLayer, dtype: torch.dtype, padding: int, state: torch.dtype
) -> None:
    """The interpreter takes what the compiler refuses."""
    assert all(kernel.asm["ptx"] for kernel in compile_rows(monkeypatch, layer, dtype, padding, state))


def _longest_loop(ptx: str) -> str:
    """Return the longest piece of code that ends with a jump back to its beginning."""
    labels = {found[1]: found.start() for found in re.finditer(r"^(\$L\w+):", ptx, re.MULTILINE)}
    jumps = re.finditer(r"bra(?:\.uni)?\s+(\$L\w+);", ptx)
    loops = [ptx[labels[jump[1]] : jump.end()] for jump in jumps if labels[jump[1]] < jump.start()]
    return max(loops, key=len)
