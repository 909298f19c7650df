"""How hyper-connections are cut into programs: nothing is left out, and nothing depends on what it must not."""

from __future__ import annotations

import itertools

import pytest
import torch

from deltaline_kernels.mhc import plan
from deltaline_kernels.mhc.gates import count_columns

TOKENS = (1, 7, 16, 17, 32, 33, 64, 65, 512, 513, 4096, 1_000_000)


# Of a Hopper, and the least of the GPUs that are served.
@pytest.mark.parametrize("shared_bytes", [227 << 10, 99 << 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_every_input_is_in_one_program(num_tokens: int, dtype: torch.dtype, shared_bytes: int) -> None:
    for streams, hidden, norm in itertools.product(range(1, 9), (1, 200, 1280, 4096, 7168), (False, True)):
        made = plan.plan_pre(num_tokens, streams, hidden, dtype, norm=norm, shared_bytes=shared_bytes)
        inputs, part = streams * hidden, made.steps * made.block_k
        assert made.splits * part >= inputs > (made.splits - 1) * part
        assert made.chunk % made.block_m == 0 and made.chunk > 0
        assert made.block_h >= hidden or not norm
        for size in (made.block_m, made.block_k):
            assert size >= 16 and size & (size - 1) == 0
        # Only bf16 has products of 64 tokens: others have operands in registers, which an assembler overwrites.
        assert made.block_m < 64 or (dtype == torch.bfloat16 and made.warps % 4 == 0)
        # Of no more blocks than there are, one ahead; what so many take fits, or the products could not be launched.
        assert 1 <= made.stages <= made.steps + 1
        columns = 3 * count_columns(streams * (2 + streams))
        assert made.stages * made.block_k * (made.block_m + columns) * dtype.itemsize <= shared_bytes
        assert made.collapse_warps in (1, 2, 4, 8, 16)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_every_channel_is_in_one_program(num_tokens: int) -> None:
    for hidden in (1, 200, 1280, 4096, 7168):
        block_h, warps = plan.plan_post(num_tokens, hidden)
        assert block_h & (block_h - 1) == 0 and warps & (warps - 1) == 0


def test_the_order_of_sums_is_that_of_the_bucket() -> None:
    """Whatever the number of tokens in it."""
    bounds = [0, *(bucket.tokens for bucket in plan.BUCKETS)]
    assert bounds == sorted(set(bounds)) and bounds[-1] == plan.ANY
    for first, last in itertools.pairwise(bounds):
        ends = (first + 1, min(last, first + 5000))
        assert len({plan.plan_pre(n, 4, 4096, torch.bfloat16, norm=True) for n in ends}) == 1
