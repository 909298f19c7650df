"""The audit: a line for each thing done, few for refusals, and what is left out is counted."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from deltaline_server.telemetry.audit import DONE_PER_S, REFUSALS_PER_S, Audit


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def lines(path: Path) -> list[dict[str, Any]]:
    """What the file has, but for the times."""
    read = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("time").endswith("Z") for line in read)
    return [{name: value for name, value in line.items() if name not in ("level", "logger")} for line in read]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def test_what_was_done_is_a_line_in_a_file_of_its_owner(path: Path) -> None:
    audit = Audit(str(path), Clock())
    audit.done("opened", "team-a", "ipv4:10.0.0.1:5", count=3, adapter='a"\n')
    audit.close()
    assert lines(path) == [
        {"message": "opened", "principal": "team-a", "client": "ipv4:10.0.0.1:5", "count": 3, "adapter": 'a"\n'}
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_refusals_of_a_principal_are_few_and_what_is_left_out_is_counted(path: Path) -> None:
    clock = Clock()
    audit = Audit(str(path), clock)
    for _ in range(REFUSALS_PER_S + 5):
        audit.refused("/a/B", "flood", "c", "QUEUE_FULL")
    audit.refused("/a/B", "other", "c", "QUEUE_FULL")
    clock.now_s += 1
    audit.refused("/a/B", "flood", "c", "QUEUE_FULL")
    for _ in range(REFUSALS_PER_S + 1):
        audit.refused("/a/B", "flood", "c", "QUEUE_FULL")
    audit.close()
    told = [(line["principal"], line.get("left_out", 0)) for line in lines(path)]
    of_flood = [("flood", 0)] * REFUSALS_PER_S
    assert told == [*of_flood, ("other", 0), ("flood", 5), *of_flood[1:], ("flood", 2)]


def test_who_opens_without_end_has_few_lines_and_pushes_out_nothing_else(path: Path) -> None:
    audit = Audit(str(path), Clock())
    for _ in range(DONE_PER_S + 7):
        audit.done("opened", "a", "c")
    audit.done("drained", "a", "c")
    audit.done("opened", "b", "c")
    audit.close()
    told = [(line["message"], line["principal"], line.get("left_out", 0)) for line in lines(path)]
    assert told == [("opened", "a", 0)] * DONE_PER_S + [("drained", "a", 0), ("opened", "b", 0), ("opened", "a", 7)]


def test_a_file_that_was_moved_is_begun_anew(path: Path) -> None:
    audit = Audit(str(path), Clock())
    audit.done("drained", "a", "c")
    path.rename(path.with_suffix(".1"))
    audit.done("opened", "a", "c")
    audit.close()
    assert [line["message"] for line in lines(path)] == ["opened"]


def test_lines_that_a_full_disk_does_not_take_are_told_once_a_minute(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    audit = Audit("/dev/full", clock)
    for _ in range(3):
        audit.done("opened", "a", "c")
    clock.now_s += 60
    audit.done("opened", "a", "c")
    audit.close()
    told = [(record.getMessage(), getattr(record, "fields", {})) for record in caplog.records]
    assert told == [("lines of the audit are lost", {"lost": count}) for count in (1, 4)]
    assert capsys.readouterr().err == ""
