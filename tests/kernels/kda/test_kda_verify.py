"""Short rows of KDA where they are computed at once: of 16-bit tokens, with keys of 64 or 128."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from rigs.kernels.batches import Row, plan_rows
from rigs.kernels.kda_batches import KdaBatch, KdaLayer, make_kda_batch
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import (
    check_a_draft_that_is_not_finite,
    check_against_reference,
    check_replay_beside_tokens,
    check_rows_are_apart,
)
from rigs.kernels.recurrence_rows import SHORT_ROWS

from deltaline_kernels.device.delta_rule.inputs import DeltaHeads, DeltaInputs
from deltaline_kernels.rows import StateLines

SMALL = KdaLayer(H=1, HV=1, K=64, V=20, M=8)
CASES = {
    **{name: (SMALL, rows) for name, rows in SHORT_ROWS.items()},
    "beside-prefill": (SMALL, [Row(1), Row(5, verify=True, replayed=3), Row(4, fresh=True), Row(20)]),
    "grouped-heads-of-128": (
        KdaLayer(H=2, HV=4, K=128, V=40, M=5),
        [Row(5, verify=True, replayed=3), Row(1, replayed=2), Row(4, verify=True, fresh=True)],
    ),
    "grouped-heads-of-odd-values": (
        KdaLayer(H=1, HV=3, K=64, V=35, M=8),
        [Row(5, verify=True, replayed=2), Row(2, replayed=3), Row(1, to="other")],
    ),
    "safe-gates": (replace(SMALL, lower_bound=-5.0), [Row(5, verify=True, replayed=3), Row(1), Row(4, replayed=1)]),
}
GATES = {"no-decay": -60.0, "usual": 0.0, "decay-of-5": 5.0, "decay-of-50": 50.0, "decay-of-1000": 1000.0}


@pytest.mark.parametrize("case", CASES)
def test_kda_of_short_rows_matches_the_reference(path: Path, case: str) -> None:
    layer, rows = CASES[case]
    check_against_reference(make_kda_batch(rows, path, layer), path, path.dtype)


def test_kda_of_short_rows_takes_a_state_that_programs_share(path: Path) -> None:
    rows = [Row(5, verify=True, replayed=4), Row(3, replayed=1)]
    check_against_reference(make_kda_batch(rows, path, replace(SMALL, V=52)), path, path.dtype)


def test_kda_of_short_rows_rounds_a_16_bit_state_once(path: Path) -> None:
    rows = [Row(5, verify=True, replayed=3), Row(3)]
    check_against_reference(make_kda_batch(rows, path, SMALL, state_dtype=torch.bfloat16), path, torch.bfloat16)


@pytest.mark.parametrize("case", ["raw-gates", "no-norms", "neither"])
def test_kda_of_short_rows_takes_gates_and_keys_as_they_come(path: Path, case: str) -> None:
    batch = make_kda_batch([Row(6, verify=True, replayed=2), Row(3)], path, SMALL)
    if case != "no-norms":
        batch = batch.with_raw_gates()
        batch.b[1] = 0.0
    if case != "raw-gates":
        batch = batch.without_norms()
    check_against_reference(batch, path, path.dtype)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_kda_of_short_rows_is_right_for_correlated_keys(path: Path, gate: float) -> None:
    check_against_reference(make_correlated(path, gate), path, path.dtype)


@pytest.mark.parametrize("strength", [5.0, 50.0, math.inf])
def test_kda_of_short_rows_survives_decays_that_overflow(path: Path, strength: float) -> None:
    """Two of three channels leave little of what was before; the others keep all, some of those nearly all at times."""
    batch = make_correlated(path, 0.0).with_raw_gates()
    batch.a.fill_(-strength)
    batch.a[:, ::3] = 0.0
    batch.a[::5, 1::3] = -0.125
    check_against_reference(batch, path, path.dtype)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_kda_replay_beside_tokens_leaves_what_committing_leaves(path: Path, gate: float) -> None:
    check_replay_beside_tokens(make_correlated(path, gate), path)


def test_kda_row_at_once_does_not_depend_on_its_neighbours(path: Path) -> None:
    rows = [Row(1), Row(1), Row(4, verify=True, replayed=2), Row(40, replayed=1)]
    check_rows_are_apart(lambda: make_kda_batch(rows, path, SMALL), rows, path)


@pytest.mark.parametrize("what", ["qkv", "a", "b"])
def test_a_short_draft_of_kda_that_is_not_finite_leaves_those_before_it_alone(path: Path, what: str) -> None:
    if not path.serial:
        pytest.skip("where rows go in chunks of 32 tokens it may reach tokens of its row before it")
    check_a_draft_that_is_not_finite(
        lambda: make_kda_batch([Row(6, verify=True, replayed=2)], path, SMALL), path, what, at=3
    )


def test_short_rows_of_kda_that_fit_are_computed_at_once() -> None:
    at_once = pytest.importorskip("deltaline_kernels.device.delta_rule.at_once", reason="triton is not installed")

    def fits(
        length: int = 5, dtype: torch.dtype = torch.bfloat16, K: int = 128, drafts: int = 8, token_lines: int = 0
    ) -> bool:
        rows = plan_rows([Row(length), Row(0)], 64, "cpu")
        control = torch.cat((rows.control, torch.zeros(token_lines, 3, dtype=torch.int32)))
        rows = replace(rows, control=control, num_token_lines=token_lines)
        heads = DeltaHeads(2, 4, K, 16, 1.0, 1e-6, keyed=True)
        qkv = torch.empty(length, heads.channels, dtype=dtype)
        inputs = DeltaInputs(*heads.split(qkv), qkv, qkv, None, None, heads)
        lines = StateLines(torch.empty(1, 4, 16, K), torch.empty(1, 2, drafts, 1))
        answer: bool = at_once.can_verify(inputs, lines, rows)
        return answer

    assert not fits(token_lines=5)
    assert fits() and fits(2) and fits(8) and fits(dtype=torch.float16) and fits(K=64)
    assert not any((fits(1), fits(9), fits(dtype=torch.float32), fits(K=32), fits(K=96), fits(K=256), fits(drafts=9)))


def make_correlated(path: Path, gate: float) -> KdaBatch:
    """Make eight tokens of a VERIFY with keys that are alike, strengths near 1, and `gate` between usual gates."""
    batch = make_kda_batch([Row(8, verify=True, replayed=3, half=1)], path, SMALL)
    keys = SMALL.H * SMALL.K
    batch.qkv[:, keys : 2 * keys] = 1.0 + 0.01 * batch.qkv[:, keys : 2 * keys]
    assert batch.A_log is not None
    batch.A_log.zero_()
    batch.b.fill_(8.0)
    # Strong gates between usual ones, in every second channel: only the tokens after the last one may be seen there.
    batch.a[::3, ::2] = gate
    return batch
