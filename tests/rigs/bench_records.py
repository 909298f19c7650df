"""Records of runs that nobody measured."""

from __future__ import annotations

from deltaline_bench.record import BarRecord, CaseRecord, RunRecord, SideRecord, Status


def small_run(*, is_met: bool | None = True, status: Status = Status.RIGHT) -> RunRecord:
    """One case with two sides of ours, a right peer and a missing one."""
    sides = (
        SideRecord("deltaline", True, status, "", True, 140.0, 139.5, 141.25, 3835.0, 0.9, 1.6e-3, 0.03, 1.0),
        SideRecord("SGLang", False, Status.RIGHT, "", True, 206.0, 205.0, 207.0, 2606.0, 0.61, 2.5e-3, 0.06, 1.47),
        SideRecord(
            "deltaline compat", True, Status.RIGHT, "", False, 150.0, 149.0, 151.0, 3600.0, 0.8, 1e-3, 0.02, 1.07
        ),
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
