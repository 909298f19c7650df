"""How the kernels of hyper-connections are cut into programs.

A plan follows from the bucket of the number of tokens, the streams, the channels, the dtype and the device's shared
memory, never from contents: the order of every sum is the same for all numbers of tokens in a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltaline_kernels.device.sizes import SHARED_BYTES, cdiv, pow2
from deltaline_kernels.mhc.gates import NUM_TERMS, count_columns

ANY = 1 << 62
MOST_CHUNK = 4096


@dataclass(frozen=True)
class Bucket:
    """A row of the table: batches of at most `tokens` tokens.

    Args:
        product: tokens and inputs of a program's tile, warps, tiles on their way, about how many programs at once.
        collapse: channels of a program at most where no norm needs all of them, and channels x streams of a thread.
        chunk: tokens that are multiplied before they are collapsed, which bounds the partial sums. That their streams
            stay in the L2 between the two is no gain: on an H200 chunks of 16 to 64 MiB take 5 to 40% longer than one.
    """

    tokens: int
    product: tuple[int, int, int, int, int]
    collapse: tuple[int, int]
    chunk: int = MOST_CHUNK


@dataclass(frozen=True)
class Plan:
    """`splits` programs per `block_m` tokens, each with `steps` blocks of `block_k` inputs; `chunk` tokens at once."""

    block_m: int
    block_k: int
    splits: int
    steps: int
    warps: int
    stages: int
    chunk: int
    block_h: int
    collapse_warps: int


# Products of 64 or more tokens are asynchronous ones, whose operands come from shared memory.
BUCKETS = (
    Bucket(16, (16, 32, 2, 4, 132), (4096, 64)),
    Bucket(32, (32, 128, 4, 2, 128), (4096, 64)),
    Bucket(64, (64, 128, 4, 3, 132), (4096, 64)),
    Bucket(512, (64, 64, 4, 4, 264), (4096, 64)),
    Bucket(1024, (128, 64, 8, 4, 264), (1024, 64)),
    Bucket(2048, (128, 64, 8, 4, 264), (1024, 64)),
    Bucket(ANY, (128, 64, 8, 4, 264), (1024, 64)),
)
# Of fp32 and fp16, whose products are not those of bf16: tokens, inputs, warps, tiles on their way.
EXACT = (16, 32, 4, 1)
MAX_WARPS = 16
# Channels of a program of `mhc_post`, and warps.
POST_BUCKETS = ((64, (512, 4)), (ANY, (1024, 4)))


def find_bucket(num_tokens: int) -> Bucket:
    """Return the row of the table for a batch."""
    return next(bucket for bucket in BUCKETS if num_tokens <= bucket.tokens)


def plan_pre(
    num_tokens: int,
    streams: int,
    hidden: int,
    dtype: torch.dtype,
    *,
    norm: bool,
    shared_bytes: int = SHARED_BYTES,
) -> Plan:
    """Return how a batch's gates are computed and its streams collapsed; a program may have so much shared memory."""
    bucket = find_bucket(num_tokens)
    block_m, most, warps, stages, programs = bucket.product
    if dtype != torch.bfloat16:
        block_m, most, warps, stages = EXACT
    fitting = _fitting_inputs(block_m, streams, shared_bytes)
    most = min(most, 1 << (fitting.bit_length() - 1))
    inputs = streams * hidden
    blocks = cdiv(min(bucket.chunk, bucket.tokens), block_m)
    splits, steps, block_k = _cut(inputs, most, max(1, programs // blocks))
    limit, values = bucket.collapse
    block_h = pow2(hidden) if norm else min(pow2(hidden), limit)
    return Plan(
        block_m=block_m,
        block_k=block_k,
        splits=splits,
        steps=steps,
        warps=warps,
        stages=1 if stages == 1 else min(steps + 1, stages, fitting // block_k),
        chunk=bucket.chunk,
        block_h=block_h,
        collapse_warps=_warps(block_h * pow2(streams), values),
    )


def plan_post(num_tokens: int, hidden: int) -> tuple[int, int]:
    """Return the channels of a program of `mhc_post`, and its warps."""
    block_h, warps = next(sizes for tokens, sizes in POST_BUCKETS if num_tokens <= tokens)
    return min(block_h, max(16, pow2(hidden))), warps


def _cut(size: int, most: int, wanted: int) -> tuple[int, int, int]:
    """Return splits, steps of each and the size of a step: about as many splits as are wanted, none of them empty."""
    block = max(16, min(most, pow2(cdiv(size, wanted))))
    steps = cdiv(size, wanted * block)
    return cdiv(size, steps * block), steps, block


def _fitting_inputs(block_m: int, streams: int, shared_bytes: int) -> int:
    """Return how many inputs of a tile of bf16 streams and of their weights' terms so much shared memory holds."""
    columns = NUM_TERMS * count_columns(streams * (2 + streams))
    return shared_bytes // (torch.bfloat16.itemsize * (block_m + columns))


def _warps(values: int, of_thread: int) -> int:
    return max(1, min(MAX_WARPS, values // (32 * of_thread)))
