"""Whether a bench held the load that it was asked for, and which side was slow if not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from deltaline_cli.bench.options import BenchOptions
from deltaline_cli.bench.samples import Samples

# Share of the offered load that may be missing.
_MISSING = 0.01
# An arrival that the generator's event loop comes to so late falsifies the latencies; or, of slow steps, this share.
_LATE_S = 0.005
_LATE_SHARE = 0.1
# Of a core: above it the generator can't have kept up.
_FULL_CORE = 0.9
# Standard deviations of the number of steps under way that chance may add at the window's end.
_CHANCE = 3.0


@dataclass(frozen=True)
class Verdict:
    """What was offered and done, steps per second; the 99th percentile of how late arrivals were noticed; the busiest
    process's share of a core; and why the figures would say nothing, "" if they do."""

    offered_per_s: float | None
    done_per_s: float
    late_p99_s: float
    cpu_share: float
    refusal: str

    @classmethod
    def of(cls, samples: Samples, options: BenchOptions) -> Verdict:
        """Judge a run. A closed loop offers what the server takes: it is only refused when nothing was done."""
        due, done = samples.due(), samples.done()
        late_p99_s = float(np.percentile(samples.column("late")[due], 99)) if due.any() else 0.0
        done_per_s = float(done.sum()) / samples.seconds
        if options.rate is None:
            refusal = "" if due.any() else "no step was done in the measured time: ask for a longer --duration"
            return cls(None, done_per_s, 0.0, samples.cpu_share, refusal)
        inside = (samples.unserved >= samples.begin_s) & (samples.unserved <= samples.end_s)
        offered = int(due.sum()) + int(inside.sum())
        verdict = cls(offered / samples.seconds, done_per_s, late_p99_s, samples.cpu_share, "")
        if not offered:
            return replace(verdict, refusal="no step was due in the measured time: ask for a longer --duration")
        latency_s = (samples.column("done") - samples.column("due"))[due]
        given_up_s = samples.end_s + options.timeout_s - samples.unserved[inside]  # so long at least
        wait_s = np.concatenate([(samples.column("sent") - samples.column("due"))[due], given_up_s])
        waited_s = float(np.median(wait_s))
        is_own_fault = samples.cpu_share > _FULL_CORE
        behind = max(offered - int(done.sum()), int(inside.sum()))
        # In a steady state as many steps are done as are due, but for those under way: latency x rate of them (Little),
        # and chance makes that at the end differ from that at the beginning. One more may be under way, however short
        # they are: a window that so many steps end, ends when the last is due.
        under_way = float(latency_s.sum()) / samples.seconds
        if inside.any() or behind > 1 + _MISSING * offered + _CHANCE * math.sqrt(2 * under_way):
            why = f"{behind} of {offered} steps that were due were not done in time"
            # Steps that waited long for a client were held up by the server; lateness is a part of that wait.
            is_own_fault |= late_p99_s > max(waited_s / 2, _LATE_S)
        elif late_p99_s > max(_LATE_S, _LATE_SHARE * float(np.percentile(latency_s, 99))):
            why, is_own_fault = "steps were sent late", True
        else:
            return verdict
        return replace(verdict, refusal=f"{why}: {verdict._side(options, waited_s, is_own_fault)}")

    def _side(self, options: BenchOptions, waited_s: float, is_own_fault: bool) -> str:
        """Say who could not keep up, and what may help."""
        late = f"its event loop came {self.late_p99_s * 1e3:.1f} ms late (p99), {self.cpu_share:.0%} of a core used"
        if is_own_fault:
            return f"this generator was slow: {late}; use more --processes, a less busy host, or offer less"
        return (
            f"the server was slow: half of the steps waited {waited_s * 1e3:.1f} ms or more until one of "
            f"{options.clients} clients was idle (the generator was not: {late}); "
            "offer less, or use more --clients"
        )

    @property
    def warning(self) -> str:
        """What a reader of the figures should know, "" for nothing."""
        if self.cpu_share > _FULL_CORE:
            return (
                f"the generator used {self.cpu_share:.0%} of a core: transport holds its own time too; "
                "use more --processes"
            )
        return ""
