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

from deltaline_kernels.compat import chunk_gated_delta_rule

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
    monkeypatch.setattr(import_module(f"deltaline_kernels.{kind}.chunk"), "can_walk", lambda *_: False)
    batch = make(kind, channels)
    moved = batch.replaced(**{field.name: on_meta(getattr(batch, field.name)) for field in fields(batch)})
    launched = launches(monkeypatch, gpu)
    moved.run_public()
    assert launched[kernel]["TILES"] is expected


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_tiles_go_to_the_caller_s_room_where_that_is_aligned(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.empty(1, 128, 2, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
    gates = torch.empty(1, 128, 2, dtype=torch.float32, device="meta")
    room = torch.empty(v.numel() + offset, dtype=v.dtype, device="meta")[offset:].view(v.shape)
    monkeypatch.setattr(import_module("deltaline_kernels.gated_delta.chunk"), "can_walk", lambda *_: False)
    launched = launches(monkeypatch, HOPPER)
    chunk_gated_delta_rule(q, k, v, gates, gates, core_attn_out=room)
    assert launched["_advance"]["TILES"] is (offset % 8 == 0)


def launches(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> dict[str, Any]:
    """The options of the kernels that are launched from now on, by name: for that GPU, and not run."""
    jit = pytest.importorskip("triton.runtime.jit", reason="triton is not installed")
    launched: dict[str, Any] = {}
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *_, **options: launched.update({self.__name__: options}))
    take_place_of(monkeypatch, gpu)
    return launched
