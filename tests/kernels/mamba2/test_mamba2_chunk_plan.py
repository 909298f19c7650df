"""choose_plan of Mamba2: rows in parts where few programs would run, whole where parts would wait for each other."""

from __future__ import annotations

import pytest

from deltaline_kernels.device.row_splits import RowSplits
from deltaline_kernels.mamba2.inputs import MambaHeads
from deltaline_kernels.mamba2.plan import CHUNK, PROGRAMS, SHORTEST_PART, choose_plan


@pytest.mark.parametrize(
    ("num_heads", "lengths", "expected"),
    [
        (16, (32768,), RowSplits(16, 2048)),
        (128, (8192,), RowSplits(2, 4096)),
        (128, (4032,), RowSplits(1, 4032)),
        (64, (8192,), RowSplits(4, 2048)),
        (64, (2048,), RowSplits(4, 512)),
        (128, (2048,), RowSplits(1, 2048)),
        (128, (2048,) * 8, RowSplits(1, 2048)),
        (16, (0, 32768), RowSplits(1, 32768)),
    ],
    ids=[
        "few-heads",
        "two-long-parts",
        "two-short-parts",
        "long",
        "short",
        "many-heads-short",
        "many-rows",
        "unknown-lengths",
    ],
)
def test_rows_are_cut_where_few_programs_would_run(
    num_heads: int, lengths: tuple[int, ...], expected: RowSplits
) -> None:
    heads = MambaHeads(1, num_heads, 64, 128)
    assert choose_plan(heads, len(lengths), sum(lengths), max(lengths)) == expected


@pytest.mark.parametrize("num_heads", [1, 3, 8, 64, 128, 300])
@pytest.mark.parametrize("length", [0, 1, 64, 3 * SHORTEST_PART, 4097, 8191, 1_000_000])
def test_parts_cover_the_row_and_run_at_once(num_heads: int, length: int) -> None:
    plan = choose_plan(MambaHeads(1, num_heads, 128, 128), 1, length, length)
    assert plan.num_parts * plan.part_length >= length
    assert (plan.num_parts - 1) * plan.part_length < max(length, 1)
    if plan.num_parts > 1:
        assert plan.part_length % CHUNK == 0
        assert plan.num_parts * num_heads * 2 <= PROGRAMS
