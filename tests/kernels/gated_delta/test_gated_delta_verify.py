"""Short rows of the gated delta rule where they are computed at once: of 16-bit tokens, with keys of 64 or 128."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rigs.kernels.batches import Batch, Layer, Row, make_batch, plan_rows
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

SMALL = Layer(H=1, HV=1, K=64, V=20, M=8)
CASES = {
    **{name: (SMALL, rows) for name, rows in SHORT_ROWS.items()},
    "beside-prefill": (SMALL, [Row(1), Row(5, verify=True, replayed=3), Row(4, fresh=True), Row(20)]),
    "grouped-heads-of-128": (
        Layer(H=2, HV=4, K=128, V=40, M=5),
        [Row(5, verify=True, replayed=3), Row(1, replayed=2), Row(4, verify=True, fresh=True)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_delta_of_short_rows_matches_the_reference(path: Path, case: str) -> None:
    layer, rows = CASES[case]
    check_against_reference(make_batch(rows, path, layer), path, path.dtype)


@pytest.mark.parametrize("rows", [1, 2], ids=["one-row", "two-rows"])
def test_delta_of_many_heads_at_once_matches_the_reference(
    path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program per several parts of the state, as there is for many rows."""
    verify = pytest.importorskip("deltaline_kernels.gated_delta.verify", reason="triton is not installed")
    monkeypatch.setattr(verify, "MANY_HEADS", 1)
    batch = make_batch([Row(5, verify=True, replayed=4), Row(3, replayed=1)][:rows], path, replace(SMALL, V=52))
    check_against_reference(batch, path, path.dtype)


def test_delta_of_short_rows_rounds_a_16_bit_state_once(path: Path) -> None:
    rows = [Row(5, verify=True, replayed=3), Row(3)]
    check_against_reference(make_batch(rows, path, SMALL, state_dtype=torch.bfloat16), path, torch.bfloat16)


@pytest.mark.parametrize("case", ["raw-gates", "no-norms", "neither"])
def test_delta_of_short_rows_takes_gates_and_keys_as_they_come(path: Path, case: str) -> None:
    batch = make_batch([Row(6, verify=True, replayed=2), Row(3)], path, SMALL)
    if case != "no-norms":
        batch = batch.with_raw_gates()
    if case != "raw-gates":
        batch = batch.without_norms()
    check_against_reference(batch, path, path.dtype)


@pytest.mark.parametrize("gate", [-60.0, 0.0, 1000.0], ids=["no-decay", "usual", "decay-of-1000"])
def test_delta_of_short_rows_is_right_for_correlated_keys(path: Path, gate: float) -> None:
    check_against_reference(make_correlated(path, gate), path, path.dtype)


def test_delta_of_short_rows_survives_the_strongest_gates(path: Path) -> None:
    batch = make_correlated(path, 1000.0)
    assert batch.A_log is not None
    batch.A_log.fill_(20.0)
    batch.a.fill_(1000.0)
    check_against_reference(batch, path, path.dtype)


@pytest.mark.parametrize("gate", [-60.0, 0.0, 1000.0], ids=["no-decay", "usual", "decay-of-1000"])
def test_delta_replay_beside_tokens_leaves_what_committing_leaves(path: Path, gate: float) -> None:
    check_replay_beside_tokens(make_correlated(path, gate), path)


@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no-norms"])
@pytest.mark.parametrize("seed", [0, 1])
def test_delta_of_short_rows_is_right_for_gates_far_apart(path: Path, seed: int, norms: bool) -> None:
    batch = make_far_apart(path, seed, -torch.inf)
    check_against_reference(batch if norms else batch.without_norms(), path, path.dtype)


@pytest.mark.parametrize("layer", [Layer(), SMALL], ids=["token-by-token", "at-once"])
def test_delta_row_does_not_depend_on_its_neighbours(path: Path, layer: Layer) -> None:
    rows = [Row(1), Row(1), Row(4, verify=True, replayed=2), Row(40, replayed=1)]
    check_rows_are_apart(lambda: make_batch(rows, path, layer), rows, path)


@pytest.mark.parametrize("what", ["qkv", "a", "b"])
def test_a_draft_that_is_not_finite_leaves_those_before_it_alone(path: Path, what: str) -> None:
    if not path.serial:
        pytest.skip("where rows go in chunks of 32 tokens it may reach tokens of its row before it")
    check_a_draft_that_is_not_finite(
        lambda: make_batch([Row(6, verify=True, replayed=2)], path, SMALL), path, what, at=3
    )


def test_short_rows_that_fit_are_computed_at_once() -> None:
    at_once = pytest.importorskip("deltaline_kernels.device.delta_rule.at_once", reason="triton is not installed")

    def fits(length: int = 5, dtype: torch.dtype = torch.bfloat16, K: int = 128, drafts: int = 8) -> bool:
        rows = plan_rows([Row(length), Row(0)], 64, "cpu")
        heads = DeltaHeads(2, 4, K, 16, 1.0, 1e-6)
        qkv = torch.empty(length, heads.channels, dtype=dtype)
        inputs = DeltaInputs(*heads.split(qkv), qkv, qkv, None, None, heads)
        lines = StateLines(torch.empty(1, 4, 16, K), torch.empty(1, 2, drafts, 1))
        answer: bool = at_once.can_verify(inputs, lines, rows)
        return answer

    assert fits() and fits(2) and fits(8) and fits(dtype=torch.float16) and fits(K=64)
    assert not any((fits(1), fits(9), fits(dtype=torch.float32), fits(K=32), fits(K=96), fits(K=256), fits(drafts=9)))


def make_correlated(path: Path, gate: float) -> Batch:
    """Make eight tokens of a VERIFY with keys that are alike, strengths near 1, and `gate` between usual gates."""
    batch = make_batch([Row(8, verify=True, replayed=3, half=1)], path, SMALL)
    keys = SMALL.H * SMALL.K
    batch.qkv[:, keys : 2 * keys] = 1.0 + 0.01 * batch.qkv[:, keys : 2 * keys]
    assert batch.A_log is not None
    batch.A_log.zero_()
    batch.b.fill_(8.0)
    # Strong gates between usual ones: only the tokens after the last one may be seen.
    batch.a[::3] = gate
    return batch


def make_far_apart(path: Path, seed: int, least: float) -> Batch:
    """Make rows of keys that are alike, with gates that leave all, some, as little as fp32 can tell, and nothing."""
    rows = [Row(8, verify=True, replayed=8), Row(8, replayed=5, half=1)] * 4
    batch = make_batch(rows, path, SMALL).with_raw_gates()
    keys = SMALL.H * SMALL.K
    batch.qkv[:, keys : 2 * keys] = 1.0 + 0.1 * batch.qkv[:, keys : 2 * keys]
    # Usual ones are twice as many, so that there are some on both sides of a strong one, and rows without any.
    gates = torch.tensor([0.0, -1e-3, -1e-2, -0.1, -0.3, -0.5, -1.0, -3.0, -20.0, -103.0, -128.0, least])
    generator = torch.Generator().manual_seed(seed)
    for place in (batch.a, batch.drafts[..., -SMALL.HV :]):
        drawn = gates[torch.randint(len(gates), place.shape, generator=generator)].to(place)
        # Where there is nothing to read, it stays NaN.
        place.copy_(torch.where(place.isnan(), place, drawn))
    return batch
