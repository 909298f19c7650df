"""One case measured: its sides prepared, checked, timed in turns and judged.

Knows cases, timers and records; not what a case computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from deltaline_bench.bar import Score
from deltaline_bench.case import Case, NotApplicable, Side, SideMaker
from deltaline_bench.error import Error, compare
from deltaline_bench.peers import PeerMissing
from deltaline_bench.record import BarRecord, CaseRecord, SideRecord, Status
from deltaline_bench.timer import Launch, Timer, Times, time_in_turns

MAX_DETAIL = 200


@dataclass(frozen=True)
class _Entrant:
    """A side's record so far, and its launch if it is to be timed."""

    record: SideRecord
    launch: Launch | None = None


def measure_case(case: Case, timer: Timer, copy_bytes_per_s: float, rounds: int) -> CaseRecord:
    """Measure every side of `case`; a side that raises is recorded with its message and left out.

    Args:
        copy_bytes_per_s: what shares are taken of. rounds: how often each side is timed.
    """
    entrants = [_enter(case, name, True, make, timer) for name, make in case.ours.items()]
    entrants += [_enter(case, name, False, make, timer) for name, make in case.peers.items()]
    launches = {entrant.record.name: entrant.launch for entrant in entrants if entrant.launch is not None}
    times = time_in_turns(timer, {name: launch.run for name, launch in launches.items()}, rounds)
    ours = times.get(next(iter(case.ours)))
    sides = [_with_times(entrant.record, times, ours, case.num_bytes, copy_bytes_per_s) for entrant in entrants]
    rivals = [side for side in sides if not side.is_ours and side.status is Status.RIGHT]
    best = min(rivals, key=lambda side: side.median_us or math.inf, default=None)
    return CaseRecord(
        name=case.name,
        what=case.what,
        shapes=dict(case.shapes),
        dtype=str(case.dtype).removeprefix("torch."),
        num_bytes=case.num_bytes,
        num_flops=case.num_flops,
        max_error=case.max_error,
        sides=tuple(sides),
        bars=tuple(_judge(case, sides[0], best)),
        best_peer=None if best is None else best.name,
        ratio=None if best is None else best.speedup,
    )


def _enter(case: Case, name: str, is_ours: bool, make: SideMaker, timer: Timer) -> _Entrant:
    """Prepare and check one side."""
    record = SideRecord(name, is_ours, Status.RIGHT)
    try:
        side = make()
        launch = timer.prepare(side.call)
        error = _check(side, launch, case.expected)
    except PeerMissing as missing:
        return _Entrant(replace(record, status=Status.MISSING, detail=_one_line(str(missing))))
    except NotApplicable as reason:
        return _Entrant(replace(record, status=Status.NOT_APPLICABLE, detail=_one_line(str(reason))))
    except Exception as failure:  # a side may raise anything; the report carries it and the other sides go on
        text = _one_line(f"{type(failure).__name__}: {failure}")
        return _Entrant(replace(record, status=Status.FAILED, detail=text))
    # A NaN compares as neither, and is wrong.
    is_right = error.relative <= case.max_error
    record = replace(
        record,
        status=Status.RIGHT if is_right else Status.WRONG,
        detail=_one_line(launch.reason),
        is_captured=launch.is_captured,
        error=_finite(error.relative),
        largest_error=_finite(error.largest),
    )
    return _Entrant(record, launch)


def _check(side: Side, launch: Launch, expected: Mapping[str, Tensor]) -> Error:
    """Run the very launch that will be timed once, from the state of `reset`, into outputs full of NaN."""
    for tensor in _tensors(launch.result):
        tensor.fill_(math.nan)
    side.reset()
    error = compare(side.outputs(launch.run()), expected)
    side.reset()
    return error


def _tensors(result: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a call's result."""
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield result
    elif isinstance(result, tuple | list):
        for part in result:
            yield from _tensors(part)


def _with_times(
    record: SideRecord, times: Mapping[str, Times], ours: Times | None, num_bytes: int, copy_bytes_per_s: float
) -> SideRecord:
    """Add the figures of a side that was timed."""
    if record.name not in times:
        return record
    taken = times[record.name]
    bytes_per_s = num_bytes / (taken.median_us * 1e-6)
    return replace(
        record,
        median_us=taken.median_us,
        p10_us=taken.p10_us,
        p90_us=taken.p90_us,
        gigabytes_per_s=bytes_per_s / 1e9,
        share_of_copy=bytes_per_s / copy_bytes_per_s,
        speedup=None if ours is None else taken.median_us / ours.median_us,
    )


def _judge(case: Case, judged: SideRecord, best: SideRecord | None) -> Iterator[BarRecord]:
    """Hold our side's figures to the bars; a side that is not right has met none."""
    score = None
    if judged.status is Status.RIGHT and judged.median_us is not None and judged.share_of_copy is not None:
        score = Score(judged.median_us, judged.share_of_copy, None if best is None else best.speedup)
    for is_needed, bars in ((True, case.needed), (False, case.aim)):
        for bar in bars:
            yield BarRecord(str(bar), is_needed, False if score is None else bar.is_met(score))


def _finite(value: float) -> float | None:
    """Return None for what JSON cannot hold."""
    return value if math.isfinite(value) else None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_DETAIL]
