"""The command line: what it prints, and what it says when something is wrong."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from rigs.small_models import GATED_DELTA_NET

from deltaline import address
from deltaline.address import PORT, with_port
from deltaline.v1 import layer_service_pb2 as layers
from deltaline_cli import demo
from deltaline_cli.address import advise
from deltaline_cli.bench.options import bytes_of
from deltaline_cli.main import main
from deltaline_cli.text import plural, table
from deltaline_client import AsyncClient, Client
from deltaline_server.config import Config
from deltaline_server.errors import Reason


def signal_when(number: int, is_time: Callable[[], bool]) -> None:
    """Send this process a signal as soon as a condition holds, from a thread."""

    def wait() -> None:
        while not is_time():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    gc.collect()  # an exception that a signal raises in a finaliser is lost, and earlier tests leave objects with some
    threading.Thread(target=wait, daemon=True).start()


def test_info_tells_what_is_served(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", server.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "server          deltaline 0.1.0 on cpu, epoch 0x4d"
    assert "spans           0: layers 0-1, 1: layers 2-3 (block scope)" in lines
    assert {"name            none", "adapters        none"} <= set(lines)
    assert {line[15] for line in lines} == {" "}


def test_info_tells_of_adapters_streams_and_pages(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    info = server.info
    info.adapter_bytes, info.adapter_slots, info.max_adapter_rank = 2 << 30, 1, 64
    info.spans[0].output_streams = info.spans[1].input_streams = 4
    info.kv_pages, info.kv_page_tokens, info.kv_page_bytes, info.max_context = 1000, 64, 2 << 20, 32768
    info.server = "gpu-3.example:50051"
    assert main(["info", server.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "adapters        2.0 GiB of host memory, 1 slot on the device, rank at most 64" in lines
    assert "name            gpu-3.example:50051" in lines
    spans = "0: layers 0-1 (no streams in, 4 out), 1: layers 2-3 (4 streams in, none out)"
    assert f"spans           {spans} (block scope)" in lines
    assert "pages           1000 of 64 tokens and 2.0 MiB, at most 32768 tokens of a sequence" in lines


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host-1.example", "host-1.example:50051"),
        ("10.0.0.7", "10.0.0.7:50051"),
        ("host:7", "host:7"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("unix:/run/deltaline.sock", "unix:/run/deltaline.sock"),
        ("dns:///host", "dns:///host"),
    ],
)
def test_an_address_without_a_port_gets_the_servers_default(text: str, address: str) -> None:
    assert with_port(text) == address
    assert Config.parse(["--random-init", "x"], {}).port == PORT


@pytest.mark.parametrize(
    "text", ["", ":7", "host:", "host:x", "host:0", "host:65536", "http://host:7", "a b", "unix:", "unix:/\udcff"]
)
def test_what_is_no_address_is_refused_at_once(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = f"address: expected HOST, HOST:PORT, unix:/PATH or link:/PATH, got {text!r}"
    for make in (Client, AsyncClient):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(text)
        with pytest.raises(TypeError, match=r"^address: expected a text, got int$"):
            make(cast(Any, 50051))
    with pytest.raises(SystemExit, match="2"):
        main(["info", text])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/run/a%41.sock", "/run/a?b", "/run/a#b"])
def test_a_socket_that_grpc_would_look_for_elsewhere_is_refused_at_both_ends(path: str) -> None:
    for make in (with_port, Client, AsyncClient):
        with pytest.raises(
            ValueError, match=rf"^address: expected unix:/PATH without % \? #, got 'unix:{re.escape(path)}'"
        ):
            make(f"unix:{path}")
    with pytest.raises(ValueError, match=r"^--uds: expected a path without % \? #, got"):
        Config.parse(["--random-init", "x", "--uds", path], {})


def test_another_servers_port_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def answer() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert main(["info", address]) == 1
    assert f"What answers at {address} is no deltaline server" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["size", "--help"], ["info", "{}"]])
def test_a_reader_that_is_gone_is_no_traceback(server: Any, arguments: list[str]) -> None:
    gone, output = os.pipe()
    os.close(gone)
    command = [sys.executable, "-m", "deltaline_cli", *(word.format(server.address) for word in arguments)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, env=environ, stdout=output, stderr=subprocess.PIPE, text=True)
    os.close(output)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["info", "{}"], ["health", "{}"], ["size", "--random-init", "{}"]])
def test_output_that_can_not_be_written_is_one_line(
    server: Any, tmp_path: Path, arguments: list[str], unbuffered: str
) -> None:
    given = tmp_path / "config.json"
    given.write_text(json.dumps(GATED_DELTA_NET))
    filled = [word.format(given if arguments[0] == "size" else server.address) for word in arguments]
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered, "GRPC_VERBOSITY": "NONE"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "deltaline_cli", *filled]
        done = subprocess.run(command, env=environ, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "deltaline: error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    "command",
    [
        ["info"],
        ["load"],
        ["drain"],
        ["top", "--once"],
        ["bench", "--timeout", "1"],
        ["bench", "--timeout", "0.001"],  # over before anything was refused
        ["adapters", "list", "--timeout", "1", "--server"],
    ],
)
def test_every_command_says_how_to_start_a_server(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(address, "PORT", 1)
    assert main([*command, "127.0.0.1"]) == 1
    error = capsys.readouterr().err
    assert "No server answers at 127.0.0.1:1. " in error
    assert "deltaline-server --model DIR" in error and "deltaline demo --keep" in error


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_host_that_listens_at_one_of_its_addresses_is_not_told_to_start(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Exception("last error: ipv6:[::1]: Connection refused")  # what gRPC tells of such a host
    with socket.create_server(("127.0.0.1", 0)) as listening:
        reached = f"{host}:{listening.getsockname()[1]}"
        advise(reached, None, refused)
        assert f"What answers at {reached} ends the connection. Does it speak TLS?" in capsys.readouterr().err
    advise(reached, None, refused)
    assert f"No server answers at {reached}." in capsys.readouterr().err


def test_load_tells_how_full_it_is(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", server.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["state", "lines", "0", "16"]
    assert lines[-1] == "0 sequences open"


def test_bench_steps_every_kind_and_closes_what_it_opened(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--clients", "2", "--rows", "3", "--steps", "40", "--ramp-up", "0", "--drafts", "2"]
    mix = ["--mix", "prefill=1,decode=1,verify=1", "--prefill-tokens", "5"]
    assert main(["bench", server.address, *arguments, *mix]) == 0
    out, err = capsys.readouterr()
    rows = [(request.kind[0], len(request.kind), request.query_start_loc[-1]) for request in server.requests["Step"]]
    assert set(rows) == {
        (layers.ROW_KIND_PREFILL, 1, 5),
        (layers.ROW_KIND_DECODE, 3, 3),
        (layers.ROW_KIND_VERIFY, 3, 6),
    }
    assert len(rows) == 2 * 3 + 40  # a first step of each kind by each client, and those that are measured
    assert server.streams == {}
    speeds = [line.split() for line in out.splitlines()[1:4]]
    [steps_per_s, rows_per_s] = map(float, speeds[0][2:4])
    assert rows_per_s == steps_per_s and float(speeds[1][3]) == pytest.approx(3 * float(speeds[1][2]), rel=0.1)
    assert [cells[0] for cells in speeds] == ["prefill", "decode", "verify"]
    assert sum(int(cells[1]) for cells in speeds) == 40
    assert sum(line.strip().startswith("transport ") for line in out.splitlines()) == 3
    assert "steps, ramp-up included: 40, " in err


WRONG = {
    ("clients", "rows", "steps", "drafts", "processes"): ("-1", "0", "9" * 30),
    ("shared-memory-bytes",): ("-1", "9" * 30),
    ("duration", "rate", "timeout"): ("-1", "0", "1e-300", "nan", "inf", "1e300"),
    ("ramp-up",): ("-1", "nan", "inf", "1e300"),
    ("mix",): ("decode=inf", "decode=nan", "decode=-1", "decode=1e308,verify=1e308", ""),
    ("prefill-tokens",): ("0", "9" * 30, "1:1048577", "lognormal:1,9999999", "lognormal:nan,inf"),
    ("output",): (f"{'x' * 300}.json", f"/{'x' * 300}/a.json", "/nowhere/a.json", "/dev/null/a.json"),
}


@pytest.mark.parametrize(
    ("option", "value"), [(o, value) for options, values in WRONG.items() for o in options for value in values]
)
def test_bench_refuses_what_makes_no_sense_in_one_line(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "127.0.0.1:1", f"--{option}={value}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"deltaline: error: --{option}: expected ")


@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:99999/", "http://127.0.0.1:x/", "http://h\u00e9/\u00e9"])
def test_a_url_of_metrics_that_is_none_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "127.0.0.1:1", "--metrics-url", url]) == 1
    assert capsys.readouterr().err.splitlines()[0].startswith(f"deltaline: error: --metrics-url: {url}: ")


@pytest.mark.parametrize(
    ("text", "count"), [("65536", 65536), ("2GiB", 2**31), ("0.5mib", 2**19), ("3MB", 3_000_000), ("0", 0)]
)
def test_bytes_may_have_the_servers_units(text: str, count: int) -> None:
    assert bytes_of(text, "--shared-memory-bytes") == count
    config = Config.parse(["--random-init", "x", "--shared-memory-bytes", text], {})
    assert config.shared_memory_bytes == count


@pytest.mark.parametrize("text", ["2GiBs", "MiB", "infGiB", "1.5", "-1MiB"])
def test_other_bytes_are_refused_in_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "127.0.0.1:1", f"--shared-memory-bytes={text}"]) == 2
    assert capsys.readouterr().err.startswith("deltaline: error: --shared-memory-bytes: expected ")


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [("drafts", "5", "4"), ("rows", "8", "16"), ("shared-memory-bytes", "40000", "65536")],
)
def test_bench_refuses_more_than_the_server_takes(
    server: Any, option: str, value: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.info.shared_memory_bytes = 65536
    assert main(["bench", server.address, "--clients", "2", "--rows", "1", f"--{option}", value]) == 1
    error = capsys.readouterr().err
    assert f"--{option}" in error and f"at most {limit} " in error
    assert server.streams == {}


@pytest.fixture
def at_a_terminal() -> Iterator[None]:
    """SIGINT interrupts, as at a terminal: a runner in a shell's background starts with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("at_a_terminal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_closes_what_it_opened(
    server: Any, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    signal_when(number, lambda: len(server.requests["Step"]) > 8)
    assert main(["bench", server.address, "--clients", "2", "--rows", "2", "--steps", "100000"]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert server.streams == {}
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(("fault", "processes"), [("lose", "1"), ("hang", "1"), ("hang", "2")])
def test_bench_gives_a_lost_server_up_and_closes_what_it_opened(
    server: Any, fault: str, processes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(200):
        getattr(server, fault)("Step")
    assert (
        main(["bench", server.address, "--clients", "2", "--rows", "2", "--timeout", "4", "--processes", processes])
        == 1
    )
    error = capsys.readouterr().err
    assert "deltaline: error: " in error and "No server answers" not in error
    assert len(server.opened) > 0 and server.streams == {}


def test_errors_are_one_line(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.refuse("GetLoad", Reason.BUG)
    assert main(["load", server.address]) == 1
    assert capsys.readouterr().err == "deltaline: error: refused: BUG\n"


def test_demo_tells_why_the_server_did_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho no such model >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    monkeypatch.setattr(demo, "EXAMPLES", tmp_path)
    assert main(["demo"]) == 1
    assert "no such model" in capsys.readouterr().err


def test_demo_names_the_packages_that_the_server_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "SERVER_NEEDS", ("sys", "no_such_package"))
    assert main(["demo"]) == 1
    error = "deltaline: error: the server needs no_such_package: pip install 'deltaline[server]'\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("is_early", [False, True], ids=["later", "early"])
@pytest.mark.parametrize("first", ["make_checkpoint", "server"])
def test_an_interrupted_demo_leaves_nothing_behind(
    tmp_path: Path, first: str, is_early: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started, folders = tmp_path / "started", tmp_path / "folders"
    folders.mkdir()
    if first == "make_checkpoint":
        pytest.importorskip("transformers")
        (tmp_path / "make_checkpoint.py").touch()
    waiting = tmp_path / "python"
    waiting.write_text(f"#!/bin/sh\necho $$ > {started}.new\nmv {started}.new {started}\nexec sleep 60\n")
    waiting.chmod(0o755)

    class Early(subprocess.Popen[bytes]):
        """Interrupted before anybody else knows of the process."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.write_text(str(self.pid))
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys, "executable", str(waiting))
    monkeypatch.setattr(demo, "EXAMPLES", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    if is_early:
        monkeypatch.setattr(subprocess, "Popen", Early)
    else:
        signal_when(signal.SIGTERM, started.exists)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert list(folders.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_tables_line_up() -> None:
    assert table([("a", "1"), ("long", "100")], align="<>") == "a       1\nlong  100"
    assert [plural(count, "slot") for count in (0, 1, 2)] == ["slots", "slot", "slots"]
