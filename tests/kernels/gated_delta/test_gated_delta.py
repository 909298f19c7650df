"""gated_delta against its reference, and what must hold between its own runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.kernels.batches import Layer, Row, make_batch
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import (
    check_against_reference,
    check_any_accepted_count,
    check_inputs_are_left_alone,
    check_pieces,
    check_replay_alone,
)
from rigs.kernels.recurrence_rows import ROWS
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import Rows, gated_delta, gated_delta_reference

PLAIN = Layer()
CASES = {
    **{name: (PLAIN, rows) for name, rows in ROWS.items()},
    "one-head-odd-dims": (Layer(H=1, HV=1, K=5, V=3), [Row(1), Row(3, verify=True, replayed=2), Row(11)]),
    "grouped-heads-of-wide-values": (Layer(H=2, HV=6, K=8, V=35), [Row(1), Row(4, verify=True), Row(33)]),
    "wide-keys": (Layer(H=1, HV=1, K=70, V=4), [Row(2), Row(37)]),
    "1-63-64-65": (Layer(H=1, HV=1), [Row(1), Row(63), Row(64, fresh=True), Row(65, to="other")]),
    "prime": (Layer(H=1, HV=1), [Row(127)]),
    "heads-of-128": (Layer(H=1, HV=1, K=128, V=128), [Row(1), Row(3, verify=True, replayed=2), Row(66)]),
    "heads-of-256": (Layer(H=1, HV=1, K=256, V=256), [Row(1), Row(0), Row(70, replayed=2)]),
    "verify-longer-than-a-chunk": (Layer(M=70), [Row(70, verify=True, replayed=37), Row(33, verify=True)]),
    "verify-1-to-5-beside-decode": (
        Layer(M=5),
        [
            Row(1),
            Row(1, verify=True, replayed=5),
            Row(2, verify=True, replayed=1, half=1),
            Row(1, replayed=4),
            Row(3, verify=True, half=1),
            Row(4, verify=True, replayed=2),
            Row(5, verify=True, replayed=3, to="other"),
            Row(5),
        ],
    ),
    "verify-1-to-9": (
        Layer(H=1, HV=1, M=9),
        [Row(n, verify=n % 4 > 0, replayed=9 - n, half=n % 2) for n in range(1, 10)],
    ),
    "verify-33": (Layer(H=1, HV=1, M=33), [Row(33, verify=True, replayed=33), Row(1, verify=True, replayed=7)]),
}


@pytest.mark.parametrize("case", CASES)
def test_delta_matches_the_reference(path: Path, case: str) -> None:
    layer, rows = CASES[case]
    check_against_reference(make_batch(rows, path, layer), path, path.dtype)


@pytest.mark.parametrize("case", ["mixed", "verify-that-writes-nothing"])
def test_delta_of_many_heads_matches_the_reference(path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program per several parts of the state, as there is for many rows."""
    use_many_heads(monkeypatch)
    layer, rows = CASES[case]
    check_against_reference(make_batch(rows, path, layer), path, path.dtype)


@pytest.mark.parametrize("case", ["raw-gates", "no-norms", "neither"])
@pytest.mark.parametrize("rows", ["mixed", "long-replays"])
def test_delta_takes_gates_and_keys_as_they_come(path: Path, case: str, rows: str) -> None:
    layer, plan = CASES[rows]
    batch = make_batch(plan, path, layer)
    if case != "no-norms":
        batch = batch.with_raw_gates()
    if case != "raw-gates":
        batch = batch.without_norms()
    check_against_reference(batch, path, path.dtype)


def test_delta_is_the_same_with_its_own_gates_passed_raw(exact_path: Path) -> None:
    batch = make_batch([Row(1), Row(4, verify=True, replayed=2), Row(40)], exact_path)
    assert batch.A_log is not None and batch.dt_bias is not None
    raw = replace(
        batch.clone(),
        a=-batch.A_log.exp() * torch.nn.functional.softplus(batch.a + batch.dt_bias),
        b=batch.b.sigmoid(),
        A_log=None,
        dt_bias=None,
    )
    assert_close("o", raw.run(exact_path), batch.run(exact_path), torch.float32)
    assert_close("state", raw.state, batch.state, torch.float32)


def test_delta_rounds_a_16_bit_state_once(path: Path) -> None:
    rows = [Row(1), Row(3, verify=True, replayed=2), Row(37)]
    check_against_reference(make_batch(rows, path, state_dtype=torch.bfloat16), path, torch.bfloat16)


@pytest.mark.parametrize("gate", [-60.0, 0.0, 1000.0], ids=["no-decay", "usual", "decay-of-1000"])
def test_delta_is_right_for_correlated_keys(path: Path, gate: float) -> None:
    batch = make_batch([Row(4, verify=True, replayed=4), Row(66)], path)
    keys = batch.layer.H * batch.layer.K
    batch.qkv[:, keys : 2 * keys] = 1.0 + 0.01 * batch.qkv[:, keys : 2 * keys]
    assert batch.A_log is not None
    batch.A_log.zero_()
    batch.b.fill_(8.0)
    # Strong gates between usual ones: only the tokens after the last one may be seen.
    batch.a[::3] = gate
    check_against_reference(batch, path, path.dtype)


def test_delta_survives_the_strongest_gates(path: Path) -> None:
    batch = make_batch([Row(2, verify=True), Row(40)], path)
    assert batch.A_log is not None
    batch.A_log.fill_(20.0)
    batch.a.fill_(1000.0)
    check_against_reference(batch, path, path.dtype)


@pytest.mark.parametrize("ends", [range(41), [0, 1, 34, 36, 70]], ids=["token-by-token", "pieces"])
def test_delta_in_pieces_is_delta_at_once(exact_path: Path, ends: Sequence[int]) -> None:
    check_pieces(make_batch([Row(ends[-1])], exact_path), exact_path, ends)


def test_delta_replays_any_accepted_count(exact_path: Path) -> None:
    check_any_accepted_count(make_batch([Row(4, verify=True, half=1)], exact_path), exact_path)


@pytest.mark.parametrize(
    ("gate", "many_heads"),
    [(0.0, False), (5.0, False), (5.0, True), (1000.0, False)],
    ids=["usual", "strong", "strong-many-heads", "strongest"],
)
def test_delta_replay_leaves_what_committing_leaves(
    path: Path, gate: float, many_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.serial and many_heads:
        use_many_heads(monkeypatch)
    batch = make_batch([Row(5, verify=True, replayed=2, half=1)], path, Layer(H=1, HV=1, K=17, M=5))
    assert batch.A_log is not None
    if gate:
        batch.A_log.zero_()
        batch.a.fill_(gate)
    check_replay_alone(batch, path)


def test_delta_leaves_its_inputs_alone(path: Path) -> None:
    batch = make_batch([Row(1), Row(3, verify=True, replayed=1), Row(64)], path)
    assert batch.A_log is not None and batch.dt_bias is not None
    check_inputs_are_left_alone(batch, (batch.A_log, batch.dt_bias), path)


def test_delta_names_the_wrong_argument() -> None:
    good = make_batch([Row(2)], Path("cpu", torch.float32))
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "qkv", {"qkv": good.qkv[:, 1:]}),
        (ValueError, "a", {"a": good.a[:1]}),
        (TypeError, "b", {"b": good.b.double()}),
        (ValueError, "A_log", {"A_log": torch.zeros(3)}),
        (ValueError, "A_log", {"A_log": None}),
        (ValueError, "dt_bias", {"dt_bias": None}),
        (TypeError, "state", {"state": good.state.double()}),
        (ValueError, "drafts", {"drafts": good.drafts[..., 1:].contiguous()}),
        (ValueError, "state", {"layer": Layer(H=3)}),
    ]
    for error, name, change in wrong:
        bad = replace(good, **change)
        with pytest.raises(error, match=f"^{name}: expected"):
            bad.run(Path("cpu", torch.float32))
    own: list[tuple[type[Exception], str, dict[str, Any]]] = [
        *((ValueError, "eps: expected a (positive|finite) number", {"eps": value}) for value in (0.0, math.nan)),
        *((ValueError, "scale: expected a (positive|finite) number", {"scale": value}) for value in (-1.0, math.inf)),
        (ValueError, "num_key_heads: expected", {"num_key_heads": 0}),
        (TypeError, "num_key_heads: expected", {"num_key_heads": [1]}),
    ]
    for error, message, told in own:
        with pytest.raises(error, match=f"^{message}"):
            gated_delta(*good.inputs, good.state, good.drafts, good.rows, **{"num_key_heads": 1, **told})


def use_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few rows have the tiles of many."""
    recurrent = pytest.importorskip("deltaline_kernels.gated_delta.recurrent", reason="triton is not installed")
    monkeypatch.setattr(recurrent, "MANY_HEADS", 1)


def test_rows_are_read_anew_when_their_control_has_changed() -> None:
    """What follows from a batch's rows is kept for its layers, not for whatever is written into the same tensor."""
    rows = Rows.build([1, 1], [1, 2], [1, 2], [1, 1], [0, 0], [0, 0], max_short=4, device="cpu")
    qkv, a, b, rate, bias = (torch.randn(size) for size in ((2, 2 * 16 + 2 * 8), (2, 2), (2, 2), (2,), (2,)))
    state, drafts = torch.randn(8, 2, 8, 16), torch.randn(8, 2, 4, 16 + 2 * 8 + 2)
    for lines in (torch.tensor([1, 2]), torch.tensor([5, 6])):
        rows.control[1:3, :2] = lines
        got, want = (
            function(qkv, a, b, rate, bias, state.clone(), drafts.clone(), rows, num_key_heads=1)
            for function in (gated_delta, gated_delta_reference)
        )
        assert_close("o", got, want, torch.float32)
