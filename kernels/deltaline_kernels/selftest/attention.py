"""What the self-test computes for attention: keys and values, or latents, that are stored in pages, and attention over
them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.attention import Modifiers, find_modifier, flex_decode, flex_decode_reference
from deltaline_kernels.attention.plan import (
    MOST_ROWS,
    AttentionHeads,
    choose_group,
    choose_hopper_tile,
    choose_parts,
    choose_tile,
    count_at_once,
)
from deltaline_kernels.rotary import rotate_and_store, rotate_and_store_reference
from deltaline_kernels.rows import Rows
from deltaline_kernels.selftest.shapes import Compared, Fill, Shapes

# Positions of rows: at the beginning, at both sides of pages of any size, and where keys are split over programs.
POSITIONS = (0, 63, 256, 2049, 700)


def attention_batches(num_heads: int, max_draft: int, device: torch.device | str) -> dict[str, Rows]:
    """Rows of every kind at positions of every kind; on a GPU more of them than one wave of programs has."""
    del num_heads  # as many rows whatever they are
    n, count = max_draft, len(POSITIONS)
    # On a GPU long enough for several tiles of queries.
    long = 130 if torch.device(device).type == "cpu" else 330
    many = count if torch.device(device).type == "cpu" else 64
    lengths = {"decode": [1] * many, "verify": [n] * count, "prefill": [long, 37]}
    batches = {}
    for kind, of_rows in lengths.items():
        lines, zeros = list(range(1, len(of_rows) + 1)), [0] * len(of_rows)
        committed = zeros if kind == "verify" else of_rows
        positions = [POSITIONS[i % count] for i in range(len(of_rows))]
        batches[kind] = Rows.build(
            of_rows, lines, lines, committed, zeros, zeros, max_short=n, device=device, position=positions
        )
    return batches


def short_kernels(heads: AttentionHeads, num_rows: int, longest: int) -> tuple[Any, ...]:
    """What kernels of so many short rows of 16-bit values are compiled for, the longest of them of so many tokens."""
    group = choose_group(heads, 2)
    tiles = (
        choose_tile(heads, group, num_rows, longest, 2, long=False),
        choose_hopper_tile(heads, group, num_rows, longest),
    )
    num_queries = num_rows * longest * heads.num_queries
    parts = (choose_parts(heads.value_dim, tile.columns, num_queries) for tile in tiles)
    return *tiles, *parts, count_at_once(num_rows)


def short_attention_batches(heads: AttentionHeads, max_draft: int, device: torch.device | str) -> dict[str, Rows]:
    """The fewest short rows for each of the kernels that rows of one token and of whole drafts have, up to MOST_ROWS.

    Only the first rows run: the others, which are skipped, are there to be counted.
    """
    found = dict[Any, tuple[int, int]]()
    for num_rows in range(1, MOST_ROWS + 1):
        # Of a batch with few tokens a row may have no more.
        drafts = {min(max_draft, num_rows * tokens) for tokens in (4, 8, 16, max_draft)}
        for length in sorted({1} | drafts):
            found.setdefault(short_kernels(heads, num_rows, length), (num_rows, length))
    batches = {}
    for num_rows, n in found.values():
        num_live = min(num_rows, len(POSITIONS))
        lines = [*range(1, num_live + 1), *[-1] * (num_rows - num_live)]
        lengths, zeros = [n] * num_rows, [0] * num_rows
        positions = [POSITIONS[-i % len(POSITIONS)] for i in range(2, num_rows + 2)]
        batches[f"{num_rows} rows of {n}"] = Rows.build(
            lengths, lines, lines, lengths, zeros, zeros, max_short=max_draft, device=device, position=positions
        )
    return batches


def compare_attention(fill: Fill, rows: Rows, shapes: Shapes) -> Iterator[Compared]:
    """Yield the name of each family, what it computed and what its reference computed."""
    num_heads, num_kv_heads, head_dim = shapes.heads.num_value_heads, shapes.heads.num_key_heads, shapes.heads.key_dim
    rotary_dim, page_size, dtype = shapes.rotary_dim, shapes.page_size, shapes.dtype
    num_tokens = int(rows.query_start_loc[-1])
    longest, device = max(POSITIONS) + rows.max_length, rows.control.device
    table = _page_table(rows, longest, page_size)
    query_dim, gate = 2 * head_dim if shapes.is_gated else head_dim, None
    projected = fill(num_tokens, num_heads * query_dim + 2 * num_kv_heads * head_dim).to(dtype)
    q, k, v = projected.split([num_heads * query_dim, *[num_kv_heads * head_dim] * 2], dim=-1)
    q = q.unflatten(-1, (num_heads, query_dim))
    if shapes.is_gated:
        q, gate = q.chunk(2, dim=-1)
    k, v = (part.unflatten(-1, (num_kv_heads, head_dim)) for part in (k, v))
    angles = fill(longest, rotary_dim // 2)
    rotary = torch.cat((angles.cos(), angles.sin()), dim=-1)
    size = table.numel() + 1, page_size, num_kv_heads, head_dim
    pages = fill(*size).to(dtype), fill(*size).to(dtype)
    q_norm, k_norm = (fill(head_dim) if shapes.norms_heads else None for _ in range(2))
    want_pages = pages[0].clone(), pages[1].clone()
    got = rotate_and_store(q, k, v, q_norm, k_norm, 1e-6, rotary, *pages, table, rows)
    want = rotate_and_store_reference(q, k, v, q_norm, k_norm, 1e-6, rotary, *want_pages, table, rows)
    yield "rotary", [got, *pages], [want, *want_pages]

    modifiers = Modifiers(mask=find_modifier("causal")(), device=device)
    o = flex_decode(want, *want_pages, table, rows, modifiers=modifiers, gate=gate)
    o_want = flex_decode_reference(want, *want_pages, table, rows, modifiers=modifiers, gate=gate)
    assert isinstance(o, Tensor) and isinstance(o_want, Tensor)  # without the sums of the softmax
    yield "attention", [o], [o_want]


def compare_latents(fill: Fill, rows: Rows, shapes: Shapes) -> Iterator[Compared]:
    """Yield the name of each family, what it computed and what its reference computed."""
    num_heads, kept, latent_dim = shapes.heads.num_value_heads, shapes.heads.key_dim, shapes.heads.value_dim
    num_tokens, dtype, device = int(rows.query_start_loc[-1]), shapes.dtype, rows.control.device
    longest = max(POSITIONS) + rows.max_length
    table = _page_table(rows, longest, shapes.page_size)
    # What turns is behind the latent; of a latent with nothing behind it the end.
    first = kept - max(2, kept - latent_dim)
    q = fill(num_tokens, num_heads, kept).to(dtype)
    v, k = fill(num_tokens, 1, kept).to(dtype).split((first, kept - first), dim=-1)
    angles = fill(longest, shapes.rotary_dim // 2)
    rotary = torch.cat((angles.cos(), angles.sin()), dim=-1)
    pages = fill(table.numel() + 1, shapes.page_size, 1, kept).to(dtype)
    want_pages = pages.clone()
    stored = (q[..., first:], k, v, None, None, 1e-6, rotary)
    got = rotate_and_store(*stored, pages[..., first:], pages[..., :first], table, rows)
    want = rotate_and_store_reference(*stored, want_pages[..., first:], want_pages[..., :first], table, rows)
    yield "rotary", [got, pages], [want, want_pages]

    modifiers = Modifiers(mask=find_modifier("causal")(), device=device)
    options = {"modifiers": modifiers, "scale": kept**-0.5, "value_dim": latent_dim}
    o = flex_decode(q, want_pages, None, table, rows, **options)
    o_want = flex_decode_reference(q, want_pages, None, table, rows, **options)
    assert isinstance(o, Tensor) and isinstance(o_want, Tensor)  # without the sums of the softmax
    yield "latent attention", [o], [o_want]


def _page_table(rows: Rows, longest: int, page_size: int) -> Tensor:
    """Pages for `longest` tokens of each line, in an order of no meaning; line 0 and page 0 are nobody's."""
    num_lines, max_pages, device = int(rows.write_line.max()), -(-longest // page_size), rows.control.device
    order = torch.randperm(num_lines * max_pages, generator=torch.Generator().manual_seed(0)) + 1
    table = torch.zeros(num_lines + 1, max_pages, dtype=torch.int32, device=device)
    table[1:] = order.view(num_lines, max_pages).to(device, torch.int32)
    return table
