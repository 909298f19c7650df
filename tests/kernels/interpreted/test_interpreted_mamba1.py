"""The tests of the Mamba-1 recurrence again: its Triton kernel in Triton's interpreter.

Not all of them: a token of a few channels takes the interpreter milliseconds.
"""

from __future__ import annotations

import kernels.mamba1.test_mamba1 as checks
import pytest
import torch
from kernels.mamba1.test_mamba1 import (
    test_a_draft_that_is_not_finite_leaves_those_before_it_alone,
    test_a_value_that_is_not_finite_stays_in_its_channel,
    test_mamba1_replay_leaves_what_committing_leaves,
    test_mamba1_replays_any_accepted_count,
    test_mamba1_row_does_not_depend_on_its_neighbours,
    test_mamba1_takes_aligned_keys,
    test_mamba1_takes_steps_keys_and_gates_in_fp32,
    test_mamba1_without_a_gate_matches_the_reference,
    test_small_steps_are_exact,
)
from rigs.kernels.batches import Row
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.recurrence_checks import (
    check_against_reference,
    check_shifted_lines,
    check_written_elsewhere,
    same_bits,
)
from rigs.kernels.scan_batches import ScanLayer, make_scan_batch

from deltaline_kernels.mamba1 import recurrent
from deltaline_kernels.mamba1.plan import Tile

__all__ = [
    "test_a_draft_that_is_not_finite_leaves_those_before_it_alone",
    "test_a_value_that_is_not_finite_stays_in_its_channel",
    "test_mamba1_replay_leaves_what_committing_leaves",
    "test_mamba1_replays_any_accepted_count",
    "test_mamba1_row_does_not_depend_on_its_neighbours",
    "test_mamba1_takes_aligned_keys",
    "test_mamba1_takes_steps_keys_and_gates_in_fp32",
    "test_mamba1_without_a_gate_matches_the_reference",
    "test_small_steps_are_exact",
]

CASES = [name for name, (_, rows) in checks.CASES.items() if sum(row.length for row in rows) < 40]


@pytest.mark.parametrize("case", CASES)
def test_mamba1_matches_the_reference(path: InterpretedPath, case: str) -> None:
    checks.test_mamba1_matches_the_reference(path, case)


TILES = [Tile(2), Tile(1, at_once=4), Tile(2, at_once=2), Tile(4, at_once=8)]


def test_tiles_of_all_forms_leave_the_same_bits(exact_path: InterpretedPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row gives does not depend on how many rows there are, by which tiles are chosen."""
    rows = [Row(1), Row(3, verify=True, replayed=2), Row(0, replayed=1), Row(2, skipped=True), Row(9), Row(6)]
    made = [make_scan_batch(rows, exact_path, ScanLayer(D=39)) for _ in range(1 + len(TILES))]
    found = []
    for batch, tile in zip(made, [Tile(1), *TILES], strict=True):
        monkeypatch.setattr(recurrent, "choose_tile", lambda *_, chosen=tile, **__: chosen)
        found.append(batch.run(exact_path))
    check_against_reference(make_scan_batch(rows, exact_path, ScanLayer(D=39)), exact_path, exact_path.dtype)
    for tile, batch, y in zip(TILES, made[1:], found[1:], strict=True):
        # The interpreter adds more than two threads' sums in another order.
        assert torch.equal(y, found[0]) if tile.split <= 2 else torch.allclose(y, found[0], atol=1e-5), tile
        assert same_bits(batch.state, made[0].state) and same_bits(batch.drafts, made[0].drafts), tile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_state_is_rounded_once(exact_path: InterpretedPath, dtype: torch.dtype) -> None:
    rows = [Row(1), Row(3, verify=True, replayed=2), Row(9)]
    check_against_reference(make_scan_batch(rows, exact_path, state_dtype=dtype), exact_path, dtype)


@pytest.mark.parametrize("rows", [[Row(1)] * 2, [Row(3, verify=True, replayed=2), Row(1, fresh=True), Row(20)]])
def test_mamba1_shifts_lines(exact_path: InterpretedPath, rows: list[Row]) -> None:
    check_shifted_lines(make_scan_batch(rows, exact_path), exact_path)


def test_states_are_written_elsewhere(exact_path: InterpretedPath) -> None:
    check_written_elsewhere(make_scan_batch([Row(1), Row(3, verify=True, replayed=2), Row(9)], exact_path))
