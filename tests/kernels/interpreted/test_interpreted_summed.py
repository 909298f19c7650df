"""Sum, residual and norm in one launch, in Triton's interpreter: as rank 0 of two, of which the other has said already
what it has."""

from __future__ import annotations

import pytest
import torch
from kernels.norm.test_summed import EPS, HALF_BYTES, expected

ROWS, SIZE = 70, 40


@pytest.mark.parametrize(("rank", "residual_dtype"), [(0, torch.float16), (1, torch.float32)])
def test_two_ranks_add_in_their_order_and_take_halves_in_turns(rank: int, residual_dtype: torch.dtype) -> None:
    from deltaline_kernels.norm.summed import PROGRAMS, PeerSums, summed_rms_norm

    memories = [torch.full((2, HALF_BYTES // 2), float("nan"), dtype=torch.float16) for _ in range(2)]
    flags = [torch.zeros(PROGRAMS, 2, dtype=torch.int32) for _ in range(2)]
    counts, other = torch.full((PROGRAMS,), 2**31 - 2, dtype=torch.int32), 1 - rank  # they wrap in the second call
    addresses = [torch.tensor([one.data_ptr() for one in each]) for each in (memories, flags)]
    peers = PeerSums(addresses[0], addresses[1], counts, HALF_BYTES, rank, 2)
    weight = torch.randn(SIZE)
    for count in (2**31 - 1, -(2**31)):
        parts = [torch.randn(ROWS, SIZE).half() for _ in range(2)]
        residual = torch.randn(ROWS, SIZE).to(residual_dtype)
        memories[other].fill_(float("nan"))
        memories[other][count & 1].view(-1)[: parts[other].numel()] = parts[other].view(-1)
        memories[rank].fill_(float("nan"))
        flags[rank][:, other] = count
        summed, normed = summed_rms_norm(parts[rank], residual, weight, EPS, 0.25, peers)
        right, right_norm = expected(parts, residual, weight, 0.25)
        torch.testing.assert_close(summed, right, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(normed.double(), right_norm, atol=5e-3, rtol=5e-3)
        assert (counts == count).all() and (flags[other][:, rank] == count).all()
        assert memories[rank][1 - (count & 1)].isnan().all()
