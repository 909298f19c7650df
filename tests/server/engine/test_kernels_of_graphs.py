"""What graphs run of attention to short rows is what the self-test compiled, by many threads, and compared."""

from __future__ import annotations

from typing import Any

import pytest
from rigs.limits import make_limits

from deltaline_kernels.attention import plan
from deltaline_kernels.attention.plan import AttentionHeads
from deltaline_kernels.selftest.attention import attention_batches, short_attention_batches
from deltaline_server.engine.graphs import make_buckets

# Heads of queries and of keys, their size, and whether their values are the first 512 channels of keys.
HEADS = [(24, 4, 256), (16, 2, 128), (32, 8, 128), (8, 1, 128), (64, 8, 128), (32, 32, 64)]
LATENTS = [(32, 1, 576), (16, 1, 576), (128, 1, 576)]


def kernels(heads: AttentionHeads, num_rows: int, num_tokens: int, longest: int) -> tuple[Any, ...]:
    """What the kernels are compiled for of so many short rows, of `num_tokens` in all."""
    group, length = plan.choose_group(heads, 2), min(longest, num_tokens)
    if heads.is_latent:
        tile = plan.choose_latent_tile(heads, group, num_rows, length)
    else:
        tile = plan.choose_tile(heads, group, num_rows, length, 2, long=False)
    parts = plan.choose_parts(heads.value_dim, num_rows * length * heads.num_queries)
    return tile, plan.count_at_once(num_rows), parts


@pytest.mark.parametrize("draft", [1, 4, 5, 8, 16])
@pytest.mark.parametrize("sizes", [*HEADS, *LATENTS], ids=str)
def test_the_self_test_compiles_what_graphs_run(sizes: tuple[int, int, int], draft: int) -> None:
    num_queries, num_keys, dim = sizes
    heads = AttentionHeads(num_queries, num_keys, dim, min(dim, 512), 1.0, is_latent=dim > 512)
    tested = set()
    for rows in (*attention_batches(num_keys, draft, "cpu").values(), *short_attention_batches(draft, "cpu").values()):
        short = rows.short()
        if short.num_rows:
            tested.add(kernels(heads, short.num_rows, int(rows.query_start_loc[-1]), short.max_length))
    missing = set()
    for bucket in make_buckets(make_limits(short_rows=256, long_rows=8, chunk_tokens=8192), draft):
        num_rows, num_tokens = bucket.layout.short_rows, bucket.layout.tokens
        if num_rows and kernels(heads, num_rows, num_tokens, bucket.longest_short) not in tested:
            missing.add((num_rows, num_tokens))
    assert not missing
