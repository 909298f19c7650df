"""flex_decode over latents, with pages and with tokens beyond what 32 bits count. On a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels.attention.test_attention import move_far
from kernels.attention.test_latents import latents
from rigs.kernels.attention_batches import Layer, Row, make_batch, modifier_case
from rigs.kernels.paths import Path

MANY = 2**31
# Decodes and verifies, cut in splits or not, and a long row.
ROWS = [Row(1, 100), Row(1, 1500), Row(5, 700), Row(20, 60)]
# What a Hopper has a kernel of its own for where rows are short, and what it has none for.
KINDS = {
    "hopper": (torch.bfloat16, latents(32, (576, 512), 64)),
    "general": (torch.bfloat16, latents(32, (200, 130), 64)),
    "general-of-fp32": (torch.float32, latents(32, (576, 512), 64)),
}


def check_far_pages(path: Path, layer: Layer) -> None:
    """Compare rows over pages beyond 2^31 values with the same rows over near ones, to the bit."""
    batch = make_batch(ROWS, path, layer, max_short=5)
    modifiers, _ = modifier_case("causal", layer, len(ROWS) + 2, path.device)
    want = batch.attend(path, modifiers)
    move_far(batch)
    assert batch.k_pages.numel() > MANY
    assert all(map(torch.equal, batch.attend(path, modifiers), want))


def check_far_tokens(path: Path, layer: Layer) -> None:
    """Compare rows whose queries, gates and outputs lie beyond MANY values with the same rows near 0, to the bit."""
    near = make_batch(ROWS, path, layer, max_short=5)
    modifiers, _ = modifier_case("causal", layer, len(ROWS) + 2, path.device)
    begin = MANY // (layer.HQ * layer.DV) + 7
    control = near.rows.control.clone()
    control[0] += begin
    far = replace(near, rows=replace(near.rows, control=control))
    for name in ("q", "gate"):
        few = getattr(near, name)
        many = torch.empty((begin + len(few), *few.shape[1:]), dtype=path.dtype, device=path.device)
        many[begin:] = few
        setattr(far, name, many)
    o, lse = far.attend(path, modifiers, gate=far.gate)
    assert min(far.q.numel(), far.gate.numel(), o.numel()) > MANY
    want = near.attend(path, modifiers, gate=near.gate)
    assert torch.equal(o[begin:], want[0]) and torch.equal(lse[begin:], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "layer"), KINDS.values(), ids=KINDS)
def test_pages_beyond_int32(dtype: torch.dtype, layer: Layer) -> None:
    """About 4 GB, of fp32 9."""
    check_far_pages(Path("cuda", dtype), layer)
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "layer"), KINDS.values(), ids=KINDS)
def test_tokens_beyond_int32(dtype: torch.dtype, layer: Layer) -> None:
    """About 15 GB, of fp32 27."""
    check_far_tokens(Path("cuda", dtype), layer)
    torch.cuda.empty_cache()
