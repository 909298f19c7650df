"""mamba1 against its reference, and what must hold between its own runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from rigs.kernels.batches import Row, plan_rows
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import (
    check_a_draft_that_is_not_finite,
    check_against_reference,
    check_any_accepted_count,
    check_inputs_are_left_alone,
    check_pieces,
    check_replay_alone,
    check_rows_are_apart,
    same_bits,
)
from rigs.kernels.recurrence_rows import LONG_ROWS, ROWS, SHORT_ROWS
from rigs.kernels.scan_batches import ScanBatch, ScanLayer, make_scan_batch
from rigs.kernels.tolerance import LIMITS, assert_close
from torch import Tensor

from deltaline_kernels import mamba1

PLAIN = ScanLayer()
CASES = {
    **{name: (PLAIN, rows) for name, rows in ROWS.items()},
    **{f"short-{name}": (ScanLayer(M=8), rows) for name, rows in SHORT_ROWS.items()},
    "long": (ScanLayer(D=5), LONG_ROWS),
    "one-channel-odd-states": (ScanLayer(D=1, S=5), [Row(1), Row(3, verify=True, replayed=2), Row(11)]),
    "groups-of-channels": (ScanLayer(D=66, G=2, S=8), [Row(1), Row(4, verify=True, replayed=2), Row(13)]),
    "a-group-per-channel": (ScanLayer(D=3, G=3), [Row(1), Row(4, verify=True, replayed=3), Row(9)]),
    "several-programs": (ScanLayer(D=131), [Row(1), Row(3, verify=True, replayed=1), Row(6)]),
    "wide-states": (ScanLayer(D=7, S=70), [Row(2), Row(9)]),
    "states-of-256": (ScanLayer(D=9, S=256), [Row(1), Row(0), Row(7, replayed=2)]),
}


@pytest.mark.parametrize("case", CASES)
def test_mamba1_matches_the_reference(path: Path, case: str) -> None:
    layer, rows = CASES[case]
    check_against_reference(make_scan_batch(rows, path, layer), path, path.dtype)


@pytest.mark.parametrize("G", [1, 2])
def test_mamba1_matches_fp64(exact_path: Path, G: int) -> None:
    """Of fresh inputs, with the errors that sums of 300 tokens have."""
    batch = make_scan_batch([Row(300), Row(5, replayed=3), Row(1)], exact_path, ScanLayer(D=12, G=G), seed=17)
    given = {field.name: getattr(batch, field.name) for field in fields(batch)}
    exact = batch.clone().replaced(**{k: v.double() for k, v in given.items() if isinstance(v, Tensor)})
    want, got = exact.run_reference(), batch.run(exact_path)
    assert_close("y", got, want, torch.float32)
    assert_close("state", batch.state, exact.state, torch.float32)


def test_mamba1_without_a_gate_matches_the_reference(path: Path) -> None:
    rows = [Row(1), Row(3, verify=True, replayed=2), Row(7)]
    check_against_reference(replace(make_scan_batch(rows, path), gated=False), path, path.dtype)


def test_mamba1_takes_steps_keys_and_gates_in_fp32(path: Path) -> None:
    batch = make_scan_batch([Row(1), Row(3, verify=True, replayed=2), Row(7)], path)
    wide = {name: getattr(batch, name).float() for name in ("dt", "BC", "z")}
    check_against_reference(replace(batch, **wide), path, path.dtype)


@pytest.mark.parametrize("layer", [ScanLayer(D=33), ScanLayer(D=6, G=2, S=4), ScanLayer(D=9, S=64)], ids=str)
def test_mamba1_takes_aligned_keys(path: Path, layer: ScanLayer) -> None:
    """Of 16 bits they are loaded in pairs."""
    rows = [Row(1), Row(3, verify=True, replayed=2), Row(11)]
    check_against_reference(make_scan_batch(rows, path, layer, padding=8), path, path.dtype)


def test_mamba1_rounds_a_16_bit_state_once(path: Path) -> None:
    rows = [Row(1), Row(3, verify=True, replayed=2), Row(37)]
    check_against_reference(make_scan_batch(rows, path, state_dtype=torch.bfloat16), path, torch.bfloat16)


@pytest.mark.parametrize("step", [-60.0, 1000.0], ids=["steps-of-almost-0", "steps-of-1000"])
def test_mamba1_is_right_for_the_smallest_and_largest_steps(path: Path, step: float) -> None:
    batch = make_scan_batch([Row(4, verify=True, replayed=4), Row(66)], path)
    # Large steps between usual ones: only the tokens from the last one on may be seen.
    batch.dt[::3] = step
    check_against_reference(batch, path, path.dtype)


def test_mamba1_survives_the_strongest_decay(path: Path) -> None:
    batch = make_scan_batch([Row(2, verify=True), Row(40)], path)
    batch.A_log.fill_(20.0)
    batch.dt.fill_(1000.0)
    check_against_reference(batch, path, path.dtype)


def test_small_steps_are_exact(exact_path: Path) -> None:
    """log(1 + exp(x)) is 0 for x below -17, where softplus is exp(x)."""
    batch = make_scan_batch([Row(4, verify=True, fresh=True)], exact_path)
    batch.dt.copy_(torch.tensor([[-12.0], [-18.0], [-25.0], [-40.0]]))
    batch.dt_bias.zero_()
    batch.run(exact_path)
    got = batch.drafts[1, 1, :, -PLAIN.D :].double()
    want = batch.dt.double().exp().log1p()
    assert float(((got - want) / want).abs().amax()) < 1e-5


@pytest.mark.parametrize("what", ["x", "dt", "z"])
def test_a_value_that_is_not_finite_stays_in_its_channel(path: Path, what: str) -> None:
    good, bad = (make_scan_batch([Row(6), Row(1)], path) for _ in range(2))
    getattr(bad, what)[2, 3] = torch.nan
    want, got = good.run(path), bad.run(path)
    others = [channel for channel in range(PLAIN.D) if channel != 3]
    assert torch.equal(got[:, others], want[:, others]) and torch.equal(got[:2], want[:2])
    assert got[2, 3].isnan() and torch.equal(got[6:], want[6:])
    assert bool(bad.state[1, 3].isnan().all()) == (what != "z") and same_bits(
        bad.state[1, others], good.state[1, others]
    )


@pytest.mark.parametrize("ends", [range(71), [0, 1, 34, 36, 70]], ids=["token-by-token", "pieces"])
def test_mamba1_in_pieces_is_mamba1_at_once(exact_path: Path, ends: Sequence[int]) -> None:
    check_pieces(make_scan_batch([Row(70)], exact_path), exact_path, ends)


def test_mamba1_replays_any_accepted_count(exact_path: Path) -> None:
    check_any_accepted_count(make_scan_batch([Row(4, verify=True, half=1)], exact_path), exact_path)


@pytest.mark.parametrize("step", [0.0, 5.0, 1000.0], ids=["usual", "large", "largest"])
def test_mamba1_replay_leaves_what_committing_leaves(path: Path, step: float) -> None:
    batch = make_scan_batch([Row(5, verify=True, replayed=2, half=1)], path, ScanLayer(S=17, M=5))
    if step:
        batch.A_log.zero_()
        batch.dt.fill_(step)
    check_replay_alone(batch, path)


def test_mamba1_row_does_not_depend_on_its_neighbours(path: Path) -> None:
    rows = [Row(1), Row(1), Row(4, verify=True, replayed=2), Row(40, replayed=1)]
    check_rows_are_apart(lambda: make_scan_batch(rows, path), rows, path)


def test_a_row_of_odd_channels_is_the_same_alone() -> None:
    """On the CPU, where rows of a length are computed at once, from tokens that lie apart."""
    path, layer, rows = Path("cpu", torch.float32), ScanLayer(D=33), [Row(63), Row(15), Row(63)]
    alone = plan_rows([rows[0], Row(15, skipped=True), Row(63, skipped=True)], 63, "cpu")
    for seed in range(20):
        batch = make_scan_batch(rows, path, layer, max_short=63, seed=seed)
        by_itself = batch.clone().replaced(rows=alone).run(path)
        assert same_bits(batch.run(path)[:63], by_itself[:63]), seed


def test_a_row_of_many_channels_does_not_depend_on_its_neighbours(path: Path) -> None:
    """Products of matrices round by how many of them there are, from some size on."""
    rows, layer = [Row(1), Row(1), Row(4, verify=True, replayed=2), Row(9)], ScanLayer(D=128)
    check_rows_are_apart(lambda: make_scan_batch(rows, path, layer), rows, path)


@pytest.mark.parametrize("what", ["x", "dt", "BC", "z"])
def test_a_draft_that_is_not_finite_leaves_those_before_it_alone(path: Path, what: str) -> None:
    check_a_draft_that_is_not_finite(lambda: make_scan_batch([Row(4, verify=True, replayed=2)], path), path, what, at=2)


def test_mamba1_leaves_its_inputs_alone(path: Path) -> None:
    batch = make_scan_batch([Row(1), Row(3, verify=True, replayed=1), Row(64)], path)
    check_inputs_are_left_alone(batch, (batch.A_log, batch.D, batch.dt_bias), path)


def test_drafts_on_neighbouring_lines_leave_their_states_on_scattered_ones(path: Path) -> None:
    batch = make_scan_batch([Row(2, verify=True, to="other"), Row(2, verify=True, to="other"), Row(1)], path)
    batch.state[2] = batch.state[3]
    batch.rows.control[1, :2] = torch.tensor([1, 2], device=batch.state.device)
    batch.rows.control[2, :2] = torch.tensor([6, 4], device=batch.state.device)
    check_against_reference(batch, path, path.dtype)


def test_the_reference_is_the_recurrence_of_one_channel() -> None:
    """By hand, in numbers that need no rounding but that of exp."""
    batch = make_scan_batch([Row(2)], Path("cpu", torch.float32), ScanLayer(D=1, S=2), padding=0)
    batch.A_log.zero_()  # rates of -1
    batch.dt_bias.zero_()
    batch.dt.copy_(torch.tensor([[0.0], [1.0]]))
    d = torch.tensor([2.0, 1.0 + torch.e]).double().log()
    (x0, x1), (z0, z1), skip = batch.x.double()[:, 0], batch.z.double()[:, 0], batch.D.double()[0]
    (B0, C0), (B1, C1) = batch.BC.double().unflatten(1, (2, 2))
    h0 = (-d[0]).exp() * batch.state[1, 0].double() + d[0] * x0 * B0
    h1 = (-d[1]).exp() * h0 + d[1] * x1 * B1
    want = torch.stack([(h0 @ C0 + skip * x0) * z0 * z0.sigmoid(), (h1 @ C1 + skip * x1) * z1 * z1.sigmoid()])
    got = batch.run_reference()[:, 0].double()
    assert float((got - want).abs().max()) < LIMITS[torch.float32]
    assert float((batch.state[1, 0].double() - h1).abs().max()) < LIMITS[torch.float32]


def test_mamba1_names_the_wrong_argument() -> None:
    path = Path("cpu", torch.float32)
    good: ScanBatch = make_scan_batch([Row(2)], path)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "x", {"x": good.x[:, 1:]}),
        (TypeError, "x", {"x": None}),
        (ValueError, "dt", {"dt": good.dt[:1]}),
        (TypeError, "dt", {"dt": good.dt.double()}),
        (ValueError, "BC", {"BC": good.BC[:, 1:]}),
        (ValueError, "z", {"z": good.z[:, 1:]}),
        (ValueError, "A_log", {"A_log": torch.zeros(3)}),
        (TypeError, "D", {"D": None}),
        (ValueError, "dt_bias", {"dt_bias": torch.zeros(2, 1)}),
        (TypeError, "state", {"state": good.state.double()}),
        (ValueError, "state", {"state": torch.zeros(3, 10, 257)}),
        (ValueError, "state", {"state": torch.zeros(3, 2, 5, 16)}),
        (ValueError, "drafts", {"drafts": good.drafts[..., 1:].contiguous()}),
        (ValueError, "state", {"layer": ScanLayer(G=3)}),
        (ValueError, "num_groups", {"layer": ScanLayer(G=0)}),
    ]
    for error, name, change in wrong:
        with pytest.raises(error, match=f"^{name}: expected"):
            replace(good, **change).run(path)
    with pytest.raises(TypeError, match=r"^rows: expected Rows"):
        mamba1(*good.inputs, good.state, good.drafts, good.rows.control)  # type: ignore[arg-type]
