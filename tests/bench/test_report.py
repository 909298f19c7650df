"""A record survives JSON, its table lines up, and the command says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench.fakes import small_run

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
    assert len(lines) == 2 + 3
    assert len(bars) == 1
    assert "| 140.00 | 139.50..141.25 |" in lines[2]
    assert "90.0%" in lines[2]
    assert ">= 85% of copy met" in lines[2]
    assert "1.47x" in lines[3]
    assert "not installed" in lines[4]


def test_report_says_what_failed() -> None:
    assert "No needed bar is missed." in write_report(small_run())
    assert "1 could not be judged without a peer" in write_report(small_run(is_met=None))
    missed = small_run(is_met=False)
    assert missed.failures() == ["prefill: >= 85% of copy is missed"]
    assert "- prefill: >= 85% of copy is missed" in write_report(missed)
    assert "MISSED" in write_report(missed)
    assert small_run(status=Status.WRONG).failures() == ["prefill: deltaline is WRONG"]


def test_summary_is_one_line() -> None:
    assert summary(small_run().cases[0]) == "prefill: deltaline 140.00 us, SGLang 206.00 us, vLLM not installed"


def test_report_command_writes_the_table_beside_the_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(small_run().to_json(), encoding="utf-8")
    assert json.loads(path.read_text(encoding="utf-8"))["suite"] == "conv1d"
    assert main(["report", str(path)]) == 0
    assert path.with_suffix(".md").read_text(encoding="utf-8") == write_report(small_run())


def test_report_command_refuses_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.startswith("deltaline_bench: ")


def test_measuring_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["conv1d"]) == 2
    assert capsys.readouterr().err == "deltaline_bench: needs a CUDA device; torch finds none\n"
