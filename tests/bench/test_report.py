"""A record survives JSON, its table lines up, and the command says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaline_bench.__main__ import main
from deltaline_bench.record import BarRecord, CaseRecord, RunRecord, SideRecord, Status
from deltaline_bench.report import summary, write_report


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


def test_record_survives_json() -> None:
    run = small_run()
    assert RunRecord.from_json(run.to_json()) == run
    assert run.file_stem == "2026-11-21-h200-conv1d"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cases": [{}]}'])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a record of a run"):
        RunRecord.from_json(text)


def test_table_lines_up() -> None:
    lines = [line for line in write_report(small_run()).splitlines() if line.startswith("|")]
    bars = {tuple(i for i, letter in enumerate(line) if letter == "|") for line in lines}
    assert len(lines) == 2 + 4
    assert len(bars) == 1
    assert "| 140.00 | 139.50..141.25 |" in lines[2]
    assert "90.0%" in lines[2] and ">= 85% of copy met" in lines[2]
    assert "1.47x" in lines[3]
    assert "eager" in lines[4] and "1.07x" in lines[4] and "of copy" not in lines[4]
    assert "not installed" in lines[5]


def test_report_says_what_failed() -> None:
    report = write_report(small_run())
    assert "No needed bar is missed." in report and "could not be judged" not in report
    assert "1 could not be judged without a peer" in write_report(small_run(is_met=None))
    missed = write_report(small_run(is_met=False))
    assert "- prefill: >= 85% of copy is missed" in missed and "MISSED" in missed


@pytest.mark.parametrize(
    ("is_met", "status", "failures"),
    [
        (True, Status.RIGHT, []),
        (None, Status.RIGHT, []),
        (False, Status.RIGHT, [">= 85% of copy is missed"]),
        (True, Status.WRONG, ["deltaline is WRONG"]),
        (None, Status.NOT_APPLICABLE, ["deltaline is not applicable"]),
    ],
    ids=["met", "not judged", "missed", "wrong", "not applicable"],
)
def test_run_fails_by_what_is_needed_of_our_side(is_met: bool | None, status: Status, failures: list[str]) -> None:
    assert small_run(is_met=is_met, status=status).failures() == [f"prefill: {failure}" for failure in failures]


def test_summary_is_one_line() -> None:
    line = "prefill: deltaline 140.00 us, SGLang 206.00 us, deltaline compat 150.00 us, vLLM not installed"
    assert summary(small_run().cases[0]) == line


def test_report_command_writes_the_table_beside_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(small_run().to_json(), encoding="utf-8")
    assert main(["report", str(path)]) == 0
    assert path.with_suffix(".md").read_text(encoding="utf-8") == write_report(small_run())
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "deltaline_bench: " in capsys.readouterr().err
