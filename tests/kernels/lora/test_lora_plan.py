"""How batches of adapters are cut into programs."""

from __future__ import annotations

import itertools

import pytest
import torch

from deltaline_kernels.device.sizes import count_tiles
from deltaline_kernels.lora import plan


def test_tiles_suffice_for_every_mix_and_none_is_spare() -> None:
    for num_tokens, num_groups, rows in itertools.product(range(9), range(1, 4), (1, 2, 3)):
        mixes = itertools.product(range(num_tokens + 1), repeat=num_groups)
        most = max(sum(-(-n // rows) for n in mix) for mix in mixes if sum(mix) <= num_tokens)
        assert count_tiles(num_tokens, num_groups, rows) == most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 64, 65, 512, 513, 8192, 1_000_000])
def test_every_input_and_rank_is_in_one_program(num_tokens: int, dtype: torch.dtype) -> None:
    for rank, inputs in itertools.product((1, 8, 16, 17, 64, 256, 512), (1, 63, 2048, 4096, 5000, 28_672)):
        bucket = plan.find_bucket(num_tokens, rank)
        shrink = plan.plan_shrink(bucket, num_tokens, rank, inputs, dtype)
        part = shrink.steps * shrink.block_k
        assert shrink.splits * part >= inputs > (shrink.splits - 1) * part
        assert shrink.splits <= bucket.shrink[0]
        assert shrink.block_k % (shrink.ways * plan.RANK_UNIT) == 0
        assert shrink.eager_rows <= min(rank, shrink.block_r)
        expand = plan.plan_expand(bucket, num_tokens, rank, dtype)
        assert shrink.block_m == expand.block_m == plan.piece_rows(num_tokens)
        assert plan.tile_rows(num_tokens, rank) % shrink.block_m == 0
        for size in (shrink.block_k, shrink.block_r, expand.block_n, expand.block_r):
            assert size >= plan.RANK_UNIT and size & (size - 1) == 0


def test_only_dense_tiles_have_the_rows_of_an_asynchronous_product() -> None:
    """From 64 rows on, Triton takes the products of Hopper that an assembler gets wrong when registers feed them."""
    sizes = (1, 512, 513, 1023, 1024, 1_000_000)
    assert {plan.piece_rows(num_tokens) for num_tokens in sizes} == {16, 32}
    assert {plan.tile_rows(num_tokens, 63) for num_tokens in sizes} == {16, 32}
    assert [plan.tile_rows(num_tokens, 64) for num_tokens in sizes] == [16, 16, 32, 32, 128, 128]


@pytest.mark.parametrize("num_tokens", [1024, 2048, 2049, 8192, 1_000_000])
def test_every_input_and_rank_is_in_one_program_of_a_dense_tile(num_tokens: int) -> None:
    for rank, inputs in itertools.product((64, 65, 128, 130, 256, 320, 512), (1, 63, 2048, 5000, 28_672)):
        dense = plan.plan_dense(num_tokens, plan.tile_rows(num_tokens, rank), rank, inputs, torch.bfloat16)
        assert dense is not None
        assert dense.shrink_steps * dense.shrink_k >= inputs > (dense.shrink_steps - 1) * dense.shrink_k
        # Whole blocks of either half of the work, and what an expand reads a shrink has written.
        assert dense.columns % dense.shrink_r == dense.columns % dense.expand_r == dense.shrink_r % dense.expand_r == 0
        assert dense.columns >= rank > dense.columns - max(dense.shrink_r, dense.expand_r)
        for size in (dense.shrink_r, dense.shrink_k, dense.expand_n, dense.expand_r):
            assert size >= plan.RANK_UNIT and size & (size - 1) == 0
        # An asynchronous product is that of four warps.
        assert dense.shrink_warps % 4 == dense.expand_warps % 4 == 0


def test_dense_tiles_are_for_many_tokens_of_high_rank_in_bf16() -> None:
    assert plan.plan_dense(8192, plan.DENSE_TILE, 63, 2048, torch.bfloat16) is None
    assert plan.plan_dense(8192, plan.LARGE_TILE, 64, 2048, torch.bfloat16) is None
    assert plan.plan_dense(8192, plan.DENSE_TILE, 64, 2048, torch.float16) is None
    assert plan.plan_dense(8192, plan.DENSE_TILE, 64, 2048, torch.float32) is None
