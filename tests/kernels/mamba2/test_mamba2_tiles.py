"""choose_tile, choose_short_tile: a program holds as much of a state as its registers have room for."""

from __future__ import annotations

import pytest

from deltaline_kernels.mamba2.inputs import MambaHeads
from deltaline_kernels.mamba2.plan import LOAD_BYTES, ROW_BYTES, ROW_THREADS, choose_short_tile, choose_tile


@pytest.mark.parametrize("state_bytes", [2, 4])
@pytest.mark.parametrize("state_dim", [1, 5, 16, 33, 64, 128, 200, 256])
def test_a_block_is_what_threads_load_at_once(state_dim: int, state_bytes: int) -> None:
    for num_rows in (1, 1000):
        tile = choose_tile(MambaHeads(1, 8, 64, state_dim), num_rows, state_bytes, one=True)
        assert tile.parts >= 1
        assert tile.block_s & (tile.block_s - 1) == 0 and tile.block_s >= 16
        assert tile.block_s == 16 or tile.block_s * state_bytes <= ROW_BYTES
        short = choose_short_tile(MambaHeads(1, 8, 64, state_dim), num_rows, state_bytes)
        assert short.num_warps == 1 and short.records >= 1
        assert short.block_s * state_bytes == ROW_THREADS * LOAD_BYTES
