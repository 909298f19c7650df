"""`deltaline top`: rates and quantiles are Prometheus' own, and a frame shows what the server said, at any width."""

from __future__ import annotations

import contextlib
import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("rich", reason="rich is not installed: it draws the view")
from rich.console import Console

from deltaline.v1 import adapter_service_pb2
from deltaline_cli.main import main
from deltaline_cli.top.command import Watch
from deltaline_cli.top.frame import Frame, Rates, parse
from deltaline_cli.top.view import render
from deltaline_client import AdapterList, Client, DeltalineError

BUCKET = 'deltaline_stage_seconds_bucket{stage="compute",kind="decode",le="%s"}'


def histogram(*counts: float) -> dict[str, float]:
    """Cumulative counts of buckets up to 1 ms, 2 ms, 5 ms and above."""
    return {BUCKET % bound: count for bound, count in zip(("0.001", "0.002", "0.005", "+Inf"), counts, strict=True)}


def test_counters_grow_by_name_and_labels() -> None:
    before = {'a_total{x="1",y="2"}': 5.0, 'a_total{x="2",y="2"}': 1.0, "b": 3.0}
    after = {'a_total{x="1",y="2"}': 9.0, 'a_total{x="2",y="2"}': 1.0, 'a_total{x="3"}': 2.0, "b": 7.0}
    rates = Rates(before, after, 2.0)
    assert rates.grown("a_total") == 6 and rates.rate("a_total", x="1") == 2
    assert rates.grown("a_total", y="2") == 4 and rates.grown("nothing") == 0
    assert rates.by("a_total", "x") == {"1": 4.0, "3": 2.0}
    assert (rates.gauge("b"), rates.gauge("c")) == (7.0, 0.0)


def test_a_counter_that_began_anew_counts_from_zero() -> None:
    assert Rates({"a_total": 100.0}, {"a_total": 3.0}, 1.0).grown("a_total") == 3


def test_labels_may_hold_anything() -> None:
    key = r'a{x="with \"quotes\", and } and = ",y="2"}'
    assert parse(key) == ("a", {"x": r"with \"quotes\", and } and = ", "y": "2"})


@pytest.mark.parametrize(
    ("share", "expected"), [(0.25, 0.5e-3), (0.5, 1e-3), (0.75, 1.5e-3), (0.875, 1.75e-3), (1.0, 2e-3)]
)
def test_quantiles_are_within_their_bucket(share: float, expected: float) -> None:
    """What PromQL's histogram_quantile gives of 2 observations up to 1 ms and 2 up to 2 ms."""
    rates = Rates(histogram(10, 10, 10, 10), histogram(12, 14, 14, 14), 1.0)
    found = rates.quantile(share, "deltaline_stage_seconds", stage="compute", kind="decode")
    assert found == pytest.approx(expected)


def test_quantiles_above_all_bounds_are_the_last_bound() -> None:
    rates = Rates(histogram(0, 0, 0, 0), histogram(0, 0, 0, 5), 1.0)
    assert rates.quantile(0.5, "deltaline_stage_seconds") == 5e-3
    assert rates.quantile(0.5, "deltaline_stage_seconds", kind="verify") is None
    assert Rates(rates.after, rates.after, 1.0).quantile(0.5, "deltaline_stage_seconds") is None


PAGE = """\
# TYPE deltaline_batch_rows histogram
deltaline_batch_rows_sum {sum}
deltaline_batch_rows_count {count}
deltaline_device_busy_seconds_total {busy}
deltaline_steps_total{{outcome="executed"}} {sum}
deltaline_refused_total{{reason="QUEUE_FULL"}} {count}
deltaline_refused_total{{reason="STEP_GAP"}} 7
deltaline_stage_seconds_count{{stage="queue",kind="decode"}} {count}
deltaline_stage_seconds_bucket{{stage="queue",kind="decode",le="0.001"}} {count}
deltaline_stage_seconds_bucket{{stage="queue",kind="decode",le="+Inf"}} {count}
deltaline_adapter_rows_waiting 3
deltaline_principal_sequences{{principal="team-a"}} 5
deltaline_principal_sequences{{principal="team-b"}} 6
deltaline_principal_queue_rows{{principal="team-a"}} 12
deltaline_principal_tokens_total{{principal="team-a"}} {count}
deltaline_principal_tokens_total{{principal="team-b"}} {sum}
"""


class Page(http.server.BaseHTTPRequestHandler):
    """Metrics of a server that has made one batch of 64 rows more at each scrape."""

    scrapes = 0

    def do_GET(self) -> None:
        Page.scrapes += 1
        page = PAGE.format(sum=64 * Page.scrapes, count=Page.scrapes, busy=0.01 * Page.scrapes).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def metrics_url() -> Iterator[str]:
    Page.scrapes = 0
    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()


def drawn(frame: Frame, width: int) -> list[str]:
    console = Console(width=width, height=60, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(render(frame, width))
        return console.export_text().splitlines()


def test_one_frame_for_scripts_has_no_escapes(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.info.adapter_bytes = 0
    assert main(["top", server.address, "--once"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0] == f"{server.address}  serving  deltaline 0.1.0 on cpu, epoch 0x4d"
    assert lines[1] == "fake, 4 layers in 2 spans (block scope), float32, state in float32"
    assert any(
        line.split()[1:3] == ["state", "lines"] and line.split()[4:8] == ["0%", "0", "of", "16"] for line in lines
    )
    assert lines[-1].startswith("no latencies and rates: give --metrics-url")


def test_rates_are_of_the_interval(server: Any, metrics_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["top", server.address, "--once", "--metrics-url", metrics_url, "--interval", "0.5"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert Page.scrapes == 2
    assert "/s of 64.0 rows" in out and "QUEUE_FULL" in out and "STEP_GAP" not in out
    assert "decode p50" in out and "prefill" not in out and " 500 us " in out and " 990 us " in out


@pytest.mark.parametrize("width", [60, 109, 110, 220])
def test_a_frame_fits_its_width(server: Any, metrics_url: str, width: int) -> None:
    with Client(server.address) as client:
        watch = Watch(client, server.address, metrics_url)
        watch.frame()
        frame = watch.frame()
    named = [
        adapter_service_pb2.Adapter(
            name=f"adapter-{i:02d}-" + "x" * 50,
            rank=8,
            size_bytes=5 << 20,
            sequences=i,
            state=adapter_service_pb2.ADAPTER_STATE_RESIDENT,
        )
        for i in range(11)
    ]
    listed = adapter_service_pb2.ListAdaptersResponse(adapters=named, slots_used=8, slots_total=8, limit_bytes=1 << 30)
    full = Frame(frame.address, frame.info, frame.load, AdapterList.from_proto(listed), frame.rates)
    lines = drawn(full, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "2 principals" in text
    told = [line.strip("│ ").split() for line in lines if "team-" in line]
    assert [(one[0], *one[3:]) for one in told] == [("team-b", "0", "6"), ("team-a", "12", "5")]
    assert "adapter-10" in text and "adapter-03" in text and "adapter-02" not in text and "and 3 more" in text
    assert all(panel in text for panel in ("open ", "latency, last ", "work ", "refused ", "11 adapters, 8 of 8 slots"))
    assert (width >= 110) == any("open" in line and "work" in line for line in lines)


def test_a_server_that_goes_away_is_told_and_the_rest_stays(server: Any) -> None:
    with Client(server.address) as client, Client(server.address, timeout=1.0) as hasty:
        frame = Watch(client, server.address, "http://127.0.0.1:1/metrics").frame()
        assert isinstance(frame.rates, str) and frame.rates.startswith("no latencies and rates: http://127.0.0.1:1/")
        server.server.stop(None).wait()
        watch = Watch(hasty, server.address, "http://127.0.0.1:1/metrics")
        later = watch.frame(last=frame)
        assert later.error.startswith("can't be asked: ") and later.load == frame.load
        assert "unreachable" in drawn(later, 80)[0]
        with pytest.raises(DeltalineError):
            watch.frame()


ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"100000\r\n%s\r\n" % (b"#" * (1 << 20)) * 20


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        pytest.param(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", "no answer in HTTP", id="grpc"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\na 1\n", "ended 95 bytes too early", id="cut"),
        pytest.param(ENDLESS, "no end of them", id="endless"),
    ],
)
def test_a_page_that_is_none_of_metrics_is_told(server: Any, answer: bytes, told: str) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener, Client(server.address) as client:
        threading.Thread(target=serve, daemon=True).start()
        frame = Watch(client, server.address, f"http://127.0.0.1:{listener.getsockname()[1]}/metrics").frame()
    assert isinstance(frame.rates, str) and told in frame.rates


def test_a_script_is_told_what_the_port_says(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Lost(Page):
        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.end_headers()
            self.wfile.write(b"expected /metrics\n")

    with http.server.HTTPServer(("127.0.0.1", 0), Lost) as lost:
        threading.Thread(target=lost.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{lost.server_port}"
        assert main(["top", server.address, "--once", "--interval", "0.01", "--metrics-url", url]) == 1
        lost.shutdown()
    assert "HTTP Error 404: Not Found: expected /metrics" in " ".join(capsys.readouterr().out.split())


def test_a_metrics_url_that_is_none_is_told(server: Any) -> None:
    with Client(server.address) as client:
        rates = Watch(client, server.address, "http://127.0.0.1:x/metrics").frame().rates
    assert isinstance(rates, str) and "nonnumeric port" in rates


def test_without_a_terminal_frames_follow_one_another(server: Any) -> None:
    command = [sys.executable, "-m", "deltaline_cli", "top", server.address, "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        heads = 0
        while heads < 3 and (line := process.stdout.readline()):
            heads += "  serving  " in line
        process.terminate()
    assert (heads, process.returncode) == (3, 130)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interval", "0"], "--interval: expected a positive number of seconds, a day at most, got 0"),
        (["--interval", "inf"], "--interval: expected a positive number of seconds, a day at most, got inf"),
        (["--metrics-url", "ftp://x"], "--metrics-url: expected http://HOST:PORT/metrics, got 'ftp://x'"),
    ],
)
def test_wrong_options_are_one_line(
    server: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", server.address, *arguments]) == 1
    assert capsys.readouterr().err == f"deltaline: error: {message}\n"


def test_rich_is_asked_for(server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["top", server.address]) == 1
    assert capsys.readouterr().err == "deltaline: error: top needs rich: pip install 'deltaline[top]'\n"
