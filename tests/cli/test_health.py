"""`deltaline health`: what it prints and its exit code, and how little it imports."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from deltaline.v1 import layer_service_pb2
from deltaline_cli import health as command
from deltaline_cli import main
from deltaline_cli.health import SERVICE

Status = health_pb2.HealthCheckResponse


@pytest.fixture
def servicer() -> health.HealthServicer:
    return health.HealthServicer()


@pytest.fixture
def address(servicer: health.HealthServicer) -> Iterator[str]:
    """A server that has nothing but health."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_it_asks_for_the_service_that_the_contract_names() -> None:
    assert layer_service_pb2.DESCRIPTOR.services_by_name["LayerService"].full_name == SERVICE


@pytest.mark.parametrize(
    ("service", "status"), [("", "SERVING"), ("", "NOT_SERVING"), (SERVICE, "SERVING"), (SERVICE, "UNKNOWN")]
)
def test_status_is_one_line_and_an_exit_code(
    servicer: health.HealthServicer, address: str, status: str, service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer.set("" if service else SERVICE, Status.SERVING if status != "SERVING" else Status.NOT_SERVING)
    servicer.set(service, Status.ServingStatus.Value(status))
    flags = [] if service else ["--liveness"]
    for run in (command.main, lambda arguments: main.main(["health", *arguments])):
        assert run([address, *flags]) == int(status != "SERVING")
        assert capsys.readouterr().out == f"{address}: {status}\n"


def test_a_service_that_the_server_has_not_is_an_error(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([address]) == 1
    assert capsys.readouterr().out.startswith(f"{address}: NOT_FOUND")


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["127.0.0.1:1", "--timeout", "2"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 and out.startswith("127.0.0.1:1: UNAVAILABLE: ") and err == ""


def test_a_server_that_does_not_answer_is_given_up(
    servicer: health.HealthServicer, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    released = threading.Event()
    monkeypatch.setattr(servicer, "Check", lambda request, context: released.wait(20) and Status())
    again = grpc.server(futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, again)
    port = again.add_insecure_port("127.0.0.1:0")
    again.start()
    assert command.main([f"127.0.0.1:{port}", "--timeout", "0.3"]) == 1
    assert f":{port}: DEADLINE_EXCEEDED" in capsys.readouterr().out
    released.set()
    again.stop(None).wait()


@pytest.mark.parametrize(
    ("port", "address"),
    [
        (None, "127.0.0.1:50051"),
        ("7", "127.0.0.1:7"),
        ("tcp://10.0.0.1:50051", "127.0.0.1:50051"),
        ("\u0663", "127.0.0.1:50051"),
    ],
)
def test_the_address_is_this_machines(
    port: str | None, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DELTALINE_PORT", raising=False)
    if port is not None:
        monkeypatch.setenv("DELTALINE_PORT", port)
    monkeypatch.setattr(command, "ask", lambda *_: "SERVING")
    assert command.main([]) == 0
    assert capsys.readouterr().out == f"{address}: SERVING\n"


@pytest.mark.parametrize("timeout", ["nan", "0", "1e300", "x"])
def test_a_timeout_is_a_time_to_wait(address: str, timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main([address, "--timeout", timeout])
    assert f"--timeout: expected a number of seconds above 0, an hour at most, got {timeout!r}" in (
        capsys.readouterr().err
    )


def test_the_command_imports_grpc_and_little_else(address: str, servicer: health.HealthServicer) -> None:
    servicer.set(SERVICE, Status.SERVING)
    program = "\n".join(
        [
            "import sys",
            f"sys.argv = ['deltaline', 'health', {address!r}]",
            "from deltaline_cli.__main__ import main",
            "assert main() == 0",
            "heavy = {'numpy', 'ml_dtypes', 'google', 'deltaline_client', 'torch'} & set(sys.modules)",
            "print(sorted(heavy))",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{address}: SERVING", "[]"]
