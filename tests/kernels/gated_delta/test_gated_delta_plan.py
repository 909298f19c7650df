"""choose_plan: rows in parts where few programs would run, whole where parts would only wait for each other."""

from __future__ import annotations

import pytest

from deltaline_kernels.device.row_splits import RowSplits
from deltaline_kernels.gated_delta.inputs import DeltaHeads
from deltaline_kernels.gated_delta.plan import CHUNK, PROGRAMS, SHORTEST_PART, choose_plan

RAGGED = (37, 513, 4096, 1, 2900, 8000, 64, 773)


def heads(num_key_heads: int, num_value_heads: int, key_dim: int = 128) -> DeltaHeads:
    return DeltaHeads(num_key_heads, num_value_heads, key_dim, 128, 1.0, 1e-6)


@pytest.mark.parametrize(
    ("layer", "lengths", "expected"),
    [
        (heads(2, 8), (32768,), RowSplits(16, 2048)),
        (heads(16, 32), (8192,), RowSplits(4, 2048)),
        (heads(16, 32), (2048,), RowSplits(1, 2048)),
        (heads(16, 32), (2048,) * 8, RowSplits(1, 2048)),
        (heads(16, 32), RAGGED, RowSplits(1, 8000)),
        (heads(2, 8, key_dim=256), (32768,), RowSplits(1, 32768)),
    ],
    ids=["few-heads", "long", "short", "many-rows", "ragged", "wide-keys"],
)
def test_plans_are_those_that_were_measured(layer: DeltaHeads, lengths: tuple[int, ...], expected: RowSplits) -> None:
    assert choose_plan(layer, len(lengths), sum(lengths), max(lengths)) == expected


@pytest.mark.parametrize("num_value_heads", [1, 3, 8, 32, 64])
@pytest.mark.parametrize("length", [0, 1, 64, 3 * SHORTEST_PART, 4097, 8191, 1_000_000])
def test_parts_cover_the_row_and_run_at_once(num_value_heads: int, length: int) -> None:
    plan = choose_plan(heads(1, num_value_heads), 1, length, length)
    assert plan.num_parts * plan.part_length >= length
    assert (plan.num_parts - 1) * plan.part_length < max(length, 1)
    if plan.num_parts > 1:
        assert plan.part_length % CHUNK == 0
        assert plan.num_parts * num_value_heads * 2 <= PROGRAMS


def test_rows_of_unknown_lengths_stay_whole() -> None:
    assert choose_plan(heads(2, 8), 2, 32768, 32768) == RowSplits(1, 32768)
