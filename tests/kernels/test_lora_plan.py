"""How batches of adapters are cut into programs."""

from __future__ import annotations

import itertools

import pytest
import torch

from deltaline_kernels.lora import plan


def test_tiles_suffice_for_every_mix_and_none_is_spare() -> None:
    for num_tokens, num_groups, rows in itertools.product(range(9), range(1, 4), (1, 2, 3)):
        mixes = itertools.product(range(num_tokens + 1), repeat=num_groups)
        most = max(sum(-(-n // rows) for n in mix) for mix in mixes if sum(mix) <= num_tokens)
        assert plan.count_tiles(num_tokens, num_groups, rows) == most


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
        for size in (shrink.block_k, shrink.block_r, expand.block_n, expand.block_r):
            assert size >= plan.RANK_UNIT and size & (size - 1) == 0
        fused = plan.plan_fused(bucket, num_tokens, rank, inputs, dtype)
        if fused is not None:
            assert fused.steps * fused.block_k >= inputs > (fused.steps - 1) * fused.block_k


def test_buckets_cover_every_batch_in_order() -> None:
    bounds = [bucket.tokens for bucket in plan.BUCKETS]
    assert bounds == sorted(bounds)
    assert plan.find_bucket(1 << 40, 512) is plan.BUCKETS[-1]
    assert plan.find_bucket(1, 1) is plan.BUCKETS[0]


def test_a_tile_never_has_the_rows_of_an_asynchronous_product() -> None:
    """From 64 rows on, Triton takes the products of Hopper that an assembler gets wrong."""
    assert {plan.tile_rows(num_tokens) for num_tokens in (1, 512, 513, 1_000_000)} == {16, 32}
