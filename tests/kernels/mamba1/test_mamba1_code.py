"""The code that the Mamba-1 kernel becomes on a Hopper GPU, for which it is compiled here."""

from __future__ import annotations

import os
import re
from dataclasses import fields

import pytest
import torch
from rigs.kernels.batches import Row
from rigs.kernels.compiled import compile_launches, on_meta
from rigs.kernels.paths import Path
from rigs.kernels.scan_batches import ScanLayer, make_scan_batch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)


def test_threads_exchange_nothing_while_a_row_is_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer as they are the states stay in registers, and keys come in the registers that they are asked in."""
    pytest.importorskip("triton", reason="triton is not installed")
    batch = make_scan_batch([Row(1), Row(70)], Path("cpu", torch.bfloat16), ScanLayer(D=256), padding=8)
    moved = batch.replaced(**{field.name: on_meta(getattr(batch, field.name)) for field in fields(batch)})
    kernels = compile_launches(monkeypatch, moved.run_public)
    assert [kernel.metadata.name for kernel in kernels] == ["_scan", "_scan"]  # short rows, then long ones
    assert all(".local" not in kernel.asm["ptx"] for kernel in kernels)
    walk = _longest_loop(kernels[1].asm["ptx"])
    assert walk.count("ex2.approx") >= 16 and "ld.global.v2.b32" in walk
    assert ".shared" not in walk and "prmt" not in walk


def _longest_loop(ptx: str) -> str:
    """Return the longest piece of code that ends with a jump back to its beginning."""
    labels = {found[1]: found.start() for found in re.finditer(r"^(\$L\w+):", ptx, re.MULTILINE)}
    jumps = re.finditer(r"bra(?:\.uni)?\s+(\$L\w+);", ptx)
    loops = [ptx[labels[jump[1]] : jump.end()] for jump in jumps if labels[jump[1]] < jump.start()]
    return max(loops, key=len)
