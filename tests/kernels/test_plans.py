"""choose_plan of the recurrences: rows in parts where few programs would run, whole where parts would wait in turn.
And choose_tile of Mamba-1's, and the splits of attention's short rows with what puts them together.
"""

from __future__ import annotations

from typing import Any

import pytest

from deltaline_kernels.attention.plan import AttentionHeads, choose_hopper_tile, choose_parts
from deltaline_kernels.device.delta_rule.inputs import DeltaHeads
from deltaline_kernels.device.row_splits import RowSplits
from deltaline_kernels.gated_delta import plan as gated_delta
from deltaline_kernels.kda import plan as kda
from deltaline_kernels.mamba1 import plan as scan
from deltaline_kernels.mamba1.inputs import ScanSizes
from deltaline_kernels.mamba2 import plan as mamba2
from deltaline_kernels.mamba2.inputs import MambaHeads
from deltaline_kernels.rows import WAYPOINT_TOKENS


def delta(num_key_heads: int, num_value_heads: int, key_dim: int = 128) -> DeltaHeads:
    return DeltaHeads(num_key_heads, num_value_heads, key_dim, 128, 1.0, 1e-6)


def mamba(num_heads: int) -> MambaHeads:
    return MambaHeads(1, num_heads, 64, 128)


@pytest.mark.parametrize(
    ("family", "heads", "lengths", "expected"),
    [
        pytest.param(gated_delta, delta(2, 8), (32768,), RowSplits(13, 2560), id="delta-few-heads"),
        pytest.param(gated_delta, delta(16, 32), (8192,), RowSplits(4, 2048), id="delta-long"),
        pytest.param(gated_delta, delta(16, 32), (2048,), RowSplits(4, 512), id="delta-short"),
        pytest.param(gated_delta, delta(16, 32), (1472,), RowSplits(1, 1472), id="delta-shortest"),
        pytest.param(gated_delta, delta(16, 32), (2048,) * 8, RowSplits(1, 2048), id="delta-many-rows"),
        pytest.param(
            gated_delta, delta(16, 32), (37, 513, 4096, 1, 2900, 8000, 64, 773), RowSplits(1, 8000), id="delta-ragged"
        ),
        pytest.param(gated_delta, delta(2, 8, 256), (32768,), RowSplits(1, 32768), id="delta-wide-keys"),
        pytest.param(gated_delta, delta(2, 8), (0, 32768), RowSplits(1, 32768), id="delta-unknown-lengths"),
        pytest.param(kda, delta(64, 64), (8192,), RowSplits(1, 8192), id="kda-many-heads"),
        pytest.param(kda, delta(8, 8), (8192,), RowSplits(8, 1024), id="kda-long"),
        pytest.param(kda, delta(4, 4), (65536,), RowSplits(16, 4096), id="kda-few-heads"),
        pytest.param(kda, delta(8, 8), (0, 8192), RowSplits(1, 8192), id="kda-unknown-lengths"),
        pytest.param(mamba2, mamba(16), (32768,), RowSplits(16, 2048), id="mamba-few-heads"),
        pytest.param(mamba2, mamba(128), (8192,), RowSplits(2, 4096), id="mamba-two-long-parts"),
        pytest.param(mamba2, mamba(128), (4032,), RowSplits(1, 4032), id="mamba-two-short-parts"),
        pytest.param(mamba2, mamba(64), (8192,), RowSplits(4, 2048), id="mamba-long"),
        pytest.param(mamba2, mamba(64), (2048,), RowSplits(4, 512), id="mamba-short"),
        pytest.param(mamba2, mamba(128), (2048,) * 8, RowSplits(1, 2048), id="mamba-many-rows"),
        pytest.param(mamba2, mamba(16), (0, 32768), RowSplits(1, 32768), id="mamba-unknown-lengths"),
    ],
)
def test_plans_are_those_that_were_measured(
    family: Any, heads: Any, lengths: tuple[int, ...], expected: RowSplits
) -> None:
    assert family.choose_plan(heads, len(lengths), sum(lengths), max(lengths)) == expected


@pytest.mark.parametrize("num_heads", [1, 3, 8, 64, 128, 300])
@pytest.mark.parametrize("length", [0, 1, 64, 1536, 4097, 8191, 1_000_000])
def test_parts_cover_the_row_and_run_at_once(num_heads: int, length: int) -> None:
    for family, heads in (
        (gated_delta, delta(1, num_heads)),
        (kda, delta(1, num_heads)),
        (mamba2, MambaHeads(1, num_heads, 128, 128)),
    ):
        plan = family.choose_plan(heads, 1, length, length)
        assert plan.num_parts * plan.part_length >= length
        assert (plan.num_parts - 1) * plan.part_length < max(length, 1)
        if plan.num_parts > 1 and family is gated_delta:
            # Of a row's first part a first walk has no P, and of its last one nothing.
            assert (2 + (plan.num_parts - 2) * 4) * num_heads <= gated_delta.FIRST_PROGRAMS
        if plan.num_parts > 1:
            assert plan.part_length % family.CHUNK == 0
            assert plan.num_parts * num_heads * 2 <= family.PROGRAMS


@pytest.mark.parametrize("num_heads", [1, 3, 8, 64])
@pytest.mark.parametrize("length", [4097, 8191, 1_000_000])
def test_pieces_cover_all_parts_but_the_last(num_heads: int, length: int) -> None:
    heads = mamba(num_heads)
    plan = mamba2.choose_plan(heads, 1, length, length)
    pieces = mamba2.choose_pieces(heads, 1, plan)
    assert pieces.num_parts * pieces.part_length == (plan.num_parts - 1) * plan.part_length > 0
    assert plan.part_length % pieces.part_length == pieces.part_length % mamba2.CHUNK == 0
    assert pieces.num_parts * num_heads <= mamba2.PROGRAMS


@pytest.mark.parametrize(
    ("num_heads", "num_rows", "plan", "expected"),
    [
        pytest.param(128, 1, RowSplits(2, 4096), RowSplits(2, 2048), id="two-parts"),
        pytest.param(16, 1, RowSplits(16, 2048), RowSplits(15, 2048), id="as-many-parts-as-run"),
        pytest.param(64, 1, RowSplits(2, 576), RowSplits(1, 576), id="short-parts"),
        pytest.param(16, 1, RowSplits(3, 2112), RowSplits(6, 704), id="pieces-are-chunks"),
        pytest.param(128, 1, RowSplits(1, 100), RowSplits(1, 100), id="whole"),
    ],
)
def test_ends_of_parts_are_found_in_pieces_that_run_at_once(
    num_heads: int, num_rows: int, plan: RowSplits, expected: RowSplits
) -> None:
    assert mamba2.choose_pieces(mamba(num_heads), num_rows, plan) == expected


@pytest.mark.parametrize(
    ("state_dim", "lengths", "expected"),
    [
        pytest.param(16, (1,) * 64, scan.Tile(1), id="decode"),
        pytest.param(16, (5,) * 64, scan.Tile(1, max_registers=80), id="verify"),
        pytest.param(16, (2048,) * 8, scan.Tile(1, at_once=2, max_registers=128), id="many-long-rows"),
        pytest.param(16, (8192,), scan.Tile(2, at_once=8), id="one-long-row"),
        pytest.param(1, (8192,), scan.Tile(1, at_once=8), id="one-state"),
        pytest.param(256, (8192,), scan.Tile(16, at_once=2, max_registers=128), id="many-states"),
    ],
)
def test_tiles_of_a_scan_are_those_that_were_measured(
    state_dim: int, lengths: tuple[int, ...], expected: scan.Tile
) -> None:
    tile = scan.choose_tile(ScanSizes(1, 8192, state_dim), len(lengths), max(lengths), short=max(lengths) <= 5)
    assert tile == expected
    assert tile.channels * tile.split == 32 and tile.pieces(state_dim) * tile.split * scan.PIECE >= state_dim
    assert WAYPOINT_TOKENS % tile.at_once == 0


@pytest.mark.parametrize(
    ("num_heads", "num_rows", "tokens", "split", "parts"),
    [
        pytest.param((16, 2), 1, 1, 256, (32, 128), id="decode-1x32768"),
        pytest.param((16, 2), 32, 1, 1024, (64, 32), id="decode-32x8192-and-ragged"),
        pytest.param((16, 2), 128, 1, 2048, (64, 32), id="decode-128x2048"),
        pytest.param((16, 2), 32, 5, 2048, (256, 8), id="verify-32x8192"),
        pytest.param((24, 4), 32, 5, 2048, (256, 8), id="verify-32x8192-24-4"),
    ],
)
def test_short_rows_of_attention_are_cut_as_was_measured(
    num_heads: tuple[int, int], num_rows: int, tokens: int, split: int, parts: tuple[int, int]
) -> None:
    heads = AttentionHeads(*num_heads, 256, 256, 1.0)
    tile = choose_hopper_tile(heads, heads.group, num_rows, tokens)
    assert tile.split == split
    assert choose_parts(256, tile.columns, num_rows * tokens * heads.num_queries) == parts
