"""mamba2 against its reference, and what must hold between its own runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.kernels.batches import Row
from rigs.kernels.mamba_batches import MambaLayer, make_mamba_batch
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import (
    check_a_draft_that_is_not_finite,
    check_against_reference,
    check_any_accepted_count,
    check_inputs_are_left_alone,
    check_pieces,
    check_replay_alone,
    check_rows_are_apart,
)
from rigs.kernels.recurrence_rows import ROWS

from deltaline_kernels import mamba2

PLAIN = MambaLayer()
ONE = MambaLayer(H=1)
CASES = {
    **{name: (PLAIN, rows) for name, rows in ROWS.items()},
    "one-head-odd-dims": (MambaLayer(H=1, S=5, P=3), [Row(1), Row(3, verify=True, replayed=2), Row(11)]),
    "groups-of-wide-heads": (MambaLayer(H=6, G=2, S=8, P=35), [Row(1), Row(4, verify=True), Row(33)]),
    "a-group-per-head": (MambaLayer(H=3, G=3), [Row(1), Row(4, verify=True, replayed=3), Row(9)]),
    "wide-states": (MambaLayer(H=1, S=70, P=4), [Row(2), Row(37)]),
    "1-63-64-65": (ONE, [Row(1), Row(63), Row(64, fresh=True), Row(65, to="other")]),
    "prime": (ONE, [Row(127)]),
    "heads-of-64-states-of-128": (MambaLayer(H=2, S=128, P=64), [Row(1), Row(3, verify=True, replayed=2), Row(66)]),
    "heads-of-128-states-of-256": (MambaLayer(H=1, S=256, P=128), [Row(1), Row(0), Row(70, replayed=2)]),
    "heads-of-32-states-of-16": (MambaLayer(H=4, G=2, S=16, P=32), [Row(1), Row(3, replayed=2), Row(19)]),
    # Peers took what is behind an empty row for the first chunk of all.
    "verify-longer-than-a-chunk": (MambaLayer(M=70), [Row(70, verify=True, replayed=37), Row(33, verify=True)]),
    "verify-1-to-5-beside-decode": (
        MambaLayer(M=5),
        [
            *(Row(n, verify=True, replayed=5 - n, half=n % 2) for n in range(1, 6)),
            Row(1, replayed=4),
            Row(0, replayed=5),
        ],
    ),
    "verify-1-to-9": (
        MambaLayer(H=1, M=9),
        [Row(n, verify=n % 4 > 0, replayed=9 - n, half=n % 2) for n in range(1, 10)],
    ),
    "limits": (replace(PLAIN, dt_limit=(0.3, 0.9)), [Row(1), Row(4, verify=True, replayed=1), Row(20)]),
}


@pytest.mark.parametrize("case", CASES)
def test_mamba2_matches_the_reference(path: Path, case: str) -> None:
    layer, rows = CASES[case]
    check_against_reference(make_mamba_batch(rows, path, layer), path, path.dtype)


@pytest.mark.parametrize("case", ["mixed", "verify-that-writes-nothing"])
def test_mamba2_of_many_heads_matches_the_reference(path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program per several parts of the state, as there is for many rows."""
    use_many_heads(monkeypatch)
    layer, rows = CASES[case]
    check_against_reference(make_mamba_batch(rows, path, layer), path, path.dtype)


def test_mamba2_rounds_a_16_bit_state_once(path: Path) -> None:
    rows = [Row(1), Row(3, verify=True, replayed=2), Row(37)]
    check_against_reference(make_mamba_batch(rows, path, state_dtype=torch.bfloat16), path, torch.bfloat16)


@pytest.mark.parametrize("step", [-60.0, 1000.0], ids=["steps-of-almost-0", "steps-of-1000"])
def test_mamba2_is_right_for_the_smallest_and_largest_steps(path: Path, step: float) -> None:
    batch = make_mamba_batch([Row(4, verify=True, replayed=4), Row(66)], path)
    # Large steps between usual ones: only the tokens from the last one on may be seen.
    batch.dt[::3] = step
    check_against_reference(batch, path, path.dtype)


def test_mamba2_survives_the_strongest_decay(path: Path) -> None:
    batch = make_mamba_batch([Row(2, verify=True), Row(40)], path)
    batch.A_log.fill_(20.0)
    batch.dt.fill_(1000.0)
    check_against_reference(batch, path, path.dtype)


@pytest.mark.parametrize("what", ["dt", "dt_bias"])
def test_a_step_that_is_not_finite_is_not_clamped_away(path: Path, what: str) -> None:
    batch = make_mamba_batch([Row(1), Row(1)], path, replace(PLAIN, dt_limit=(0.1, 0.5)))
    getattr(batch, what)[..., 1:] = torch.nan
    y = batch.run(path)
    assert y[:, 1].isnan().all() and not y[:, 0].isnan().any()
    assert batch.state[1, 1].isnan().all() and not batch.state[1, 0].isnan().any()


@pytest.mark.parametrize("ends", [range(71), [0, 1, 34, 36, 70]], ids=["token-by-token", "pieces"])
def test_mamba2_in_pieces_is_mamba2_at_once(exact_path: Path, ends: Sequence[int]) -> None:
    check_pieces(make_mamba_batch([Row(70)], exact_path), exact_path, ends)


def test_mamba2_replays_any_accepted_count(exact_path: Path) -> None:
    check_any_accepted_count(make_mamba_batch([Row(4, verify=True, half=1)], exact_path), exact_path)


@pytest.mark.parametrize(
    ("step", "many_heads"),
    [(0.0, False), (5.0, False), (5.0, True), (1000.0, False)],
    ids=["usual", "large", "large-many-heads", "largest"],
)
def test_mamba2_replay_leaves_what_committing_leaves(
    path: Path, step: float, many_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if many_heads:
        use_many_heads(monkeypatch)
    batch = make_mamba_batch([Row(5, verify=True, replayed=2, half=1)], path, MambaLayer(S=17, M=5))
    if step:
        batch.A_log.zero_()
        batch.dt.fill_(step)
    check_replay_alone(batch, path)


def test_mamba2_row_does_not_depend_on_its_neighbours(path: Path) -> None:
    rows = [Row(1), Row(1), Row(4, verify=True, replayed=2), Row(40, replayed=1)]
    check_rows_are_apart(lambda: make_mamba_batch(rows, path), rows, path)


@pytest.mark.parametrize("what", ["xBC", "dt"])
def test_a_draft_that_is_not_finite_leaves_those_before_it_alone(path: Path, what: str) -> None:
    if not path.serial:
        pytest.skip("where rows go in chunks of 64 tokens it may reach tokens of its row before it")
    check_a_draft_that_is_not_finite(
        lambda: make_mamba_batch([Row(4, verify=True, replayed=2)], path), path, what, at=2
    )


def test_mamba2_leaves_its_inputs_alone(path: Path) -> None:
    batch = make_mamba_batch([Row(1), Row(3, verify=True, replayed=1), Row(64)], path)
    check_inputs_are_left_alone(batch, (batch.A_log, batch.D, batch.dt_bias), path)


def test_mamba2_names_the_wrong_argument() -> None:
    good = make_mamba_batch([Row(2)], Path("cpu", torch.float32))
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "xBC", {"xBC": good.xBC[:, 1:]}),
        (ValueError, "dt", {"dt": good.dt[:1]}),
        (TypeError, "dt", {"dt": good.dt.double()}),
        (ValueError, "A_log", {"A_log": torch.zeros(3)}),
        (TypeError, "D", {"D": None}),
        (ValueError, "dt_bias", {"dt_bias": torch.zeros(2, 1)}),
        (TypeError, "state", {"state": good.state.double()}),
        (ValueError, "state", {"state": torch.zeros(3, 2, 257, 16)}),
        (ValueError, "drafts", {"drafts": good.drafts[..., 1:].contiguous()}),
        (ValueError, "state", {"layer": MambaLayer(G=3)}),
        (ValueError, "num_groups", {"layer": MambaLayer(G=0)}),
        (ValueError, "dt_limit", {"layer": MambaLayer(dt_limit=(0.5, 0.4))}),
        (ValueError, "dt_limit", {"layer": MambaLayer(dt_limit=(math.nan, 1.0))}),
        (ValueError, "dt_limit", {"layer": MambaLayer(dt_limit=(-1.0, 1.0))}),
    ]
    for error, name, change in wrong:
        bad = replace(good, **change)
        with pytest.raises(error, match=f"^{name}: expected"):
            bad.run(Path("cpu", torch.float32))
    with pytest.raises(TypeError, match=r"^rows: expected Rows"):
        mamba2(*good.inputs, good.state, good.drafts, good.rows.control, num_groups=1)  # type: ignore[arg-type]


def use_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few rows have the tiles of many."""
    from deltaline_kernels.mamba2 import plan

    monkeypatch.setattr(plan, "MANY_HEADS", 1)


def test_drafts_on_neighbouring_lines_leave_their_states_on_scattered_ones(path: Path) -> None:
    """On the CPU these states were a view of the lines, from which torch writes no others."""
    batch = make_mamba_batch([Row(2, verify=True, to="other"), Row(2, verify=True, to="other"), Row(1)], path)
    batch.state[2] = batch.state[3]
    batch.rows.control[1, :2] = torch.tensor([1, 2], device=batch.state.device)
    batch.rows.control[2, :2] = torch.tensor([6, 4], device=batch.state.device)
    check_against_reference(batch, path, path.dtype)
