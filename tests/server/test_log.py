"""One event is one line that can be read by people or parsed by machines."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest

from deltaline_server import log

LOGGER = logging.getLogger("test")
pytestmark = pytest.mark.usefixtures("restored_logging")


def test_text_line_has_the_events_values(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "text")
    log.event(LOGGER, "loaded", seconds=1.23456789, model="a b", empty="", count=3)
    line = capsys.readouterr().err
    assert line.endswith('INFO loaded  seconds=1.23457 model="a b" empty="" count=3\n')


def test_a_line_begins_with_its_time_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("test", logging.INFO, "", 0, "ready", (), None)
    record.created, record.msecs = 1.5, 500.0
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        line = log.TextFormatter().format(record)
    time.tzset()
    assert line == "1970-01-01T00:00:01.500Z INFO ready"


def test_json_line_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    log.event(LOGGER, "loaded", count=3)
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["count"], line["level"], line["logger"]) == ("loaded", 3, "info", "test")


def test_json_keeps_a_traceback_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    try:
        raise ValueError("planted")
    except ValueError:
        LOGGER.exception("failed")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "planted" in json.loads(lines[0])["traceback"]


def test_level_hides_what_is_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("warning", "text")
    log.event(LOGGER, "quiet")
    log.event(LOGGER, "loud", level=logging.WARNING)
    assert [line.split(" ")[1:] for line in capsys.readouterr().err.splitlines()] == [["WARNING", "loud"]]


def test_text_of_a_value_moves_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "text")
    log.event(LOGGER, "left", why="\x1b[2Kok\x00\x7f\u202e")
    assert capsys.readouterr().err.endswith('why="\\u001b[2Kok\\u0000\\u007f\\u202e"\n')


def test_text_of_a_value_with_a_line_break_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "text")
    log.event(LOGGER, "odd", value="a\nb")
    assert capsys.readouterr().err.count("\n") == 1


def test_long_work_is_told_of_and_what_it_gives_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    progress, was_told, lines = log.Progress(lambda: now_s), asyncio.Event(), list[dict[str, object]]()

    def event(logger: logging.Logger, message: str, **fields: object) -> None:
        lines.append({"message": message, **fields})
        was_told.set()

    async def work() -> str:
        nonlocal now_s
        progress.begin("weights")
        now_s = 106.0
        progress.report(3, 8)
        await was_told.wait()
        return "model"

    monkeypatch.setattr(log, "event", event)
    assert asyncio.run(log.told(work(), LOGGER, "still loading", progress, every_s=0.01)) == "model"
    assert lines[0] == {"message": "still loading", "seconds": 0, "stage": "weights", "done": "3 of 8", "left_s": 10}


def test_stages_follow_each_other_and_nothing_is_said_of_what_is_not_known() -> None:
    now_s = 0.0
    progress = log.Progress(lambda: now_s)
    assert progress.fields == {} == progress.seconds
    progress.begin("weights")
    progress.report(0, 4)
    assert progress.fields == {"stage": "weights", "done": "0 of 4"}
    now_s = 2.0
    progress.report(4, 4)
    assert progress.fields == {"stage": "weights", "done": "4 of 4", "left_s": 0}
    progress.begin("kernels")
    assert (progress.fields, progress.seconds) == ({"stage": "kernels"}, {"weights": 2.0})
    now_s = 2.5
    progress.end()
    progress.end()
    assert (progress.fields, progress.seconds) == ({}, {"weights": 2.0, "kernels": 0.5})


def test_what_long_work_raises_comes_back() -> None:
    async def work() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        asyncio.run(log.told(work(), LOGGER, "still loading"))
