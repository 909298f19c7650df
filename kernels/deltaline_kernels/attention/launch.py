"""Order of the attention kernels on a GPU: short rows in splits, what puts them together, then long rows.

Where rows stand and what they see is read on the device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.attention.blocks import BlockLists
from deltaline_kernels.attention.combine import combine_kernel
from deltaline_kernels.attention.hopper_short import can_attend_short, launch_short
from deltaline_kernels.attention.hopper_tile import can_attend, launch_attend
from deltaline_kernels.attention.inputs import Keys, Queries
from deltaline_kernels.attention.kernel import attend_kernel
from deltaline_kernels.attention.plan import (
    COMBINE_REGISTERS,
    COMBINES,
    MOST_PARTIALS,
    Tile,
    choose_group,
    choose_hopper_tile,
    choose_parts,
    choose_tile,
    count_at_once,
)
from deltaline_kernels.device.overlap import can_overlap, launch_options
from deltaline_kernels.device.sizes import cdiv, pow2
from deltaline_kernels.rows import Rows


@lru_cache
def num_processors(device: torch.device) -> int:
    """Return the multiprocessors of a device; of a CPU, where the interpreter runs, two."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type != "cpu" else 2


def flex_decode_triton(queries: Queries, keys: Keys, rows: Rows, o: Tensor, lse: Tensor | None) -> None:
    """Write the rows' outputs to o `[T, HQ, DV]`, and to lse `[T, HQ]`. Checked by the caller."""
    for part, long in ((rows.short(), False), (rows.long(), True)):
        if not (part.num_rows and part.max_length and queries.q.shape[0]):
            continue
        if long and can_attend(queries, keys):
            launch_attend(queries, keys, part, o, lse)
        else:
            _launch(queries, keys, part, o, lse, long=long)


def _launch(queries: Queries, keys: Keys, rows: Rows, o: Tensor, lse: Tensor | None, *, long: bool) -> None:
    q, heads, blocks = queries.q, queries.heads, queries.blocks
    group = choose_group(heads, q.element_size()) if blocks is None or blocks.num_heads == 1 else 1
    max_length = min(rows.max_length, q.shape[0])
    on_hopper = not long and can_attend_short(queries, keys)
    if on_hopper:
        tile = choose_hopper_tile(heads, group, rows.num_rows, max_length)
    else:
        tile = choose_tile(heads, group, rows.num_rows, max_length, q.element_size(), long=long)
    if blocks is not None:
        tile = blocks.fit(tile)
    tokens = tile.tokens
    groups = heads.num_queries // group
    tiles = cdiv(max_length, tokens)
    columns = tokens * group
    item = columns * heads.value_dim + cdiv(2 * columns, 4) * 4
    tile, num_splits = _fit_splits(keys, rows, tile, blocks, tiles * groups * item)
    split, num_items = tile.split, num_splits * tiles * groups
    if num_splits == rows.num_rows:
        # Nothing to combine.
        split, num_items = 0, min(rows.num_rows * tiles, q.shape[0] // tokens + rows.num_rows) * groups
    partials = torch.empty(num_items * item, dtype=torch.float32, device=q.device) if split else q
    sinks, gate, parameters = queries.sinks, queries.gate, queries.modifiers.parameters
    constants = {
        "HAS_SINKS": sinks is not None,
        "HAS_GATE": gate is not None,
        "HAS_LSE": lse is not None,
        "GATE_ROW": 0 if gate is None else gate.stride(0),
        "GATE_HEAD": 0 if gate is None else gate.stride(1),
        "HQ": heads.num_queries,
        "DV": heads.value_dim,
        "GROUP": group,
    }
    items = {
        "DENSE": keys.page_table is None,
        "BLOCKS": None if blocks is None else blocks.sizes,
        "SPEC": queries.modifiers.spec,
        "SPLIT": split,
        "ROWS": count_at_once(rows.num_rows),
    }
    table = rows.control if blocks is None else blocks.table
    sinks, gate, lse = (q if tensor is None else tensor for tensor in (sinks, gate, lse))
    shared = (parameters, table, sinks, gate, o, lse, partials)
    overlap = bool(split) and can_overlap(q)
    programs = min(num_items, tile.programs * num_processors(q.device))
    if on_hopper:
        outputs = (sinks, gate, o, lse, partials)
        launch_short(queries, keys, rows, tile, programs, outputs, split=split, overlap=overlap, **constants)
    else:
        _launch_attend(queries, keys, rows, tile, programs, shared, overlap=overlap, **constants, **items)
    if split:
        _launch_combine(queries, rows, tile, max_length, shared, overlap=overlap, **constants, **items)


def _launch_attend(
    queries: Queries,
    keys: Keys,
    rows: Rows,
    tile: Tile,
    programs: int,
    shared: tuple[Tensor, ...],
    *,
    overlap: bool,
    **constants: Any,
) -> None:
    q, heads = queries.q, queries.heads
    attend_kernel[(programs,)](
        q,
        keys.k,
        keys.k if keys.v is None else keys.v,
        rows.control if keys.page_table is None else keys.page_table,
        rows.control,
        *shared,
        q.stride(0),
        rows.control.stride(0),
        keys.page_size if keys.page_table is None else keys.page_table.stride(0),
        rows.num_rows,
        SCALE=heads.scale,
        HKV=heads.num_keys,
        D=heads.key_dim,
        Q_HEAD=q.stride(1),
        PAGE=0 if keys.page_table is None else keys.page_size,
        HEADS_FIRST=keys.heads_first,
        SHARED=keys.shared,
        PADDED=tile.columns // tile.tokens,
        BLOCK_M=tile.columns,
        BLOCK_N=tile.keys,
        LATENT=heads.is_latent,
        BLOCK_D=max(16, pow2(heads.key_dim - heads.behind_latent)),
        BLOCK_DV=max(16, pow2(heads.value_dim)),
        BLOCK_BEHIND=max(16, pow2(heads.behind_latent)) if heads.behind_latent else 0,
        MANY=rows.num_rows > constants["ROWS"],
        STAGES=tile.stages,
        OVERLAP=overlap,
        num_warps=tile.num_warps,
        **constants,
    )


def _launch_combine(
    queries: Queries,
    rows: Rows,
    tile: Tile,
    max_length: int,
    shared: tuple[Tensor, ...],
    *,
    overlap: bool,
    **constants: Any,
) -> None:
    heads, num_rows = queries.heads, rows.num_rows
    channels, splits = choose_parts(heads.value_dim, tile.columns, num_rows * max_length * heads.num_queries)
    parts = max_length * heads.num_queries * cdiv(heads.value_dim, channels)
    at_once = max(1, min(num_rows, COMBINES * num_processors(queries.q.device) // parts))
    combine_kernel[(parts, at_once)](
        rows.control,
        *shared,
        rows.control.stride(0),
        num_rows,
        TOKENS=tile.tokens,
        BLOCK_DV=channels,
        BLOCK_S=splits,
        OVERLAP=overlap,
        num_warps=4,
        # Ranges of each head don't find room.
        maxnreg=None if queries.modifiers.spec.ranges_by_head else COMBINE_REGISTERS,
        **constants,
        **launch_options(overlap=overlap),
    )


def _fit_splits(keys: Keys, rows: Rows, tile: Tile, blocks: BlockLists | None, num_values: int) -> tuple[Tile, int]:
    """Return the tile, with splits so long that what they leave for the combine has room, `num_values` of each; and
    `_most_splits` of it."""
    while True:
        num_splits = _most_splits(keys, rows, tile, blocks)
        if num_splits == rows.num_rows or num_splits * num_values <= MOST_PARTIALS:
            return tile, num_splits
        tile = replace(tile, split=2 * tile.split)


def _most_splits(keys: Keys, rows: Rows, tile: Tile, blocks: BlockLists | None) -> int:
    """Return how many splits all rows can have together, whichever pages they share."""
    if tile.split == 0:
        return rows.num_rows
    if blocks is not None:
        return rows.num_rows * max(1, cdiv(blocks.num_columns, tile.split))
    return rows.num_rows * max(1, cdiv(keys.capacity, tile.split))
