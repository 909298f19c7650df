"""What graphs run of attention to short rows is what the self-test compiled, by many threads, and compared.

Of 16-bit values, of up to 256 rows, and of contexts that are longer than a split: of shorter ones nothing is combined.
"""

from __future__ import annotations

import pytest
from rigs.limits import make_limits

from deltaline_kernels.attention.plan import AttentionHeads
from deltaline_kernels.selftest.attention import short_attention_batches, short_kernels
from deltaline_server.engine.graphs import make_buckets

# Heads of queries and of keys, and their size; values of latents are the first 512 channels of their keys.
HEADS = [(24, 4, 256), (16, 2, 128), (32, 8, 128), (8, 1, 128), (2, 1, 128), (64, 8, 128), (32, 32, 64)]
LATENTS = [(32, 1, 576), (16, 1, 576), (128, 1, 576)]


@pytest.mark.parametrize("most", [3, 48, 256])
@pytest.mark.parametrize("draft", [1, 4, 5, 8, 16])
@pytest.mark.parametrize("sizes", [*HEADS, *LATENTS], ids=str)
def test_the_self_test_compiles_what_graphs_run(sizes: tuple[int, int, int], draft: int, most: int) -> None:
    num_queries, num_keys, dim = sizes
    heads = AttentionHeads(num_queries, num_keys, dim, min(dim, 512), 1.0, is_latent=dim > 512)
    tested = set()
    for rows in short_attention_batches(heads, draft, "cpu").values():
        short = rows.short()
        tested.add(short_kernels(heads, short.num_rows, min(short.max_length, int(rows.query_start_loc[-1]))))
    missing = set()
    for bucket in make_buckets(make_limits(short_rows=most, long_rows=8, chunk_tokens=8192), draft):
        num_rows, longest = bucket.layout.short_rows, min(bucket.longest_short, bucket.layout.tokens)
        if num_rows and short_kernels(heads, num_rows, longest) not in tested:
            missing.add((num_rows, longest))
    assert not missing
