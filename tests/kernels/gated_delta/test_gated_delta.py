"""gated_delta against its reference, and what must hold between its own runs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from rigs.kernels.batches import Batch, Layer, Row, make_batch, plan_rows
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import Rows, gated_delta, gated_delta_reference

PLAIN = Layer()
CASES = {
    "decode": (PLAIN, [Row(1) for _ in range(5)]),
    "decode-of-scattered-lines": (PLAIN, [Row(1), Row(1, to="other"), Row(1, fresh=True), Row(1, to="nowhere")]),
    "one-head-odd-dims": (Layer(H=1, HV=1, K=5, V=3), [Row(1), Row(3, verify=True, replayed=2), Row(11)]),
    "grouped-heads-of-wide-values": (Layer(H=2, HV=6, K=8, V=35), [Row(1), Row(4, verify=True), Row(33)]),
    "wide-keys": (Layer(H=1, HV=1, K=70, V=4), [Row(2), Row(37)]),
    "1-63-64-65": (Layer(H=1, HV=1), [Row(1), Row(63), Row(64, fresh=True), Row(65, to="other")]),
    "prime": (Layer(H=1, HV=1), [Row(127)]),
    "heads-of-128": (Layer(H=1, HV=1, K=128, V=128), [Row(1), Row(3, verify=True, replayed=2), Row(66)]),
    "heads-of-256": (Layer(H=1, HV=1, K=256, V=256), [Row(1), Row(0), Row(70, replayed=2)]),
    "chunks-that-follow-each-other": (PLAIN, [Row(n, to="other") for n in (128, 5, 64, 191, 63, 1, 65)]),
    "empty": (
        PLAIN,
        [Row(0), Row(0, to="other"), Row(0, replayed=3, half=1), Row(0, fresh=True), Row(0, to="nowhere")],
    ),
    "empty-long": (PLAIN, [Row(5), Row(0, to="other"), Row(0, replayed=3), Row(0)]),
    "verify-every-replayed-count": (PLAIN, [Row(4, verify=True, replayed=r, half=r % 2) for r in range(5)]),
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
    "verify-of-other-lengths": (PLAIN, [Row(n, verify=True, replayed=1, to="other") for n in range(1, 5)]),
    "verify-that-writes-nothing": (PLAIN, [Row(4, verify=True, replayed=2, to="nowhere"), Row(2, verify=True)]),
    "long-replays": (
        PLAIN,
        [Row(5, replayed=4), Row(40, replayed=2, half=1, to="other"), Row(9, replayed=3, to="nowhere")],
    ),
    "skipped-and-null": (PLAIN, [Row(1, skipped=True), Row(3, to="null"), Row(9, skipped=True), Row(9, to="null")]),
    "mixed": (
        PLAIN,
        [
            Row(1),
            Row(4, verify=True, replayed=1, half=1),
            Row(2, skipped=True),
            Row(0),
            Row(3, fresh=True),
            Row(41),
            Row(1),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_delta_matches_the_reference(path: Path, case: str) -> None:
    layer, rows = CASES[case]
    check_against_reference(make_batch(rows, path, layer), path, path.dtype)


@pytest.mark.parametrize("case", ["mixed", "verify-that-writes-nothing"])
def test_delta_of_many_heads_matches_the_reference(path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program per several parts of the state, as there is for many rows."""
    recurrent = pytest.importorskip("deltaline_kernels.gated_delta.recurrent", reason="triton is not installed")
    monkeypatch.setattr(recurrent, "MANY_HEADS", 1)
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
    assert_close("o", raw.run_delta(exact_path), batch.run_delta(exact_path), torch.float32)
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


def test_delta_in_chunks_is_delta_token_by_token(exact_path: Path) -> None:
    chunked = make_batch([Row(70)], exact_path)
    serial = chunked.clone()
    want = []
    for t in range(70):
        want.append(run_part(exact_path, serial, t, t + 1))
    assert_close("o", chunked.run_delta(exact_path), torch.cat(want), torch.float32)
    assert_close("state", chunked.state, serial.state, torch.float32)


def test_delta_splits_without_a_seam(exact_path: Path) -> None:
    whole = make_batch([Row(70)], exact_path)
    split = whole.clone()
    bounds = [0, 1, 34, 36, 70]
    got = [run_part(exact_path, split, *ends) for ends in pairwise(bounds)]
    assert_close("o", torch.cat(got), whole.run_delta(exact_path), torch.float32)
    assert_close("state", split.state, whole.state, torch.float32)


def test_delta_replays_any_accepted_count(exact_path: Path) -> None:
    for accepted in range(5):
        drafted = make_batch([Row(4, verify=True, half=1)], exact_path)
        serial = drafted.clone()
        before = drafted.state.clone()
        drafted.run_delta(exact_path)
        assert torch.equal(drafted.state.nan_to_num(7.0), before.nan_to_num(7.0))
        for t in range(accepted):
            run_part(exact_path, serial, t, t + 1)
        got = run_part(exact_path, drafted, 3, 4, Row(1, replayed=accepted, half=0))
        want = run_part(exact_path, serial, 3, 4)
        assert_close(f"o, accepted {accepted}", got, want, torch.float32)
        assert_close(f"state, accepted {accepted}", drafted.state, serial.state, torch.float32)


@pytest.mark.parametrize(
    ("gate", "many_heads"),
    [(0.0, False), (5.0, False), (5.0, True), (1000.0, False)],
    ids=["usual", "strong", "strong-many-heads", "strongest"],
)
def test_delta_replay_leaves_what_committing_leaves(
    path: Path, gate: float, many_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit where both go token by token, strong gates that scale the tile in between included."""
    if path.serial and many_heads:
        from deltaline_kernels.gated_delta import recurrent

        monkeypatch.setattr(recurrent, "MANY_HEADS", 1)
    layer = Layer(H=1, HV=1, K=17, M=5)
    for accepted in (1, 5):
        drafted = make_batch([Row(5, verify=True, replayed=2, half=1)], path, layer)
        assert drafted.A_log is not None
        if gate:
            drafted.A_log.zero_()
            drafted.a.fill_(gate)
        committed = drafted.clone()
        drafted.run_delta(path)
        run_part(path, drafted, 0, 0, Row(0, replayed=accepted))
        run_part(path, committed, 0, 0, Row(0, replayed=2, half=1))
        run_part(path, committed, 0, accepted)
        assert not drafted.state[1].isnan().any()
        if path.serial:
            assert torch.equal(drafted.state[1], committed.state[1])
        assert_close(f"state, accepted {accepted}", drafted.state, committed.state, torch.float32)


def test_delta_leaves_its_inputs_alone(path: Path) -> None:
    batch = make_batch([Row(1), Row(3, verify=True), Row(64)], path, Layer(H=1, HV=1))
    assert batch.A_log is not None and batch.dt_bias is not None
    inputs = (batch.qkv, batch.a, batch.b, batch.A_log, batch.dt_bias)
    before = [x.clone() for x in inputs]
    batch.run_delta(path)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_delta_records_no_gradients(path: Path) -> None:
    batch = make_batch([Row(1), Row(3, verify=True, replayed=1), Row(40, replayed=2)], path)
    assert batch.A_log is not None
    for x in (batch.qkv, batch.a, batch.b, batch.A_log):
        x.requires_grad_()
    o = batch.run_delta(path)
    assert not o.requires_grad and not batch.state.requires_grad and not batch.drafts.requires_grad


def test_delta_names_the_wrong_argument() -> None:
    good = make_batch([Row(2)], Path("cpu", torch.float32))
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "qkv", {"qkv": good.qkv[:, 1:]}),
        (ValueError, "a", {"a": good.a[:1]}),
        (TypeError, "b", {"b": good.b.double()}),
        (ValueError, "A_log", {"A_log": torch.zeros(3)}),
        (ValueError, "A_log", {"A_log": None}),
        (ValueError, "dt_bias", {"dt_bias": None}),
        (TypeError, "state", {"state": good.state.half()}),
        (ValueError, "drafts", {"drafts": good.drafts[..., 1:].contiguous()}),
        (ValueError, "state", {"layer": Layer(H=3)}),
    ]
    for error, name, change in wrong:
        bad = replace(good, **change)
        with pytest.raises(error, match=f"^{name}: expected"):
            bad.run_delta(Path("cpu", torch.float32))
    assert good.A_log is not None and good.dt_bias is not None
    scalars: list[tuple[str, Any]] = [("eps", 0.0), ("eps", math.nan), ("scale", -1.0), ("scale", math.inf)]
    inputs = (good.qkv, good.a, good.b, good.A_log, good.dt_bias, good.state, good.drafts, good.rows)
    for name, value in scalars:
        with pytest.raises(ValueError, match=f"^{name}: expected a positive number"):
            gated_delta(*inputs, num_key_heads=1, **{name: value})
    with pytest.raises(ValueError, match=r"^num_key_heads: expected"):
        gated_delta(
            good.qkv, good.a, good.b, good.A_log, good.dt_bias, good.state, good.drafts, good.rows, num_key_heads=0
        )


def check_against_reference(batch: Batch, path: Path, dtype: torch.dtype) -> None:
    """Compare outputs, states and drafts, lines that no row may touch included."""
    reference = batch.clone()
    want = reference.run_delta_reference()
    got = batch.run_delta(path)
    assert got.dtype == path.dtype
    assert_close("o", got, want, path.dtype if dtype == torch.bfloat16 else dtype)
    assert_close("state", batch.state, reference.state, dtype)
    assert_close("drafts", batch.drafts, reference.drafts, path.dtype)


def run_part(path: Path, batch: Batch, begin: int, end: int, row: Row | None = None) -> Tensor:
    """Run tokens begin..end of a batch of one row, as a row of their own."""
    rows = plan_rows([row or Row(end - begin)], batch.layer.M, path.device)
    tokens = slice(begin, end)
    part = replace(batch, rows=rows, qkv=batch.qkv[tokens], a=batch.a[tokens], b=batch.b[tokens])
    return part.run_delta(path)


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


def test_a_number_of_heads_that_is_none_is_named() -> None:
    rows = Rows.build([1], [0], [1], [1], [0], [0], max_short=1, device="cpu")
    tokens, gate, state, drafts = (
        torch.randn(1, 48),
        torch.randn(1, 2),
        torch.randn(2, 2, 8, 16),
        torch.randn(2, 2, 1, 34),
    )
    num_key_heads: Any = [1]
    with pytest.raises((TypeError, ValueError), match="num_key_heads: expected"):
        gated_delta(tokens, gate, gate, gate[0], gate[0], state, drafts, rows, num_key_heads=num_key_heads)
