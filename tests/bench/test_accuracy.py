"""What ours may lose is what a named peer loses on the same inputs, tensor by tensor."""

from __future__ import annotations

import pytest
import torch
from rigs.fake_timer import FakeTimer

from deltaline_bench.case import Case, Side, SideMaker
from deltaline_bench.gated_delta.accuracy import hold_errors_to
from deltaline_bench.measurement import measure_case
from deltaline_bench.record import CaseRecord

TRUTH = {"o": torch.tensor([3.0, 4.0]), "state": torch.tensor([6.0, 8.0])}
NAMES = {"fla": "fla", "given": "fla, gates given", "other": "vLLM"}


def off_by(o: float, state: float) -> SideMaker:
    """A side whose tensors are off by these parts of the truth."""
    found = {"o": TRUTH["o"] * (1 + o), "state": TRUTH["state"] * (1 + state)}
    return lambda: Side(lambda: (), lambda done: found, lambda: None)


def measured(**errors_of_peers: tuple[float, float]) -> CaseRecord:
    """Measure a side of ours that is off by 1% in o and 2% in the state."""
    case = Case(
        name="accuracy",
        what="",
        shapes={},
        dtype=torch.float32,
        num_bytes=1,
        num_flops=1,
        max_error=0.05,
        expected=TRUTH,
        ours={"deltaline": off_by(0.01, 0.02)},
        peers={NAMES[name]: off_by(*errors) for name, errors in errors_of_peers.items()},
    )
    held = hold_errors_to(case, "fla", ("fla", "fla, gates given"))
    return measure_case(held, FakeTimer(1.0), copy_bytes_per_s=1e12, rounds=1)


@pytest.mark.parametrize(
    ("errors_of_peers", "is_met"),
    [
        ({"fla": (0.011, 0.021)}, [True, True]),
        ({"fla": (0.009, 0.04)}, [False, True]),
        ({"fla": (0.04, 0.04), "given": (0.04, 0.019)}, [True, False]),
        ({"fla": (float("nan"), 0.04)}, [None, True]),
        ({"other": (0.001, 0.001)}, [None, None]),
    ],
    ids=["better", "o worse", "state worse than its best side", "fla is NaN", "no fla"],
)
def test_no_tensor_may_be_further_off_than_flas(
    errors_of_peers: dict[str, tuple[float, float]], is_met: list[bool | None]
) -> None:
    record = measured(**errors_of_peers)
    assert [bar.is_met for bar in record.bars] == is_met
    assert len(record.failures()) == is_met.count(False)


def test_errors_of_both_are_printed() -> None:
    assert [bar.text for bar in measured(fla=(0.009, 0.04)).bars] == [
        "error of o 1.00e-02 <= fla's 9.00e-03",
        "error of state 2.00e-02 <= fla's 4.00e-02",
    ]
    assert measured().bars[0].text == "error of o 1.00e-02 <= fla's"
