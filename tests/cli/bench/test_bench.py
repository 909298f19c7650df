"""`deltaline bench` on a server: loops, processes, what it writes, and when it reports nothing."""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rigs.running_sum import Fault
from rigs.scheduler_rig import turns
from rigs.until import until

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_cli.bench import command
from deltaline_cli.bench.client import BenchClient
from deltaline_cli.bench.command import measured
from deltaline_cli.bench.load import Share, opened
from deltaline_cli.bench.options import BenchOptions
from deltaline_cli.bench.run import BenchError, receive
from deltaline_cli.bench.samples import Samples, sample
from deltaline_cli.main import main
from deltaline_server.errors import Reason

SMALL = ["--clients", "2", "--rows", "2", "--ramp-up", "0"]
DECODE = [*SMALL, "--mix", "decode=1"]
PREFILL = layers.ROW_KIND_PREFILL


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


def test_open_loop_reports_what_it_offered(server: Any) -> None:
    options = BenchOptions(clients=2, rows=2, mix={"decode": 1.0}, rate=40.0, duration_s=0.5, ramp_up_s=0.0)
    report = measured(server.address, options)  # a busy machine may refuse the load: the figures are there all the same
    assert (report.verdict.offered_per_s or 0) > 0
    assert "wait" in report.text() and "offered " in report.text()
    times = report.record()["kinds"]["decode"]["ms"]
    assert set(times) == {"total", "wait", "queue", "copy in", "compute", "copy out", "transport"}
    assert times["queue"] == [1.0, 1.0, 1.0]  # what the fake tells


def test_a_load_that_was_not_held_gives_no_latencies(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [sample("decode", 2, 0.0, 1.0)]
    monkeypatch.setattr(command, "run", lambda *_: Samples.of(made, 0.0, 2.0, [1.5], 0.1))
    file = tmp_path / "figures.json"
    assert main(["bench", server.address, *DECODE, "--rate", "400", "--output", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and not file.exists()
    assert "the load was not held" in err and "the server was slow" in err
    assert "offered 1.0 steps/s, done 0.5" in err


def test_sequences_without_room_make_way_for_new_ones(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.info.kv_pages, server.info.kv_page_tokens, server.info.max_context = 100, 4, 20
    mix = ["--mix", "prefill=1,decode=5,verify=3", "--prefill-tokens", "13:17", "--clients", "1"]
    arguments = [*SMALL, *mix, "--steps", "60"]
    assert main(["bench", server.address, *arguments]) == 0
    ends = [
        position + end - begin
        for request in server.requests["Step"]
        for position, (begin, end) in zip(request.position, pairwise(request.query_start_loc), strict=True)
    ]
    assert 17 < max(ends) <= 20
    assert len(server.requests["Step"]) == 3 + 60  # a first one of each kind, and none that was refused
    assert len(server.opened) > 3 and server.streams == {}
    server.info.kv_pages = 12  # four for each sequence
    server.requests["Step"].clear()
    assert main(["bench", server.address, *arguments]) == 0
    assert {request.position[0] for request in server.requests["Step"] if request.kind[0] == PREFILL} == {0}
    server.info.max_context = 16
    assert main(["bench", server.address, *arguments]) == 1
    assert "--prefill-tokens: the server's sequences have at most 16 tokens" in capsys.readouterr().err


def test_a_prefills_rows_come_back_as_asked(server: Any) -> None:
    arguments = ["--steps", "3", "--mix", "prefill=1", "--prefill-output", "none"]
    assert main(["bench", server.address, *SMALL, *arguments]) == 0
    assert {request.output for request in server.requests["Step"]} == {layers.OUTPUT_ROWS_NONE}


def test_processes_share_the_steps_and_close_what_they_opened(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", server.address, *DECODE, "--steps", "21", "--processes", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:2] == ["decode", "21"]
    assert "steps, ramp-up included: 21, " in err
    assert len(server.requests["Step"]) == 2 + 21
    assert server.streams == {}


def test_an_error_in_a_process_ends_the_run(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):  # the first steps of both clients, and one more
        server.refuse("Step", Reason.BUG)
    assert main(["bench", server.address, *DECODE, "--steps", "21", "--processes", "2"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "deltaline: error: refused: BUG"


async def test_what_is_being_opened_when_a_load_is_stopped_is_closed(server: Any) -> None:
    """The other process has failed, and the server has taken the call but not answered it."""
    may_open = threading.Event()
    server.faults["OpenSequences"].append(Fault(before=may_open.wait))
    loading = asyncio.ensure_future(load_until_stopped(server))
    await until(lambda: server.requests["OpenSequences"])
    loading.cancel()
    await turns(3)
    may_open.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await until(lambda: server.opened)
    assert server.streams == {}


@pytest.mark.parametrize("has_failed", [False, True])
async def test_a_load_that_is_stopped_while_it_closes_closes_all(
    server: Any, has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one process is whose error, or end, comes right behind another's error."""
    close, closing, may_close = BenchClient.close, asyncio.Event(), asyncio.Event()

    async def close_later(client: BenchClient) -> None:
        closing.set()
        await may_close.wait()
        await close(client)

    monkeypatch.setattr(BenchClient, "close", close_later)
    if has_failed:
        server.refuse("Step", Reason.BUG)
    loading = asyncio.ensure_future(load_until_stopped(server, lasts_s=0.0))
    await closing.wait()
    loading.cancel()
    await turns(3)
    may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert len(server.opened) == 1 and server.streams == {}


async def load_until_stopped(server: Any, lasts_s: float = 60.0) -> None:
    """The load of a process that makes no step but the first ones."""
    async with opened(server.address, BenchOptions(clients=1, rows=2), Share(0, 1), lambda _: None):
        await asyncio.sleep(lasts_s)


def test_a_process_that_dies_is_told() -> None:
    class Closed:
        def recv(self) -> object:
            raise EOFError

    closed: Any = Closed()
    with pytest.raises(BenchError, match="without a word"):
        receive(closed)


def test_busy_share_comes_from_the_metrics(
    server: Any, pages: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, texts = pages
    line = "# TYPE x counter\ndeltaline_device_busy_seconds_total {}\n"
    texts += [line.format(5.0), line.format(5.0), line.format(5.2)]  # at the start, and around what is measured
    assert main(["bench", server.address, *DECODE, "--duration", "0.4", "--metrics-url", url]) == 0
    [share] = re.findall(r"^device busy: ([\d.]+)%$", capsys.readouterr().out, re.M)
    assert float(share) > 0  # of 0.4 s, or of more and less on a busy host


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
    arguments = ["bench", server.address, *DECODE, "--steps", "3", "--shared-memory-bytes", "65536"]
    assert main(arguments) == 1
    assert "--shared-memory-bytes: the server shares at most 0 bytes" in capsys.readouterr().err
    assert server.requests["Step"] == []
    server.info.shared_memory_bytes = 2 * 65536  # which it does not give
    assert main(arguments) == 1
    assert "--shared-memory-bytes: not all tensors went through it" in capsys.readouterr().err
