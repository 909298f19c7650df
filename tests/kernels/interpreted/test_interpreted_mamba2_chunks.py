"""Long rows of Mamba2 in Triton's interpreter: in tiles and with masks, whole and in parts."""

from __future__ import annotations

import numpy
import pytest
import torch
from kernels.mamba2.test_mamba2_chunks import LAYERS, SMALL, in_parts
from rigs.kernels.batches import Row
from rigs.kernels.mamba_batches import MambaLayer, make_mamba_batch
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.recurrence_checks import check_against_reference, check_pieces, check_rows_are_apart
from rigs.kernels.walks import ALIGNED

HALF = InterpretedPath("cpu", torch.float16)
ROWS = [Row(5, to="other"), Row(150, replayed=2), Row(0), Row(65, skipped=True), Row(64, fresh=True), Row(70)]


@pytest.mark.parametrize("padding", [ALIGNED, 3], ids=["tiles", "masks"])
@pytest.mark.parametrize("length", [0, 64], ids=["whole", "in-parts"])
def test_chunks_match_the_reference(length: int, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, length)
    batch = make_mamba_batch(ROWS, HALF, SMALL, max_short=1, padding=padding)
    check_against_reference(batch, HALF, torch.float16)


@pytest.mark.parametrize("layer", ["heads-of-64-states-of-16", "heads-of-80-states-of-96"])
def test_chunks_of_odd_sizes_match_the_reference(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 64)
    batch = make_mamba_batch([Row(70), Row(130, to="other")], HALF, LAYERS[layer], max_short=1, padding=ALIGNED)
    check_against_reference(batch, HALF, torch.float16)


def test_parts_round_a_16_bit_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 64)
    rows = [Row(150, replayed=1), Row(65)]
    batch = make_mamba_batch(rows, HALF, SMALL, state_dtype=torch.bfloat16, padding=ALIGNED)
    check_against_reference(batch, HALF, torch.bfloat16)


def test_calls_leave_what_one_call_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 0)
    check_pieces(make_mamba_batch([Row(200)], HALF, SMALL, padding=ALIGNED), HALF, [0, 64, 150, 153, 200])


@pytest.mark.parametrize("length", [0, 64], ids=["whole", "in-parts"])
def test_row_in_chunks_does_not_depend_on_its_neighbours(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, length)
    rows = [Row(30), Row(100, replayed=1), Row(65, fresh=True)]
    layer = MambaLayer(H=1, P=64, S=16)
    check_rows_are_apart(lambda: make_mamba_batch(rows, HALF, layer, padding=ALIGNED), rows, HALF)


def test_the_strongest_decays_leave_the_newest_token() -> None:
    """Sums of log decays that are not bounded swallow the logarithm of a time step."""
    batch = make_mamba_batch([Row(70)], HALF, SMALL, max_short=1, padding=ALIGNED)
    batch.A_log.fill_(20.0)
    batch.dt.fill_(2.0)
    check_against_reference(batch, HALF, torch.float16)


def test_a_token_that_is_not_finite_leaves_the_outputs_before_it_alone() -> None:
    batch = make_mamba_batch([Row(40)], HALF, SMALL, padding=ALIGNED)
    want = batch.clone().run(HALF)
    batch.xBC[30, SMALL.H * SMALL.P :] = torch.inf
    with numpy.errstate(invalid="ignore"):
        got = batch.run(HALF)
    assert torch.equal(got[:30], want[:30])
    assert not got[30].isfinite().any()
