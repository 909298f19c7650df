"""A case is checked before it is believed: wrong, failing and missing sides are told apart, and bars judge ours."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from rigs.fake_timer import FakeTimer
from torch import Tensor

from deltaline_bench.bar import at_least_copy, at_least_peers, at_most_us
from deltaline_bench.case import Case, NotApplicable, Side, SideMaker
from deltaline_bench.error import compare
from deltaline_bench.measurement import measure_case
from deltaline_bench.peers import PeerMissing
from deltaline_bench.record import CaseRecord, Status

WANTED = torch.tensor([3.0, 4.0])


def adds(amount: float) -> SideMaker:
    """A side whose state must be reset: it adds to it on every call."""
    state = torch.zeros(2)

    def call() -> torch.Tensor:
        state.add_(WANTED + amount)
        return state.clone()

    return lambda: Side(call, lambda y: {"y": y, "state": state}, state.zero_)


def raises(error: Exception) -> SideMaker:
    def make() -> Side:
        raise error

    return make


def leaves_outputs() -> Side:
    y = WANTED.clone()
    return Side(lambda: y, lambda result: {"y": result}, lambda: None)


def measured(
    ours: SideMaker, times_us: tuple[float, ...] = (10.0,), others: Mapping[str, SideMaker] = {}, **peers: SideMaker
) -> CaseRecord:
    """Measure `ours`, `others` of ours and peers, whose times come in this order; a round is one time of each."""
    case = Case(
        name="case",
        what="a case",
        shapes={},
        dtype=torch.float32,
        num_bytes=8_000_000,
        num_flops=0,
        max_error=1e-3,
        expected={"y": WANTED, "state": WANTED},
        ours={"deltaline": ours, **others},
        peers=peers,
        needed=(at_most_us(10), at_least_copy(80), at_least_peers(1.5)),
    )
    return measure_case(case, FakeTimer(*times_us), copy_bytes_per_s=1e12, rounds=3)


def test_right_side_is_judged_by_every_bar() -> None:
    case = measured(adds(0), (10.0, 9.0, 15.0, 20.0), {"compat": adds(0)}, slow=adds(0), slower=adds(0))
    assert case.judged.share_of_copy == pytest.approx(0.8)
    assert (case.best_peer, case.ratio) == ("slow", 1.5)
    assert [bar.is_met for bar in case.bars] == [True, True, True]
    assert case.failures() == []


def test_figures_are_those_of_the_median() -> None:
    """Of three rounds behind those that warm up: 5, 10 and 100 us."""
    judged = measured(adds(0), (5.0, 10.0, 100.0)).judged
    assert [judged.median_us, judged.p10_us, judged.p90_us] == pytest.approx([10.0, 6.0, 82.0])
    assert judged.gigabytes_per_s == pytest.approx(800.0)


def test_missed_bars_fail_the_case() -> None:
    case = measured(adds(0), (11.0, 15.0), peer=adds(0))
    assert [bar.is_met for bar in case.bars] == [False, False, False]
    assert len(case.failures()) == 3


def test_wrong_peer_is_no_peer_to_beat() -> None:
    case = measured(adds(0), (10.0, 1.0, 30.0), wrong=adds(1), right=adds(0))
    assert case.sides[1].status is Status.WRONG
    assert (case.best_peer, case.ratio) == ("right", 3.0)


def test_wrong_side_of_ours_meets_no_bar() -> None:
    case = measured(adds(1))
    assert [bar.is_met for bar in case.bars] == [False, False, False]
    assert "deltaline is WRONG" in case.failures()


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (PeerMissing("not installed"), Status.MISSING, "not installed"),
        (NotApplicable("no ragged rows"), Status.NOT_APPLICABLE, "no ragged rows"),
        (RuntimeError("no\nkernel"), Status.FAILED, "RuntimeError: no kernel"),
    ],
    ids=["missing", "not applicable", "failed"],
)
def test_peer_that_raises_is_recorded(error: Exception, status: Status, detail: str) -> None:
    case = measured(adds(0), peer=raises(error))
    assert (case.sides[1].status, case.sides[1].detail) == (status, detail)
    assert case.bars[2].is_met is None
    assert case.failures() == []


def test_our_failure_fails_the_case() -> None:
    assert "deltaline is FAILED" in measured(raises(RuntimeError("broken"))).failures()


def test_output_that_is_not_written_is_noticed() -> None:
    side = measured(adds(0), peer=leaves_outputs).sides[1]
    assert (side.status, side.error) == (Status.WRONG, None)


@pytest.mark.parametrize("where", [0, 1])
def test_nan_is_an_error_wherever_it_is(where: int) -> None:
    values = [WANTED, WANTED]
    values[where] = torch.full((2,), math.nan)
    error = compare({"y": values[0], "state": values[1]}, {"y": WANTED, "state": WANTED})
    assert math.isnan(error.relative)
    assert math.isnan(error.largest)


def test_error_is_the_largest_of_the_tensors() -> None:
    error = compare({"y": WANTED, "state": WANTED + torch.tensor([0.0, 0.5])}, {"y": WANTED, "state": WANTED})
    assert error.relative == pytest.approx(0.1)
    assert error.largest == 0.5


def test_what_is_expected_to_be_zero_has_the_norm_itself_as_its_error() -> None:
    assert compare({"y": WANTED}, {"y": torch.zeros(2)}).relative == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ({}, "at least one tensor"),
        ({"z": WANTED}, "expected names among"),
        ({"y": WANTED[:1]}, r"y: expected shape \[2\], got \[1\]"),
    ],
    ids=["none", "unknown", "shape"],
)
def test_tensors_that_do_not_match_are_refused(actual: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(actual, {"y": WANTED})
