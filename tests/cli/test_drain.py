"""`deltaline drain`: what it asks for, what it tells while it waits, and how it ends."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from deltaline_cli import drain
from deltaline_cli.main import main
from deltaline_client import Client
from deltaline_server.errors import Reason


@pytest.mark.parametrize(("flags", "timeout_ms"), [([], 0), (["--timeout", "1.5"], 1500)])
def test_it_begins_the_drain_and_says_what_is_open(
    server: Any, flags: list[str], timeout_ms: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(server.address) as client:
        client.open()
        assert main(["drain", server.address, *flags]) == 0
    assert [request.timeout_ms for request in server.requests["Drain"]] == [timeout_ms]
    assert capsys.readouterr().out == f"{server.address} drains: 1 sequence open\n"
    assert server.requests["GetLoad"] == []


def test_with_wait_it_tells_what_is_left_until_the_server_is_gone(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    monkeypatch.setattr(drain, "GONE_S", 5.0)
    stopped = threading.Event()

    def stop_and_tell() -> None:
        server.server.stop(None).wait()
        stopped.set()

    def stop() -> None:
        threading.Thread(target=stop_and_tell).start()

    with Client(server.address) as client:
        first, second = client.open_many(2)
        server.load.queued_rows = 3
        server.before_loads += [
            lambda: None,
            lambda: None,
            first.close,
            lambda: setattr(server.load, "queued_rows", 1),
            lambda: setattr(server.load, "queued_rows", 0),
            stop,
        ]
        assert main(["drain", server.address, "--wait"]) == 0
        assert stopped.wait(60)
    assert second.handle in server.streams
    assert capsys.readouterr().out.splitlines() == [
        f"{server.address} drains: 2 sequences open",
        "2 sequences open, 3 rows queued",
        "1 sequence open, 3 rows queued",
        "1 sequence open, 1 row queued",
        "1 sequence open",
        f"{server.address} has stopped; when it last answered, 1 sequence open",
    ]


def test_a_server_that_does_not_answer_in_time_is_asked_again(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    server.before_loads += [lambda: time.sleep(2 * drain.GONE_S), lambda: setattr(server.load, "draining", False)]
    assert main(["drain", server.address, "--wait"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{server.address} has stopped"


@pytest.mark.parametrize("ends", ["stopping", "another process"])
def test_it_ends_with_the_server_whatever_answers_behind_it(
    server: Any, ends: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    monkeypatch.setattr(drain, "GONE_S", 5.0)

    def end() -> None:
        if ends == "another process":
            server.load.draining = False
        else:
            for _ in range(1000):
                server.refuse("GetLoad", Reason.STOPPING)

    server.before_loads += [lambda: None, end]
    assert main(["drain", server.address, "--wait"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{server.address} drains: 0 sequences open",
        f"{server.address} has stopped",
    ]


def test_a_server_that_refuses_or_is_not_there_is_an_error(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.refuse("Drain", Reason.INVALID_REQUEST)
    assert main(["drain", server.address]) == 1
    assert capsys.readouterr().err.startswith("deltaline: error: refused: INVALID_REQUEST")


def test_sequences_are_moved_to_every_server_that_is_accepted(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.refuse("Drain", Reason.MOVE_TARGET_REFUSED)
    assert main(["drain", server.address, "--timeout", "9", "--to", "gone:1", "--to", "there:2", "--to", "here:3"]) == 0
    asked = [(request.target, request.timeout_ms) for request in server.requests["Drain"]]
    assert asked == [("gone:1", 9000), ("there:2", 9000), ("here:3", 9000)]
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        "sequences move to there:2",
        "sequences move to here:3",
        f"{server.address} drains: 0 sequences open",
    ]
    assert told.err.startswith("gone:1 takes none: ") and "MOVE_TARGET_REFUSED" in told.err


def test_a_server_that_stops_before_all_targets_were_named_is_no_error(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.pass_by("Drain")
    server.refuse("Drain", Reason.STOPPING)
    assert main(["drain", server.address, "--to", "there:2", "--to", "here:3"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "sequences move to there:2"


def test_where_no_server_is_accepted_it_says_that_no_drain_has_begun(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        server.refuse("Drain", Reason.MOVE_TARGET_REFUSED)
    assert main(["drain", server.address, "--to", "gone:1", "--to", "gone:2", "--wait"]) == 1
    told = capsys.readouterr()
    assert not told.out and [line.split()[0] for line in told.err.splitlines()] == ["gone:1", "gone:2", "deltaline:"]
    assert "the drain has not begun" in told.err


@pytest.mark.parametrize("text", ["0", "-1", "nan", "86401", "soon"])
def test_a_time_that_is_none_is_refused_at_once(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["drain", f"--timeout={text}"])
    assert f"expected a number of seconds above 0, a day at most, got '{text}'" in capsys.readouterr().err
