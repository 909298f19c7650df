"""`deltaline bench` on a server: loops, processes, what it writes, and when it reports nothing."""

from __future__ import annotations

import http.server
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaline_cli.bench import verdict
from deltaline_cli.bench.load import InlineNotes
from deltaline_cli.bench.run import BenchError, _receive
from deltaline_cli.main import main

SMALL = ["--clients", "2", "--rows", "2", "--ramp-up", "0"]
DECODE = [*SMALL, "--mix", "decode=1"]


@pytest.fixture
def pages() -> Iterator[tuple[str, list[str]]]:
    """A metrics endpoint: its URL, and the pages that it will answer with, the last one again and again."""
    texts: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = texts.pop(0) if len(texts) > 1 else texts[0]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}/metrics", texts
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_open_loop_reports_what_it_offered(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verdict, "_LATE_S", 1.0)  # the fake server shares this process
    file = tmp_path / "figures.json"
    arguments = ["--rate", "40", "--duration", "0.5", "--output", str(file)]
    assert main(["bench", server.address, *DECODE, *arguments]) == 0
    out = capsys.readouterr().out
    assert "wait" in out and "offered " in out
    record = json.loads(file.read_text())
    assert record["options"]["rate"] == 40 and record["options"]["mix"] == {"decode": 1.0}
    assert 10 < record["load"]["offered_per_s"] < 100
    times = record["kinds"]["decode"]["ms"]
    assert set(times) == {"total", "wait", "queue", "copy in", "compute", "copy out", "transport"}
    assert times["queue"] == [1.0, 1.0, 1.0]  # what the fake tells
    assert 0 < times["total"][0] < 500  # measured, and may be less than what the fake tells of a queue


def test_a_load_that_was_not_held_gives_no_latencies(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = server._row

    def slow_row(*arguments: Any) -> Any:
        time.sleep(0.02)
        return row(*arguments)

    server._row = slow_row
    file = tmp_path / "figures.json"
    arguments = ["--rate", "400", "--duration", "0.5", "--timeout", "1", "--output", str(file)]
    assert main(["bench", server.address, *DECODE, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the load was not held" in err and "the server was slow" in err
    assert not file.exists()
    assert server.streams == {}


def test_processes_share_the_steps_and_close_what_they_opened(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", server.address, *DECODE, "--steps", "21", "--processes", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:2] == ["decode", "21"]
    assert "steps, ramp-up included: 21, " in err
    assert len(server.requests["Step"]) == 2 + 21
    assert server.streams == {}


def test_an_error_in_a_process_ends_the_run(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(100):
        server.lose("Step")
    arguments = ["--steps", "21", "--processes", "2", "--timeout", "1"]
    assert main(["bench", server.address, *DECODE, *arguments]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("deltaline: error: ")


def test_a_process_that_dies_is_told() -> None:
    class Closed:
        def recv(self) -> object:
            raise EOFError

    closed: Any = Closed()
    with pytest.raises(BenchError, match="without a word"):
        _receive(closed)


def test_busy_share_comes_from_the_metrics(
    server: Any, pages: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, texts = pages
    line = "# TYPE x counter\ndeltaline_device_busy_seconds_total {}\n"
    texts += [line.format(5.0), line.format(5.0), line.format(5.2)]  # at the start, and around what is measured
    assert main(["bench", server.address, *DECODE, "--duration", "0.4", "--metrics-url", url]) == 0
    [share] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("device busy: ")]
    assert 1 < float(share.removeprefix("device busy: ").rstrip("%")) < 60  # 0.2 s of 0.4 s, or of more on a busy host


@pytest.mark.parametrize("url", ["file:///etc/hosts", "http://127.0.0.1:1/metrics"])
def test_wrong_metrics_are_told_at_once(server: Any, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", server.address, *DECODE, "--metrics-url", url]) == 1
    assert "--metrics-url: " in capsys.readouterr().err
    assert server.requests["Step"] == []


def test_a_missing_plotter_is_no_error(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "figures.json"
    assert main(["bench", server.address, *DECODE, "--steps", "3", "--output", str(file)]) == 0
    assert "no plot: " in capsys.readouterr().err
    assert json.loads(file.read_text())["kinds"]["decode"]["steps"] == 3


def test_the_plot_is_drawn(server: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "figures.json"
    assert main(["bench", server.address, *SMALL, "--steps", "9", "--output", str(file)]) == 0
    assert file.with_suffix(".svg").read_text().startswith("<?xml")


def test_long_prefills_are_more_than_the_block_holds(server: Any) -> None:
    server.info.inline_limit_bytes = 2**20
    arguments = ["--steps", "2", "--mix", "prefill=1", "--prefill-tokens", "3000"]
    assert main(["bench", server.address, *SMALL, *arguments]) == 0
    assert {request.query_start_loc[-1] for request in server.requests["Step"]} == {3000}


def test_shared_memory_that_is_not_used_is_an_error(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", server.address, *DECODE, "--steps", "3", "--shared-memory-bytes", "65536"]) == 1
    assert "--shared-memory-bytes: " in capsys.readouterr().err


def test_what_the_client_logs_of_shared_memory_is_noted() -> None:
    log = logging.getLogger("deltaline_client._shared_memory.regions")
    before = log.getEffectiveLevel()
    with InlineNotes() as notes:
        log.info("shared memory is full (%d bytes): steps that find no room go inline", 5)
        log.info("something else")
    log.info("shared memory is gone")
    assert notes.texts == ["shared memory is full (5 bytes): steps that find no room go inline"]
    assert log.getEffectiveLevel() == before
