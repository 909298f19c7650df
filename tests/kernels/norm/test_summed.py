"""Sum, residual and norm in one launch, by memory that GPUs share: here one GPU, whose sum is its own summand, and two
that are this process's memory, of which the other one has sent all it has to send (Triton's interpreter)."""

from __future__ import annotations

import os

import pytest
import torch
from rigs.kernels.compiled import compile_launches
from torch import Tensor
from torch.nn.functional import rms_norm

SLOT_BYTES, EPS = 1 << 16, 1e-6


def expected(parts: list[Tensor], residual: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """In fp64 but for the order of the sum and the roundings that are promised."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    summed = (residual.double() + scale * total.to(parts[0].dtype).double()).to(residual.dtype)
    normed = rms_norm(summed.to(parts[0].dtype).double(), weight.shape, weight.double(), EPS)
    return summed, normed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 64, 200])
def test_one_gpu_adds_its_summand_to_the_residual_and_norms_that(rows: int, dtype: torch.dtype) -> None:
    from deltaline_kernels.norm.peer_sums import PROGRAMS, PeerSums
    from deltaline_kernels.norm.summed import summed_rms_norm

    memory = torch.full((3 * SLOT_BYTES * 8,), 0xFF, dtype=torch.uint8, device="cuda")
    turns = torch.zeros(PROGRAMS, 2, dtype=torch.int32, device="cuda")
    peers = PeerSums(torch.tensor([memory.data_ptr()], device="cuda"), turns, SLOT_BYTES * 8, 0, 1)
    for size in (160, 264):
        x, residual = (torch.randn(rows, size, device="cuda", dtype=dtype) for _ in range(2))
        weight = torch.randn(size, device="cuda")
        for _ in range(3):
            summed, normed = summed_rms_norm(x, residual, weight, EPS, 0.5, peers)
            right, right_norm = expected([x], residual, weight, 0.5)
            assert torch.equal(summed, right)
            tolerance = 1e-5 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(normed.double(), right_norm, atol=tolerance, rtol=tolerance)
    assert turns.tolist() == [[0, rows * 264]] * PROGRAMS


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none")
@pytest.mark.parametrize("world", [2, 4])
def test_rows_cross_in_whole_vectors(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that was read from memory is known to be a multiple of 16 bytes."""
    pytest.importorskip("triton", reason="needs triton")
    from deltaline_kernels.norm.peer_sums import PROGRAMS, PeerSums
    from deltaline_kernels.norm.summed import summed_rms_norm

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    memories, turns = meta(world, dtype=torch.int64), meta(PROGRAMS, 2, dtype=torch.int32)
    peers = PeerSums(memories, turns, SLOT_BYTES, 1, world)
    weight = meta(512, dtype=torch.float32)
    [compiled] = compile_launches(
        monkeypatch, lambda: summed_rms_norm(meta(7, 512), meta(7, 512), weight, EPS, 1.0, peers)
    )
    lines = compiled.asm["ptx"].splitlines()
    coming = [line for line in lines if "ld.volatile.global" in line]
    crossing = [line for line in lines if "st.global" in line]
    # Each is asked for once, and again while it has not come.
    assert len(coming) == 2 * (world - 1)
    # Sent, unwritten, and both that are returned; and the turn.
    assert len(crossing) == 2 * (world - 1) + 2 + 2
    assert not any(".b16" in line for line in coming + crossing)
