"""Short rows of the Mamba2 recurrence where they are computed at once: of 16-bit tokens, with states of 64 or 128."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels.mamba2.test_mamba2 import use_many_heads
from rigs.kernels.batches import Row, plan_rows
from rigs.kernels.mamba_batches import MambaLayer, make_mamba_batch
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import (
    check_a_draft_that_is_not_finite,
    check_against_reference,
    check_replay_beside_tokens,
    check_rows_are_apart,
)
from rigs.kernels.recurrence_rows import SHORT_ROWS

from deltaline_kernels.mamba2.inputs import MambaHeads, MambaInputs
from deltaline_kernels.rows import StateLines

SMALL = MambaLayer(H=2, S=64, P=20, M=8)
CASES = {
    **{name: (SMALL, rows) for name, rows in SHORT_ROWS.items()},
    "groups-of-heads-of-64": (
        MambaLayer(H=4, G=2, S=128, P=64, M=5),
        [Row(5, verify=True, replayed=3), Row(1, replayed=2), Row(4, verify=True, fresh=True)],
    ),
    "limits": (replace(SMALL, dt_limit=(0.3, 0.9)), [Row(4, verify=True, replayed=1), Row(2)]),
}


@pytest.mark.parametrize("case", CASES)
def test_mamba2_of_short_rows_matches_the_reference(path: Path, case: str) -> None:
    layer, rows = CASES[case]
    check_against_reference(make_mamba_batch(rows, path, layer), path, path.dtype)


def test_mamba2_of_many_short_rows_matches_the_reference(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program per several parts of the state, as there is for many rows."""
    use_many_heads(monkeypatch)
    rows = [Row(5, verify=True, replayed=4), Row(3, replayed=1)]
    check_against_reference(make_mamba_batch(rows, path, replace(SMALL, P=52)), path, path.dtype)


def test_mamba2_of_short_rows_rounds_a_16_bit_state_once(path: Path) -> None:
    rows = [Row(5, verify=True, replayed=3), Row(3)]
    check_against_reference(make_mamba_batch(rows, path, SMALL, state_dtype=torch.bfloat16), path, torch.bfloat16)


@pytest.mark.parametrize("step", [-60.0, 1000.0], ids=["steps-of-almost-0", "steps-of-1000"])
def test_mamba2_of_short_rows_is_right_for_the_smallest_and_largest_steps(path: Path, step: float) -> None:
    batch = make_mamba_batch([Row(8, verify=True, replayed=3, half=1)], path, SMALL)
    # Large steps between usual ones: only the tokens from the last one on may be seen.
    batch.dt[::3] = step
    check_against_reference(batch, path, path.dtype)


@pytest.mark.parametrize("seed", [0, 1])
def test_mamba2_of_short_rows_is_right_for_decays_far_apart(path: Path, seed: int) -> None:
    """Of steps that leave all, some, as little as fp32 can tell apart from nothing, and nothing."""
    batch = make_mamba_batch([Row(8, verify=True, replayed=8), Row(8, replayed=5, half=1)] * 4, path, SMALL)
    batch.A_log.fill_(9.0)
    batch.dt_bias.zero_()
    steps = torch.tensor([-60.0, -16.0, -9.0, -6.0, -4.36, -4.34, -4.1, 0.9])
    drawn = torch.randint(len(steps), batch.dt.shape, generator=torch.Generator().manual_seed(seed))
    batch.dt.copy_(steps[drawn].to(batch.dt))
    check_against_reference(batch, path, path.dtype)


@pytest.mark.parametrize("step", [0.0, 1000.0], ids=["usual", "steps-of-1000"])
def test_mamba2_replay_beside_tokens_leaves_what_committing_leaves(path: Path, step: float) -> None:
    batch = make_mamba_batch([Row(8, verify=True, replayed=3, half=1)], path, SMALL)
    if step:
        batch.dt[::3] = step
    check_replay_beside_tokens(batch, path)


def test_mamba2_short_row_does_not_depend_on_its_neighbours(path: Path) -> None:
    rows = [Row(1), Row(2), Row(4, verify=True, replayed=2), Row(5, replayed=1)]
    check_rows_are_apart(lambda: make_mamba_batch(rows, path, SMALL), rows, path)


@pytest.mark.parametrize("what", ["xBC", "dt"])
def test_a_short_draft_that_is_not_finite_leaves_those_before_it_alone(path: Path, what: str) -> None:
    if not path.serial:
        pytest.skip("where rows go in chunks of 64 tokens it may reach tokens of its row before it")
    check_a_draft_that_is_not_finite(
        lambda: make_mamba_batch([Row(6, verify=True, replayed=2)], path, SMALL), path, what, at=3
    )


def test_short_rows_that_fit_are_computed_at_once() -> None:
    verify = pytest.importorskip("deltaline_kernels.mamba2.verify", reason="triton is not installed")

    def fits(length: int = 5, dtype: torch.dtype = torch.bfloat16, S: int = 128, drafts: int = 8) -> bool:
        rows = plan_rows([Row(length), Row(0)], 64, "cpu")
        heads = MambaHeads(2, 4, 16, S)
        tokens = torch.empty(length, heads.channels, dtype=dtype)
        inputs = MambaInputs(tokens, tokens, tokens, None, None, heads)
        lines = StateLines(torch.empty(1, 4, 16, S), torch.empty(1, 2, drafts, 1))
        answer: bool = verify.can_verify(inputs, lines, rows)
        return answer

    assert fits() and fits(2) and fits(8) and fits(dtype=torch.float16) and fits(S=64)
    assert not any((fits(1), fits(9), fits(dtype=torch.float32), fits(S=32), fits(S=96), fits(S=256), fits(drafts=9)))
