"""kda against its reference, and what must hold between its own runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.kernels.batches import Row, make_batch
from rigs.kernels.graphs import check_replay
from rigs.kernels.kda_batches import KdaBatch, KdaLayer, make_kda_batch
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import (
    check_a_draft_that_is_not_finite,
    check_against_reference,
    check_any_accepted_count,
    check_far_lines,
    check_inputs_are_left_alone,
    check_pieces,
    check_replay_alone,
    check_rows_are_apart,
)
from rigs.kernels.recurrence_rows import ROWS
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import gated_delta_reference, kda

PLAIN, SAFE = KdaLayer(), KdaLayer(lower_bound=-5.0)
CASES = {
    **{name: (PLAIN, rows) for name, rows in ROWS.items()},
    "safe-gates": (SAFE, ROWS["mixed"]),
    "one-head-odd-dims": (KdaLayer(H=1, HV=1, K=5, V=3), [Row(1), Row(3, verify=True, replayed=2), Row(11)]),
    "grouped-heads-of-wide-values": (KdaLayer(H=2, HV=6, K=8, V=35), [Row(1), Row(4, verify=True), Row(33)]),
    "wide-keys": (KdaLayer(H=1, HV=1, K=70, V=4), [Row(2), Row(37)]),
    "15-16-17": (KdaLayer(H=1, HV=1), [Row(1), Row(15), Row(16, fresh=True), Row(17, to="other")]),
    "heads-of-128": (KdaLayer(H=1, HV=1, K=128, V=128), [Row(1), Row(3, verify=True, replayed=2), Row(66)]),
    "heads-of-256": (KdaLayer(H=1, HV=1, K=256, V=256), [Row(1), Row(0), Row(37, replayed=2)]),
    "verify-1-to-9": (
        KdaLayer(H=1, HV=1, M=9),
        [Row(n, verify=n % 4 > 0, replayed=9 - n, half=n % 2) for n in range(1, 10)],
    ),
    "verify-33": (KdaLayer(H=1, HV=1, M=33), [Row(33, verify=True, replayed=33), Row(1, verify=True, replayed=7)]),
}


@pytest.mark.parametrize("case", CASES)
def test_kda_matches_the_reference(path: Path, case: str) -> None:
    layer, rows = CASES[case]
    check_against_reference(make_kda_batch(rows, path, layer), path, path.dtype)


@pytest.mark.parametrize("case", ["mixed", "verify-that-writes-nothing"])
def test_kda_of_many_heads_matches_the_reference(path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program per several parts of the state, as there is for many rows."""
    use_many_heads(monkeypatch)
    layer, rows = CASES[case]
    check_against_reference(make_kda_batch(rows, path, layer), path, path.dtype)


@pytest.mark.parametrize("case", ["raw-gates", "no-norms", "neither"])
@pytest.mark.parametrize("rows", ["mixed", "long-replays"])
def test_kda_takes_gates_and_keys_as_they_come(path: Path, case: str, rows: str) -> None:
    layer, plan = CASES[rows]
    batch = make_kda_batch(plan, path, layer)
    if case != "no-norms":
        batch = batch.with_raw_gates()
    if case != "raw-gates":
        batch = batch.without_norms()
    check_against_reference(batch, path, path.dtype)


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "safe"])
def test_kda_is_the_same_with_its_own_gates_passed_raw(exact_path: Path, lower_bound: float | None) -> None:
    layer = replace(PLAIN, lower_bound=lower_bound)
    batch = make_kda_batch([Row(1), Row(4, verify=True, replayed=2), Row(40)], exact_path, layer)
    assert batch.A_log is not None and batch.dt_bias is not None
    rate = batch.A_log.exp().repeat_interleave(layer.K)
    x = batch.a + batch.dt_bias
    g = -rate * torch.nn.functional.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    raw = replace(batch.clone(), a=g, b=batch.b.sigmoid(), A_log=None, dt_bias=None)
    assert_close("o", raw.run(exact_path), batch.run(exact_path), torch.float32)
    assert_close("state", raw.state, batch.state, torch.float32)


def test_equal_decays_of_all_channels_are_those_of_a_head(exact_path: Path) -> None:
    """Then it is the gated delta rule, whose reference knows nothing of channels."""
    delta = make_batch([Row(1), Row(4, verify=True), Row(40)], exact_path).with_raw_gates()
    layer, size = delta.layer, delta.layer.K
    drafts = torch.zeros(*delta.drafts.shape[:3], layer.record + layer.HV * (size - 1))
    batch = KdaBatch(
        KdaLayer(layer.H, layer.HV, size, layer.V, layer.M),
        delta.rows,
        delta.qkv,
        delta.a.repeat_interleave(size, dim=1),
        delta.b,
        None,
        None,
        delta.state.clone(),
        drafts.to(delta.state.device),
    )
    want = gated_delta_reference(*delta.inputs, delta.state, delta.drafts, delta.rows, num_key_heads=layer.H)
    assert_close("o", batch.run(exact_path), want, torch.float32)
    assert_close("state", batch.state, delta.state, torch.float32)


def test_kda_in_fp32_is_near_fp64(exact_path: Path) -> None:
    """Against the recurrence in fp64, on numbers that no other test has."""
    batch = make_kda_batch([Row(5, verify=True), Row(90)], exact_path, KdaLayer(K=32, V=16, M=5), seed=11)
    wide = batch.replaced(**{name: getattr(batch, name).double() for name in ("qkv", "a", "b", "A_log", "dt_bias")})
    wide = wide.replaced(state=batch.state.double(), drafts=batch.drafts.double())
    want = wide.run_reference()
    assert want.dtype == torch.float64
    assert_close("o", batch.run(exact_path), want, torch.float32)
    assert_close("state", batch.state, wide.state, torch.float32)


def test_kda_rounds_a_16_bit_state_once(path: Path) -> None:
    rows = [Row(1), Row(3, verify=True, replayed=2), Row(37)]
    check_against_reference(make_kda_batch(rows, path, state_dtype=torch.bfloat16), path, torch.bfloat16)


@pytest.mark.parametrize("gate", [-60.0, 0.0, 1000.0], ids=["no-decay", "usual", "decay-of-1000"])
def test_kda_is_right_for_correlated_keys(path: Path, gate: float) -> None:
    batch = make_correlated(make_kda_batch([Row(4, verify=True, replayed=4), Row(66)], path))
    # Strong gates between usual ones, in every second channel: only the tokens after the last one may be seen there.
    batch.a[::3, ::2] = gate
    check_against_reference(batch, path, path.dtype)


@pytest.mark.parametrize("strength", [6.0, 40.0, math.inf], ids=["of-16-tokens", "of-a-token", "of-all"])
def test_kda_survives_decays_that_overflow(path: Path, strength: float) -> None:
    """The inverse of what 64 tokens, 16 or a single one leave is more than fp32 holds; some channels keep all."""
    batch = make_correlated(make_kda_batch([Row(2, verify=True), Row(70)], path, KdaLayer(K=32)).with_raw_gates())
    batch.a.fill_(-strength)
    batch.a[:, ::3] = 0.0
    batch.a[::5, 1::3] = -0.125
    check_against_reference(batch, path, path.dtype)


@pytest.mark.parametrize("ends", [range(41), [0, 1, 34, 36, 70]], ids=["token-by-token", "pieces"])
def test_kda_in_pieces_is_kda_at_once(exact_path: Path, ends: Sequence[int]) -> None:
    check_pieces(make_kda_batch([Row(ends[-1])], exact_path), exact_path, ends)


def test_kda_replays_any_accepted_count(exact_path: Path) -> None:
    check_any_accepted_count(make_kda_batch([Row(4, verify=True, half=1)], exact_path), exact_path)


@pytest.mark.parametrize("gate", [0.0, 5.0, 1000.0], ids=["usual", "strong", "strongest"])
@pytest.mark.parametrize("many_heads", [False, True], ids=["few-heads", "many-heads"])
def test_kda_replay_leaves_what_committing_leaves(
    path: Path, gate: float, many_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.serial and many_heads:
        use_many_heads(monkeypatch)
    batch = make_kda_batch([Row(5, verify=True, replayed=2, half=1)], path, KdaLayer(H=1, HV=1, K=17, M=5))
    if gate:
        batch.a[:, ::2] = gate
    check_replay_alone(batch, path)


def test_kda_row_does_not_depend_on_its_neighbours(path: Path) -> None:
    rows = [Row(1), Row(1), Row(4, verify=True, replayed=2), Row(40, replayed=1), Row(30)]
    check_rows_are_apart(lambda: make_kda_batch(rows, path), rows, path)


@pytest.mark.parametrize("what", ["qkv", "a", "b"])
def test_a_draft_of_kda_that_is_not_finite_leaves_those_before_it_alone(path: Path, what: str) -> None:
    if not path.serial:
        pytest.skip("where rows go in chunks of 32 tokens it may reach tokens of its row before it")
    check_a_draft_that_is_not_finite(
        lambda: make_kda_batch([Row(6, verify=True, replayed=2)], path, KdaLayer(M=6)), path, what, at=3
    )


def test_kda_runs_in_a_cuda_graph(half_path: Path) -> None:
    batch = make_kda_batch([Row(1), Row(4, verify=True, replayed=1), Row(100)], half_path, KdaLayer(K=64, V=64))
    check_replay(lambda: [batch.run(half_path)], [batch.state, batch.drafts], lambda: None)


def test_lines_of_kda_lie_anywhere(half_path: Path) -> None:
    """Beyond 2^31 values, as engines count them."""
    layer, half = KdaLayer(H=1, HV=1, K=64, V=64), torch.bfloat16
    batch = make_kda_batch([Row(1), Row(40, replayed=2)], half_path, layer, max_short=1, state_dtype=half)
    check_far_lines(batch, half_path, lambda _: None)


def test_kda_leaves_its_inputs_alone(path: Path) -> None:
    batch = make_kda_batch([Row(1), Row(3, verify=True, replayed=1), Row(64)], path)
    assert batch.A_log is not None and batch.dt_bias is not None
    check_inputs_are_left_alone(batch, (batch.A_log, batch.dt_bias), path)


def test_kda_names_the_wrong_argument() -> None:
    good = make_kda_batch([Row(2)], Path("cpu", torch.float32))
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "qkv", {"qkv": good.qkv[:, 1:]}),
        (ValueError, "a", {"a": good.a[:, :2].contiguous()}),
        (TypeError, "b", {"b": good.b.double()}),
        (ValueError, "A_log", {"A_log": torch.zeros(3)}),
        (ValueError, "A_log", {"A_log": None}),
        (ValueError, "dt_bias", {"dt_bias": None}),
        (ValueError, "dt_bias", {"dt_bias": torch.zeros(2)}),
        (TypeError, "state", {"state": good.state.double()}),
        (ValueError, "drafts", {"drafts": good.drafts[..., 1:].contiguous()}),
        (ValueError, "state", {"layer": KdaLayer(H=3)}),
    ]
    for error, name, change in wrong:
        bad = replace(good, **change)
        with pytest.raises(error, match=f"^{name}: expected"):
            bad.run(Path("cpu", torch.float32))
    given = (good.qkv, good.a, good.b)
    weights, lines = (good.A_log, good.dt_bias), (good.state, good.drafts)
    own: list[tuple[type[Exception], str, dict[str, Any]]] = [
        *((ValueError, "lower_bound: expected a number below 0", {"lower_bound": value}) for value in (0.0, 5.0)),
        (ValueError, "lower_bound: expected a finite number", {"lower_bound": -math.inf}),
        (TypeError, "lower_bound: expected a number", {"lower_bound": "-5"}),
    ]
    for error, message, told in own:
        with pytest.raises(error, match=f"^{message}"):
            kda(*given, *weights, *lines, good.rows, num_key_heads=1, **told)
    with pytest.raises(ValueError, match=r"^lower_bound: expected None, as A_log and dt_bias are None"):
        kda(*given, None, None, *lines, good.rows, num_key_heads=1, lower_bound=-5.0)


def make_correlated(batch: KdaBatch) -> KdaBatch:
    """Give the batch keys that are alike, decays of e to begin with, and strengths near 1."""
    keys = batch.layer.H * batch.layer.K
    batch.qkv[:, keys : 2 * keys] = 1.0 + 0.01 * batch.qkv[:, keys : 2 * keys]
    if batch.A_log is not None:
        batch.A_log.zero_()
        batch.b.fill_(8.0)
    return batch


def use_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few rows have the tiles of many."""
    recurrent = pytest.importorskip("deltaline_kernels.kda.recurrent", reason="triton is not installed")
    monkeypatch.setattr(recurrent, "MANY_HEADS", 1)
