"""The server's life: start, readiness, leases, drain, loss of the device, and the command's exit codes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import grpc
import pytest
import torch
from google.protobuf.internal import api_implementation
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rigs.authority import Authority

from deltaline.v1 import admin_service_pb2 as admin_pb
from deltaline.v1 import admin_service_pb2_grpc, layer_service_pb2_grpc
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server import __main__, app
from deltaline_server.app import Server, StartError
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.config import Config, ConfigError
from deltaline_server.runtime import Runtime
from deltaline_server.sizing import host

READINESS = "deltaline.v1.LayerService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ONE = pb.OpenSequencesRequest(count=1)


class Stubs:
    """Every service of a server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.layer: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        self.admin: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        self.reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def status(self, service: str) -> int:
        return int((await self.health.Check(health_pb2.HealthCheckRequest(service=service))).status)

    async def close(self, opened: pb.OpenSequencesResponse) -> list[int]:
        request = pb.CloseSequencesRequest(server_epoch=opened.server_epoch, sequence=opened.sequence)
        return list((await self.layer.CloseSequences(request)).state)


@pytest.fixture
def stubs(channel: grpc.aio.Channel) -> Stubs:
    return Stubs(channel)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    status = status_pb2.Status.FromString(dict(error.trailing_metadata() or ())["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    return str(info.reason)


# -- health, information ---------------------------------------------------------------------------------------------


async def test_unknown_service_has_no_health(stubs: Stubs) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stubs.status("nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_probes_by_http_follow_the_servers_life(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, may_load = Runtime.build, threading.Event()
    monkeypatch.setattr(Runtime, "build", lambda *inputs: may_load.wait(60) and build(*inputs))
    server = make_server(metrics_port=0)
    starting = asyncio.create_task(server.start())

    def ask(path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}{path}", timeout=30) as answer:
                return int(answer.status)
        except HTTPError as error:
            return error.code

    async def probes() -> list[int]:
        return [await asyncio.to_thread(ask, path) for path in ("/healthz", "/readyz")]

    await asyncio.sleep(0)  # it listens before it first waits
    while_it_loads = await probes()
    may_load.set()
    await starting
    try:
        assert while_it_loads == [200, 503]
        assert await probes() == [200, 200]
        with monkeypatch.context() as patch:
            patch.setattr(server.runtime.engine, "heartbeat_s", lambda: app.STUCK_S + 1)
            assert await probes() == [503, 503]
        server.runtime.table.is_draining = True
        assert await probes() == [200, 503]
    finally:
        await server.stop()


async def test_stuck_device_thread_is_neither_live_nor_ready(
    server: Server, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [await stubs.status(""), await stubs.status(READINESS)] == [SERVING, SERVING]
    monkeypatch.setattr(server.runtime.engine, "heartbeat_s", lambda: app.STUCK_S + 1)
    assert [await stubs.status(""), await stubs.status(READINESS)] == [NOT_SERVING, NOT_SERVING]


async def test_health_is_watched_through_a_drain(server: Server, stubs: Stubs) -> None:
    await stubs.layer.OpenSequences(ONE)
    watch = stubs.health.Watch(health_pb2.HealthCheckRequest(service=READINESS))
    assert (await watch.read()).status == SERVING
    server.drain()
    assert (await asyncio.wait_for(watch.read(), 30)).status == NOT_SERVING


@pytest.mark.parametrize(("adapter_bytes", "expected"), [(0, NOT_SERVING), (1 << 20, SERVING)])
async def test_health_of_adapters(make_server: Callable[..., Server], adapter_bytes: int, expected: int) -> None:
    server = make_server(adapter_bytes=adapter_bytes)
    async with server, grpc.aio.insecure_channel(server.address) as channel:
        stubs = Stubs(channel)
        assert await stubs.status("deltaline.v1.AdapterService") == expected
        server.drain()
        assert await stubs.status("deltaline.v1.AdapterService") == NOT_SERVING


async def test_reflection_names_the_services(stubs: Stubs) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [answer async for answer in stubs.reflection.ServerReflectionInfo(iter([request]))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {READINESS, "deltaline.v1.AdminService", "grpc.health.v1.Health"} <= names


async def test_server_tells_what_it_serves(server: Server, stubs: Stubs) -> None:
    info = await stubs.admin.GetServerInfo(admin_pb.GetServerInfoRequest())
    opened = await stubs.layer.OpenSequences(ONE)
    assert (info.server_epoch, info.model_type, info.hidden_size) == (opened.server_epoch, "qwen3_5_text", 32)
    assert [(span.first, span.count) for span in info.spans] == [(0, 2)]
    assert (info.device, info.max_draft_tokens, info.max_sequences) == ("cpu", 4, 8)
    assert info.sequence_state_bytes * (8 + 2 + 1) == server.runtime.pool.total_bytes


async def test_load_counts_open_sequences(stubs: Stubs) -> None:
    await stubs.layer.OpenSequences(pb.OpenSequencesRequest(count=3))
    load = await stubs.admin.GetLoad(admin_pb.GetLoadRequest())
    assert (load.sequences_open, load.lines_used, load.lines_total, load.draining) == (3, 3, 8, False)


# -- leases, drain, end ----------------------------------------------------------------------------------------------


async def test_lease_that_ran_out_frees_its_line(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltaline_server.app.LEASE_TICK_S", 0.02)
    async with make_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        stubs = Stubs(channel)
        opened = await stubs.layer.OpenSequences(pb.OpenSequencesRequest(count=8, lease_ms=30))
        for _ in range(3000):
            if not server.runtime.table.num_open:
                break
            await asyncio.sleep(0.01)
        assert await stubs.close(opened) == [pb.SEQUENCE_STATE_EXPIRED] * 8


async def test_drain_serves_open_sequences_and_no_new_ones(server: Server, stubs: Stubs) -> None:
    opened = await stubs.layer.OpenSequences(ONE)
    answer = await stubs.admin.Drain(admin_pb.DrainRequest(timeout_ms=60_000))
    assert answer.sequences_open == 1
    assert [await stubs.status(""), await stubs.status(READINESS)] == [SERVING, NOT_SERVING]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stubs.layer.OpenSequences(ONE)
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert "grpc-retry-pushback-ms" not in dict(caught.value.trailing_metadata() or ())
    over = asyncio.create_task(server.wait())
    await asyncio.sleep(0.1)
    assert not over.done()
    assert await stubs.close(opened) == [pb.SEQUENCE_STATE_CLOSED]
    assert await asyncio.wait_for(over, 30) == 0


async def test_open_is_repeated_during_a_drain(server: Server, stubs: Stubs) -> None:
    request = pb.OpenSequencesRequest(count=2, open_token=bytes(16))
    opened = await stubs.layer.OpenSequences(request)
    server.drain()
    assert await stubs.layer.OpenSequences(request) == opened
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stubs.layer.OpenSequences(pb.OpenSequencesRequest(count=2, open_token=bytes(15) + b"x"))
    assert reason_of(caught.value) == "DRAINING"


async def test_drain_is_over_when_its_time_is(server: Server, stubs: Stubs) -> None:
    await stubs.layer.OpenSequences(ONE)
    await stubs.admin.Drain(admin_pb.DrainRequest(timeout_ms=50))
    await stubs.admin.Drain(admin_pb.DrainRequest(timeout_ms=3_600_000))
    assert await asyncio.wait_for(server.wait(), 30) == 0


async def test_drain_longer_than_a_day_is_refused(stubs: Stubs) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stubs.admin.Drain(admin_pb.DrainRequest(timeout_ms=24 * 3600 * 1000 + 1))
    assert reason_of(caught.value) == "INVALID_REQUEST"


async def test_second_signal_stops_at_once(server: Server, stubs: Stubs) -> None:
    await stubs.layer.OpenSequences(ONE)
    server.interrupt()
    over = asyncio.create_task(server.wait())
    await asyncio.sleep(0.1)
    assert not over.done()
    server.interrupt()
    assert await asyncio.wait_for(over, 30) == 0


@pytest.mark.parametrize("what", ["device", "scheduler"])
async def test_lost_device_or_scheduler_ends_the_server_with_a_failure(
    server: Server, stubs: Stubs, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "device":
        monkeypatch.setattr(server.runtime.engine, "failed", lambda: True)
        assert await stubs.status(READINESS) == NOT_SERVING
    else:
        monkeypatch.setattr(server.runtime.scheduler, "has_failed", True)
    assert await asyncio.wait_for(server.wait(), 30) == 1


async def test_failed_reaper_ends_the_server_with_a_failure(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltaline_server.tables.sequences.SequenceTable.reap", lambda table: 1 / 0)
    monkeypatch.setattr("deltaline_server.app.LEASE_TICK_S", 0.01)
    async with make_server() as server:
        assert await asyncio.wait_for(server.wait(), 30) == 1


async def test_stopped_server_leaves_nothing_behind(make_server: Callable[..., Server]) -> None:
    async with make_server(metrics_port=0) as server:
        pass
    for port in (server.port, server.metrics_port):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)
    assert [task for task in asyncio.all_tasks() if task.get_name() in ("leases", "watch")] == []


async def test_what_is_loaded_is_frozen_before_anyone_is_served(
    model_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command's: its process is the server's alone."""
    told: list[bool] = []
    thresholds = gc.get_threshold()

    async def wait(server: Server) -> int:
        return 0

    class Watched(Server):
        async def start(self) -> None:
            await super().start()
            told.append(gc.get_freeze_count() > 0)

    monkeypatch.setattr(app, "Server", Watched)
    monkeypatch.setattr(Watched, "wait", wait)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        config = Config(random_init=model_file, device="cpu", port=0, metrics_port=-1, max_sequences=8)
        assert await __main__.serve(config) == 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
    assert told == [True]


async def test_unix_socket_serves_as_well(make_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "deltaline.sock"
    async with make_server(uds=str(path)), grpc.aio.insecure_channel(f"unix:{path}") as channel:
        assert await Stubs(channel).status(READINESS) == SERVING
        with pytest.raises(StartError, match=r"^--uds: another process listens on"):
            await make_server(uds=str(path)).start()


# -- start -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "named"), [("port", "--port"), ("metrics_port", "--metrics-port")])
async def test_port_in_use_is_told(make_server: Callable[..., Server], option: str, named: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartError) as caught:
        await make_server(**{option: taken.getsockname()[1]}).start()
    assert str(caught.value).startswith(named if option != "port" else f"--host, {named}")
    hint = f"(Address already in use): another server runs there; stop it, or give {named}"
    assert str(caught.value).endswith(hint)


async def test_a_start_that_fails_leaves_no_page_behind(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Runtime:
        raise StartError("planted")

    monkeypatch.setattr(Runtime, "build", fails)
    server = make_server(metrics_port=0)
    with pytest.raises(StartError, match="planted"):
        await server.start()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.metrics_port))


async def test_two_servers_do_not_share_a_port(server: Server, make_server: Callable[..., Server]) -> None:
    with pytest.raises(StartError, match="--port"):
        await make_server(port=server.port).start()


async def test_host_of_another_machine_is_told(make_server: Callable[..., Server]) -> None:
    with pytest.raises(StartError, match=r"--host.*Cannot assign requested address"):
        await make_server(host="203.0.113.1", insecure=True).start()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "0.0.0.0", "::"])
async def test_http_listens_where_grpc_does(make_server: Callable[..., Server], host: str) -> None:
    def reached(port: int) -> set[str]:
        found = set()
        for address in ("127.0.0.1", "::1"):
            with suppress(OSError), socket.create_connection((address, port), timeout=60):
                found.add(address)
        return found

    try:
        server = make_server(host=host, insecure=True, metrics_port=0)
        await server.start()
    except StartError:
        if ":" not in host:
            raise
        pytest.skip("this machine has no IPv6")
    try:
        grpc_at, http_at = [await asyncio.to_thread(reached, port) for port in (server.port, server.metrics_port)]
        assert grpc_at == http_at != set()
    finally:
        await server.stop()


async def test_slow_protobuf_is_refused(make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_implementation, "Type", lambda: "python")
    with pytest.raises(StartError, match="upb"):
        await make_server().start()


async def test_state_that_does_not_fit_is_refused(make_server: Callable[..., Server]) -> None:
    with pytest.raises(ModelError, match="--state-bytes"):
        await make_server(state_bytes=1000).start()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
async def test_a_folder_of_states_is_one_server_s(make_server: Callable[..., Server], tmp_path: Path) -> None:
    options = {"state_dir": str(tmp_path / "states"), "state_dir_bytes": 1 << 20, "host_state_bytes": 1 << 16}
    server = make_server(**options)
    await server.start()
    with pytest.raises(ModelError, match="--state-dir: expected a folder of one server, another uses it"):
        await make_server(**options).start()
    await server.stop()
    again = make_server(**options)
    await again.start()
    await again.stop()


async def test_absent_device_is_told(make_server: Callable[..., Server]) -> None:
    with pytest.raises(ModelError, match="--device"):
        await make_server(device="cuda").start()


async def test_first_batch_that_fails_ends_the_start(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltaline_server.models.model.Model.forward", lambda *_: 1 / 0)
    with pytest.raises(ModelError, match="first batch"):
        await make_server().start()
    assert "device" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    """The command takes those of its process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run_main(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["deltaline-server", *argv])
    monkeypatch.setattr("deltaline_server.log.configure", lambda level, format: None)
    return __main__.main()


def test_check_accepts_a_sound_model(
    monkeypatch: pytest.MonkeyPatch, model_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "--check", "--random-init", model_file) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_check_says_when_nobody_can_read_it(
    monkeypatch: pytest.MonkeyPatch, model_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with TextIOWrapper(FileIO("/dev/full", "w"), write_through=True) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run_main(monkeypatch, "--check", "--random-init", model_file) == 1
    written = "deltaline-server: error: can't write to standard output (No space left on device)\n"
    assert capsys.readouterr().err == written


@pytest.mark.parametrize(
    "argv",
    [["--layers", "0:9"], ["--spans", "0:2,1:2"], ["--port", "x"], ["--state-bytes", "1KiB"]],
    ids=lambda argv: argv[0],
)
def test_check_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch, model_file: str, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert run_main(monkeypatch, "--check", "--random-init", model_file, *argv) == 1
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert captured.err.startswith(f"deltaline-server: error: {argv[0]}: ")


def test_check_looks_at_certificates(
    model_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = Authority(tmp_path).issue("server")
    argv = ["--check", "--random-init", model_file, "--tls-cert", str(pair.cert), "--tls-key"]
    assert run_main(monkeypatch, *argv, str(pair.key)) == 0
    assert run_main(monkeypatch, *argv, str(pair.cert)) == 1
    assert "error: --tls-cert, --tls-key: " in capsys.readouterr().err


@pytest.mark.parametrize("check", [["--check"], []])
@pytest.mark.parametrize(
    ("host_bytes", "named"),
    [(1_000_000, "--max-sequences, --snapshot-lines, --state-bytes"), (1000, "--layers, --adapter-slots")],
)
def test_more_than_the_host_has_is_refused_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
    model_file: str,
    capsys: pytest.CaptureFixture[str],
    check: list[str],
    host_bytes: int,
    named: str,
) -> None:
    monkeypatch.setattr(host, "host_bytes", lambda: host_bytes)
    monkeypatch.setattr(app.Server, "start", None)
    argv = ["--random-init", model_file, "--device", "cpu", "--max-sequences", "100"]
    assert run_main(monkeypatch, *argv, *check) == 1
    captured = capsys.readouterr()
    told = rf"{named}: expected at most {host_bytes} bytes, the memory of this host, got \d+: \d+ of state, "
    assert re.fullmatch(rf"deltaline-server: error: {told}\d+ of weights and 0 of adapter slots\n", captured.err)


@pytest.mark.parametrize(
    ("stored_bytes", "told"),
    [
        (2 << 30, "2147483648"),
        ((1 << 30) - 1000, r"\d+: \d+ of state, \d+ of weights and 0 of adapter slots, 1073740824 for stored states"),
    ],
    ids=["alone", "beside the model"],
)
def test_more_stored_states_than_the_host_has_are_refused_before_their_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    model_file: str,
    capsys: pytest.CaptureFixture[str],
    stored_bytes: int,
    told: str,
) -> None:
    monkeypatch.setattr(host, "host_bytes", lambda: 1 << 30)
    monkeypatch.setattr(app.Server, "start", None)
    argv = ["--random-init", model_file, "--device", "cpu", "--state-bytes", "100MiB"]
    assert run_main(monkeypatch, *argv, "--host-state-bytes", str(stored_bytes)) == 1
    expected = f"--host-state-bytes: expected at most {1 << 30} bytes, the memory of this host, got {told}"
    assert re.fullmatch(rf"deltaline-server: error: {expected}\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (ConfigError("--port: no"), "--port: no"),
        (ModelError("--model: no"), "--model: no"),
        (StartError("--uds: no"), "--uds: no"),
        (ZeroDivisionError("planted"), "the server ended by a fault of its own"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.usefixtures("restored_logging")
def test_what_ends_the_start_is_one_json_line_where_the_log_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: Exception, told: str
) -> None:
    async def serve(config: Config, place: object) -> int:
        raise fault

    monkeypatch.setattr(__main__, "serve", serve)
    monkeypatch.setattr(sys, "argv", ["deltaline-server", "--random-init", "x", "--log-format", "json"])
    assert __main__.main() == 1
    [line] = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["level"], line["message"]) == ("error", told)
    assert ("planted" in line.get("traceback", "")) == isinstance(fault, ZeroDivisionError)


@pytest.mark.usefixtures("restored_logging")
def test_a_refused_option_is_a_json_line_where_the_log_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["deltaline-server", "--bogus", "--log-format", "json"])
    assert __main__.main() == 1
    assert json.loads(capsys.readouterr().err)["message"] == "unrecognized arguments: --bogus"


@pytest.mark.parametrize(("flag", "looked_for"), [("--model", "/nowhere/config.json"), ("--random-init", "/nowhere")])
def test_absent_model_is_refused_by_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, looked_for: str
) -> None:
    assert run_main(monkeypatch, "--check", flag, "/nowhere") == 1
    assert f"error: {flag}: expected a file {looked_for}, found none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "is_file", "told"),
    [
        ("--model", True, "expected a directory, got the file"),
        ("--random-init", False, "expected a config.json, got a"),
    ],
)
def test_a_folder_for_its_file_and_a_file_for_its_folder_are_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model_file: str,
    flag: str,
    is_file: bool,
    told: str,
) -> None:
    folder = Path(model_file).parent
    assert run_main(monkeypatch, "--check", flag, model_file if is_file else str(folder)) == 1
    error = capsys.readouterr().err
    assert f"{flag}: {told} " in error
    assert error.endswith(f"; try {folder if is_file else folder / 'config.json'}\n")


def test_misspelt_variable_is_named_and_ignored(
    monkeypatch: pytest.MonkeyPatch, model_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DELTALINE_MAX_SEQENCES", "3")
    assert run_main(monkeypatch, "--check", "--random-init", model_file) == 0
    assert [(record.levelname, vars(record)["fields"]) for record in caplog.records] == [
        ("WARNING", {"names": "DELTALINE_MAX_SEQENCES"})
    ]


@pytest.mark.parametrize("package", ["grpc_health", "torch"])
def test_package_that_is_missing_is_named_in_one_line(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from deltaline_server import __main__; sys.exit(__main__.main())"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"deltaline-server: error: {package} is missing: pip install 'deltaline[server]'\n"


def test_an_interrupt_while_torch_is_imported_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-m", "deltaline_server"], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_command_serves_until_a_signal_and_exits_with_0(model_file: str) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "DELTALINE_LOG_FORMAT": "json"}
    environ.pop("GRPC_VERBOSITY", None)
    argv = ["--random-init", model_file, "--device", "cpu", "--port", "0", "--metrics-port", "-1"]
    command = [sys.executable, "-m", "deltaline_server", *argv]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        events = [json.loads(process.stderr.readline()) for _ in range(4)]
        assert [event["message"] for event in events] == ["loading", "loaded", "prepared", "ready"]
        assert (events[-1]["tls"], events[-1]["principals"]) == ("none", "none")
        assert all(events[1][stage] >= 0 for stage in ("weights_s", "kernels_s", "state_s"))
        port = events[-1]["address"].rpartition(":")[2]
        refused = subprocess.run([*command, "--port", port], env=environ, capture_output=True, text=True)
        assert "another server runs there" in json.loads(refused.stderr)["message"]  # and gRPC adds no line
        process.send_signal(signal.SIGTERM)
        rest = [json.loads(line) for line in process.stderr]
        assert process.wait(60) == 0
        assert [event["message"] for event in rest] == ["drain began", "drain over", "stopped"]
        assert rest[0]["second_signal"] == "stops at once"
