"""A record survives JSON, its table lines up, and the command says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from rigs.bench_records import small_run

from deltaline_bench.__main__ import main
from deltaline_bench.record import RunRecord, Status
from deltaline_bench.report import summary, write_report


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
