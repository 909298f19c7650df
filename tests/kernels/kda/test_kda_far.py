"""KDA at tokens beyond what 32 bits count. On a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels.kda.test_kda_chunks import chunk, use_kernels
from rigs.kernels.batches import Row
from rigs.kernels.kda_batches import KdaLayer, make_kda_batch
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.walks import cut_rows

MANY = 2**31
LAYER = KdaLayer(H=1, HV=16, K=128, V=128, M=5)
# The last one ends inside a chunk, and is longer than a part.
KINDS = [Row(1), Row(5, verify=True, replayed=3), Row(1500)]


def check_far_tokens(path: Path, layer: KdaLayer = LAYER) -> None:
    """Compare rows whose qkv, decays and outputs lie beyond MANY values with the same rows near 0, to the bit."""
    near = make_kda_batch(KINDS, path, layer, padding=0)
    begin = MANY // (layer.HV * min(layer.K, layer.V)) + 7
    packed = {}
    for name in near.PACKED:
        few = getattr(near, name)
        packed[name] = torch.empty((begin + len(few), few.shape[1]), dtype=path.dtype, device=path.device)
        packed[name][begin:] = few
    control = near.rows.control.clone()
    control[0] += begin
    far = near.clone().replaced(rows=replace(near.rows, control=control), **packed)
    o = far.run(path)
    assert min(far.qkv.numel(), far.a.numel(), o.numel()) > MANY
    assert torch.equal(o[begin:], near.run(path))
    assert same_bits(far.state, near.state) and same_bits(far.drafts, near.drafts)


@pytest.mark.gpu
def test_offsets_of_tokens_beyond_int32() -> None:
    """Token by token; about 27 GB."""
    check_far_tokens(Path("cuda", torch.float32))
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize(("kernels", "length"), [("hopper", 0), ("hopper", 1024), ("triton", 0)])
def test_offsets_of_chunks_beyond_int32(kernels: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What chunks are without a state is as large as the tokens; about 31 GB, in parts 33."""
    cut_rows(monkeypatch, chunk, length)
    use_kernels(monkeypatch, kernels)
    check_far_tokens(Path("cuda", torch.bfloat16))
    torch.cuda.empty_cache()
