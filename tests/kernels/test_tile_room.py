"""Where the walks of long rows copy whole tiles: not where a program has too little shared memory for the widest."""

from __future__ import annotations

import os
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest
import torch
from rigs.kernels.batches import Layer, Row, make_batch
from rigs.kernels.compiled import ADA, HOPPER, RTX_BLACKWELL, Gpu, on_meta, take_place_of
from rigs.kernels.mamba_batches import MambaLayer, make_mamba_batch
from rigs.kernels.paths import Path
from rigs.kernels.walks import ALIGNED

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)


def make(kind: str, channels: int) -> Any:
    """A long row of keys or states with so many channels, whose tensors are aligned."""
    row, path = [Row(70)], Path("cpu", torch.bfloat16)
    if kind == "gated_delta":
        return make_batch(row, path, Layer(H=1, HV=1, K=channels, V=64), padding=ALIGNED, max_short=1)
    return make_mamba_batch(row, path, MambaLayer(H=2, G=1, P=64, S=channels), padding=ALIGNED, max_short=1)


@pytest.mark.parametrize(
    ("gpu", "channels", "expected"),
    [(HOPPER, 256, True), (ADA, 256, True), (RTX_BLACKWELL, 256, False), (RTX_BLACKWELL, 128, True)],
    ids=str,
)
@pytest.mark.parametrize(("kind", "kernel"), [("gated_delta", "_advance"), ("mamba2", "_walk")])
def test_tiles_are_copied_whole_where_there_is_room(
    kind: str, kernel: str, gpu: Gpu, channels: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled, which takes half a minute: the kernels without tiles have at most 96 KiB."""
    jit = pytest.importorskip("triton.runtime.jit", reason="triton is not installed")
    monkeypatch.setattr(import_module(f"deltaline_kernels.{kind}.chunk"), "can_walk", lambda *_: False)
    batch = make(kind, channels)
    moved = batch.replaced(**{field.name: on_meta(getattr(batch, field.name)) for field in fields(batch)})
    launched: dict[str, Any] = {}
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *_, **options: launched.update({self.__name__: options}))
    take_place_of(monkeypatch, gpu)
    moved.run_public()
    assert launched[kernel]["TILES"] is expected
