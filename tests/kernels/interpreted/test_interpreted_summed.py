"""Sum, residual and norm in one launch, in Triton's interpreter: as one rank of several, of which the others have
already sent what they have."""

from __future__ import annotations

import pytest
import torch
from kernels.norm.test_summed import EPS, SLOT_BYTES, expected
from torch import Tensor

SIZE = 40
# Of calls, in which the parts of the memory take turns: more than programs, fewer than in the call before.
ROWS = (70, 3, 1, 66, 2)


def slots(memory: Tensor, world: int) -> Tensor:
    """The memory as int16 `[part, rank, values]`."""
    return memory.view(torch.int16).view(3, world, -1)


@pytest.mark.parametrize(
    ("world", "rank", "residual_dtype"), [(2, 0, torch.float16), (2, 1, torch.float32), (3, 1, torch.float32)]
)
def test_ranks_add_in_their_order_and_parts_take_turns(world: int, rank: int, residual_dtype: torch.dtype) -> None:
    from deltaline_kernels.norm.peer_sums import PROGRAMS, PeerSums
    from deltaline_kernels.norm.summed import summed_rms_norm

    memories = [torch.full((3 * world * SLOT_BYTES,), 0xFF, dtype=torch.uint8) for _ in range(world)]
    turns, others = torch.zeros(PROGRAMS, 2, dtype=torch.int32), [one for one in range(world) if one != rank]
    peers = PeerSums(torch.tensor([one.data_ptr() for one in memories]), turns, SLOT_BYTES, rank, world)
    weight = torch.randn(SIZE)
    own = slots(memories[rank], world)
    for call, rows in enumerate(ROWS):
        parts = [torch.randn(rows, SIZE).half() for _ in range(world)]
        parts[rank][0, 3], parts[others[0]][0, 5], parts[rank][-1, 7] = -0.0, -0.0, float("inf")
        parts[rank].view(torch.int16)[-1, 9] = -1  # the NaN that is never sent
        residual = torch.randn(rows, SIZE).to(residual_dtype)
        part, count = call % 3, rows * SIZE
        assert (own[part] == -1).all()
        for other in others:
            own[part, other, :count] = parts[other].view(torch.int16).flatten()
        summed, normed = summed_rms_norm(parts[rank], residual, weight, EPS, 0.25, peers)
        right, right_norm = expected(parts, residual, weight, 0.25)
        torch.testing.assert_close(summed, right, atol=2e-3, rtol=2e-3, equal_nan=True)
        torch.testing.assert_close(normed.double(), right_norm, atol=5e-3, rtol=5e-3, equal_nan=True)
        for other in others:
            theirs = slots(memories[other], world)
            sent = theirs[part, rank]
            assert (sent[:count] != -1).all() and (sent[count:] == -1).all()
            torch.testing.assert_close(
                sent[:count].view(torch.float16), parts[rank].flatten(), rtol=0, atol=0, equal_nan=True
            )
            theirs[part] = -1  # as the other rank does
        assert (own[(call + 2) % 3] == -1).all() and (own[:, rank] == -1).all()
        assert turns.tolist() == [[(call + 1) % 3, count]] * PROGRAMS


def test_a_summand_without_rows_is_refused() -> None:
    from deltaline_kernels.norm.peer_sums import PeerSums
    from deltaline_kernels.norm.summed import summed_rms_norm

    nothing = torch.zeros(0, dtype=torch.int32)
    peers = PeerSums(nothing, nothing, SLOT_BYTES, 0, 2)
    for rows in (0, SLOT_BYTES):
        x = torch.zeros(rows, SIZE)
        with pytest.raises(ValueError, match=rf"summand: expected 1 .. {SLOT_BYTES} bytes, got {x.numel() * 4}"):
            summed_rms_norm(x, x, torch.ones(SIZE), EPS, 1.0, peers)
