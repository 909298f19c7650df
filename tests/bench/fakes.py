"""A timer without a device, and a small run made by hand. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from deltaline_bench.record import BarRecord, CaseRecord, RunRecord, SideRecord, Status
from deltaline_bench.timer import Launch


class FakeTimer:
    """Runs what it is given and answers with the next of `times_us`, again and again."""

    def __init__(self, *times_us: float) -> None:
        self._times: Iterator[float] = iter(times_us * 10_000)
        self._pending: list[float] = []

    def prepare(self, call: Callable[[], Any]) -> Launch:
        return Launch(call, call(), is_captured=False)

    def time(self, run: Callable[[], Any]) -> None:
        run()
        self._pending.append(next(self._times))

    def read(self) -> list[float]:
        values, self._pending = self._pending, []
        return values


def small_run(*, is_met: bool | None = True, status: Status = Status.RIGHT) -> RunRecord:
    """One case with a right peer and a missing one."""
    sides = (
        SideRecord("deltaline", True, status, "", True, 140.0, 139.5, 141.25, 3835.0, 0.9, 1.6e-3, 0.03, 1.0),
        SideRecord("SGLang", False, Status.RIGHT, "", True, 206.0, 205.0, 207.0, 2606.0, 0.61, 2.5e-3, 0.06, 1.47),
        SideRecord("vLLM", False, Status.MISSING, "not installed"),
    )
    case = CaseRecord(
        name="prefill",
        what="8 rows",
        shapes={"x": "[16384, 8192]"},
        dtype="bfloat16",
        num_bytes=536_000_000,
        num_flops=1_000_000,
        max_error=1e-2,
        sides=sides,
        bars=(BarRecord(">= 85% of copy", True, is_met), BarRecord(">= 99% of copy", False, False)),
        best_peer="SGLang",
        ratio=1.47,
    )
    device = {"name": "NVIDIA H200", "torch": "2.11.0"}
    return RunRecord("conv1d", "2026-11-21", 100, device, {"sglang": "0.5.23"}, 4.0, 4.29e12, 4.38e12, (case,))
