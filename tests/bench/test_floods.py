"""The part `floods` judges what another principal's steps take beside a flood."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_bench.service.figure import missed
from deltaline_bench.service.floods import Seen, accepted, floods, judge
from deltaline_bench.service.size import H200


def seen(p99_us: float, refusals_per_s: float = 0.0) -> Seen:
    """100 steps, of which two are slow."""
    return Seen([500e-6] * 98 + [p99_us * 1e-6] * 2, refusals_per_s, 0.5)


def test_a_flood_may_cost_another_a_fifth_of_its_p99() -> None:
    host: Any = SimpleNamespace(size=H200)
    alone = [seen(1000.0), seen(1000.0)]
    figures = judge(host, alone, {"quota": seen(1190.0, 100.0), "role": seen(1210.0, 5000.0)}, {})
    assert [figure.name for figure in missed(figures)] == ["beside role / alone, p99"]
    values = {figure.name: figure.value for figure in figures}
    assert values["beside role, refusals that reach the core"] == 5000.0
    host.size = replace(H200, is_judged=False)
    assert not missed(judge(host, alone, {"role": seen(1210.0)}, {}))


def test_an_accepted_flood_may_cost_a_fifth_more_than_a_peer() -> None:
    host: Any = SimpleNamespace(size=H200)
    beside = {"describes": seen(2390.0), "retries": seen(2410.0)}
    figures = judge(host, [seen(1000.0)], beside, {"describes": seen(2000.0), "retries": seen(2000.0)})
    assert [figure.name for figure in missed(figures)] == ["beside retries / beside a peer, p99"]


def test_what_is_accepted_is_a_step_of_the_server_s_model() -> None:
    step = pb.StepRequest.FromString(accepted(7, 9, 256, "float32")["retries"].body)
    assert (step.server_epoch, list(step.sequence), list(step.step)) == (7, [9], [1])
    assert wire.decode(step.hidden, limit_bytes=1024).shape == (1, 256)


def test_handles_are_guessed_in_the_server_s_epoch() -> None:
    guessed = pb.DescribeSequencesRequest.FromString(floods(7)["handles"].body)
    assert guessed.server_epoch == 7 and len(set(guessed.sequence)) == len(guessed.sequence) == 64
