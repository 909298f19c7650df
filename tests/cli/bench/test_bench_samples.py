"""The parts of `deltaline bench` that need no server: lengths, mixes, arrivals, samples, the verdict, busy time."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest

from deltaline_cli.bench.arrivals import ArrivalThread, arrivals
from deltaline_cli.bench.busy import BUSY, busy_seconds
from deltaline_cli.bench.load import Share
from deltaline_cli.bench.options import BenchOptions, Lengths, parse_mix
from deltaline_cli.bench.samples import Sample, Samples
from deltaline_cli.bench.samples import sample as made
from deltaline_cli.bench.verdict import Verdict

OPEN = BenchOptions(rate=100.0)


def sample(due_s: float, total_s: float = 0.01, late_s: float = 0.0) -> Sample:
    """A step that was sent at once and whose stages take 6 ms."""
    stages_s = (0.001, 0.001, 0.003, 0.001)
    return made("decode", 8, due_s, due_s + total_s, stages_s, late_s=late_s)


def samples(rows: list[Sample], unserved: tuple[float, ...] = (), cpu: float = 0.1) -> Samples:
    """A run whose measured window is from 0 to 10 s."""
    return Samples.of(rows, 0.0, 10.0, unserved, cpu)


def steady(total_s: float = 0.01, late_s: float = 0.0) -> list[Sample]:
    """100 steps a second, from before the window until after it."""
    return [sample(i / 100, total_s, late_s) for i in range(-100, 1100)]


@pytest.mark.parametrize(("text", "low", "high"), [("5", 5, 5), ("2:9", 2, 9)])
def test_lengths_stay_in_their_range(text: str, low: int, high: int) -> None:
    rng = np.random.default_rng(0)
    drawn = {Lengths.parse(text).draw(rng) for _ in range(200)}
    assert drawn == set(range(low, high + 1))
    assert str(Lengths.parse(text)) == text


def test_lognormal_lengths_have_the_median_and_tail_that_were_asked_for() -> None:
    lengths, rng = Lengths.parse("lognormal:500,4000"), np.random.default_rng(0)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert np.median(drawn) == pytest.approx(500, rel=0.05)
    assert np.percentile(drawn, 99) == pytest.approx(4000, rel=0.1)
    assert str(lengths) == "lognormal:500,4000"


@pytest.mark.parametrize("text", ["", "0", "9:2", "1:b", "lognormal:5", "lognormal:5,5", "normal:1,2"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--prefill-tokens: expected"):
        Lengths.parse(text)


def test_a_mix_keeps_what_has_a_weight() -> None:
    assert parse_mix("prefill=1,decode=2.5,verify=0") == {"prefill": 1.0, "decode": 2.5}


@pytest.mark.parametrize("text", ["", "decode", "decode=0", "decode=-1", "decode=x", "walk=1", "decode=1,decode=2"])
def test_a_wrong_mix_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--mix: expected"):
        parse_mix(text)


def test_processes_share_clients_steps_and_rate() -> None:
    options = BenchOptions(clients=5, steps=7, rate=100.0)
    shares = [Share(process, 2) for process in range(2)]
    assert sorted(itertools.chain(*(share.clients(options) for share in shares))) == [0, 1, 2, 3, 4]
    assert sum(share.steps(options) or 0 for share in shares) == 7
    assert sum(share.rate(options) for share in shares) == pytest.approx(100.0)


def test_arrivals_are_poisson_and_grow_in_the_ramp_up() -> None:
    times = arrivals(1000.0, 2.0, np.random.default_rng(0))
    seconds = np.array(list(itertools.takewhile(lambda at: at < 12.0, times)))
    per_second, _ = np.histogram(seconds, bins=12, range=(0, 12))
    assert per_second[0] == pytest.approx(250, rel=0.25)
    assert per_second[1] == pytest.approx(750, rel=0.2)
    gaps = np.diff(seconds[seconds > 2])
    assert gaps.mean() == pytest.approx(1e-3, rel=0.05)
    assert gaps.std() == pytest.approx(1e-3, rel=0.05)  # of an exponential, its mean


async def test_an_arrival_tells_how_late_the_loop_came_to_it() -> None:
    begin_s = time.monotonic()
    thread = ArrivalThread(iter([0.01, 0.02, 9.0]), begin_s, begin_s + 5.0)
    thread.start()
    time.sleep(0.1)  # noqa: ASYNC251 the loop is held up
    first, second, end = [await asyncio.wait_for(thread.queue.get(), 5.0) for _ in range(3)]
    assert first is not None and second is not None and end is None
    assert first[0] == pytest.approx(begin_s + 0.01)
    assert first[1] > 0.05 and second[1] > 0.05


def test_samples_are_joined_before_percentiles_are_taken() -> None:
    fast, slow = samples([sample(1.0, 0.01)] * 99), samples([sample(1.0, 1.0)])
    joined = Samples.join([fast, slow])
    total = joined.stages_s("decode")["total"]
    assert len(total) == 100
    assert np.median(total) == pytest.approx(0.01)  # a mean of the two medians would be half a second


def test_transport_is_what_the_stages_leave() -> None:
    stages = samples([sample(1.0, 0.010), sample(1.0, 0.005)]).stages_s("decode")
    assert stages["transport"][0] == pytest.approx(0.004)
    assert np.isnan(stages["transport"][1])


def test_latency_counts_from_when_a_step_was_due() -> None:
    waited = made("decode", 8, 3.0, 3.5, (0.1, 0.0, 0.1, 0.0), due_s=1.0)
    stages = samples([waited]).stages_s("decode")
    assert stages["total"][0] == pytest.approx(2.5)
    assert stages["wait"][0] == pytest.approx(2.0)
    assert stages["transport"][0] == pytest.approx(0.3)


def test_the_warm_up_is_not_measured() -> None:
    taken = samples([sample(-0.5, 0.4), sample(1.0)])
    assert len(taken.stages_s("decode")["total"]) == 1
    assert taken.done("decode").sum() == 1


def test_a_steady_load_is_held() -> None:
    verdict = Verdict.of(samples(steady()), OPEN)
    assert verdict.refusal == "" and verdict.warning == ""
    assert verdict.offered_per_s == pytest.approx(100, rel=0.01)
    assert verdict.done_per_s == pytest.approx(100, rel=0.01)


# The server does 90 a second: each step waits longer than the one before.
BACKLOG = [sample(i / 100, 0.01 + max(0.0, i / 100) * 0.1) for i in range(-100, 1000)]


@pytest.mark.parametrize(
    ("run", "refusal"),
    [
        (samples(steady(total_s=0.9)), ""),  # long latencies alone are no reason
        (samples(BACKLOG), "of 1000 steps that were due were not done in time: the server was slow"),
        (samples(BACKLOG, cpu=0.97), "this generator was slow"),
        (samples(steady()[:-100], unserved=(9.99,)), "1 of 1001 steps"),
        (samples([sample(1.0), sample(5.0), sample(10.0)]), ""),  # the last one is due when the window ends
        (samples([], unserved=(9.0,)), "waited 11000.0 ms or more until one of 4 clients was idle"),
        (
            samples(steady(total_s=0.05, late_s=0.02)),
            "steps were sent late: this generator was slow: its event loop came",
        ),
        (samples([]), "no step was due"),
    ],
)
def test_a_load_that_was_not_held_is_refused_and_the_slow_side_named(run: Samples, refusal: str) -> None:
    found = Verdict.of(run, OPEN).refusal
    assert refusal in found and bool(refusal) == bool(found)


def test_a_closed_loop_warns_of_a_full_core_and_refuses_only_nothing() -> None:
    full = Verdict.of(samples(steady(), cpu=0.97), BenchOptions())
    assert "--processes" in full.warning and full.refusal == ""
    assert "no step was done" in Verdict.of(samples([]), BenchOptions()).refusal


def test_busy_seconds_are_the_counters_or_those_of_a_single_kind() -> None:
    decode, prefill = (
        f'deltaline_stage_seconds_sum{{kind="{kind}",stage="compute"}}' for kind in ("decode", "prefill")
    )
    queue = 'deltaline_stage_seconds_sum{stage="queue",kind="decode"}'
    assert busy_seconds({BUSY: 1.0}, {BUSY: 3.5, decode: 9.0}) == 2.5
    assert busy_seconds({decode: 1.0, prefill: 4.0, queue: 0.0}, {decode: 3.0, prefill: 4.0, queue: 7.0}) == 2.0
    assert "more than once" in str(busy_seconds({}, {decode: 3.0, prefill: 4.0}))
    assert "no computation" in str(busy_seconds({}, {queue: 1.0}))
