"""The server's life: start, readiness, leases, drain, loss of the device, and the command's exit codes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.internal import api_implementation
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from deltaline.v1 import admin_service_pb2 as admin_pb
from deltaline.v1 import admin_service_pb2_grpc, layer_service_pb2_grpc
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_kernels.selftest.run import Check
from deltaline_kernels.selftest.run import run_selftest as kernels_selftest
from deltaline_server import __main__, app
from deltaline_server.app import Server, StartError
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.shapes import AttentionShape, GatedDeltaNetShape, Mamba2Shape
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models import kernel_check

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


async def test_started_server_is_live_and_ready(stubs: Stubs) -> None:
    assert [await stubs.status(""), await stubs.status(READINESS)] == [SERVING, SERVING]


async def test_unknown_service_has_no_health(stubs: Stubs) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stubs.status("nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_stuck_device_thread_is_neither_live_nor_ready(
    server: Server, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.runtime.engine, "heartbeat_s", lambda: app.STUCK_S + 1)
    assert [await stubs.status(""), await stubs.status(READINESS)] == [NOT_SERVING, NOT_SERVING]


async def test_health_is_watched_through_a_drain(server: Server, stubs: Stubs) -> None:
    await stubs.layer.OpenSequences(ONE)
    watch = stubs.health.Watch(health_pb2.HealthCheckRequest(service=READINESS))
    assert (await watch.read()).status == SERVING
    server.drain()
    assert (await asyncio.wait_for(watch.read(), 1)).status == NOT_SERVING


@pytest.mark.parametrize(("adapter_bytes", "expected"), [(0, NOT_SERVING), (1 << 20, SERVING)])
async def test_health_of_adapters(make_server: Callable[..., Server], adapter_bytes: int, expected: int) -> None:
    server = make_server(adapter_bytes=adapter_bytes)
    async with server, grpc.aio.insecure_channel(server.address) as channel:
        stubs = Stubs(channel)
        assert await stubs.status("deltaline.v1.AdapterService") == expected
        server.drain()
        assert await stubs.status("deltaline.v1.AdapterService") == NOT_SERVING


async def test_the_log_tells_what_the_slots_of_adapters_take(
    make_server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        async with make_server(adapter_bytes=1 << 20, adapter_slots=3, max_adapter_rank=2) as server:
            store = server.runtime.model.adapters
    assert store is not None and store.total_bytes > 0
    [loaded] = [record for record in caplog.records if record.getMessage().startswith("loaded")]
    assert f"{store.total_bytes}" in f"{loaded.getMessage()} {vars(loaded)}"


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
    assert info.sequence_state_bytes * 9 == server.runtime.pool.total_bytes


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
        await asyncio.sleep(0.3)
        assert await stubs.close(opened) == [pb.SEQUENCE_STATE_EXPIRED] * 8


async def test_drain_serves_open_sequences_and_no_new_ones(server: Server, stubs: Stubs) -> None:
    opened = await stubs.layer.OpenSequences(ONE)
    answer = await stubs.admin.Drain(admin_pb.DrainRequest(timeout_ms=60_000))
    assert answer.sequences_open == 1
    assert [await stubs.status(""), await stubs.status(READINESS)] == [SERVING, NOT_SERVING]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stubs.layer.OpenSequences(ONE)
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert "grpc-retry-pushback-ms" in dict(caught.value.trailing_metadata() or ())
    over = asyncio.create_task(server.wait())
    await asyncio.sleep(0.1)
    assert not over.done()
    assert await stubs.close(opened) == [pb.SEQUENCE_STATE_CLOSED]
    assert await asyncio.wait_for(over, 1) == 0


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
    assert await asyncio.wait_for(server.wait(), 1) == 0


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
    assert await asyncio.wait_for(over, 1) == 0


async def test_lost_device_ends_the_server_with_a_failure(
    server: Server, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.runtime.engine, "failed", lambda: True)
    assert await stubs.status(READINESS) == NOT_SERVING
    assert await asyncio.wait_for(server.wait(), 1) == 1


async def test_failed_reaper_ends_the_server_with_a_failure(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltaline_server.tables.sequences.SequenceTable.reap", lambda table: 1 / 0)
    monkeypatch.setattr("deltaline_server.app.LEASE_TICK_S", 0.01)
    async with make_server() as server:
        assert await asyncio.wait_for(server.wait(), 1) == 1


async def test_stopped_server_leaves_nothing_behind(make_server: Callable[..., Server]) -> None:
    async with make_server(metrics_port=0) as server:
        pass
    for port in (server.port, server.metrics_port):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)
    assert [task for task in asyncio.all_tasks() if task.get_name() in ("leases", "watch")] == []


async def test_unix_socket_serves_as_well(make_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "deltaline.sock"
    async with make_server(uds=str(path)), grpc.aio.insecure_channel(f"unix:{path}") as channel:
        assert await Stubs(channel).status(READINESS) == SERVING


# -- start -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "named"), [("port", "--port"), ("metrics_port", "--metrics-port")])
async def test_port_in_use_is_told(make_server: Callable[..., Server], option: str, named: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartError) as caught:
        await make_server(**{option: taken.getsockname()[1]}).start()
    assert str(caught.value).startswith(named if option != "port" else f"--host, {named}")
    hint = f"(Address already in use): another server runs there; stop it, or give {named}"
    assert str(caught.value).endswith(hint)


async def test_host_of_another_machine_is_told(make_server: Callable[..., Server]) -> None:
    with pytest.raises(StartError, match=r"--host.*Cannot assign requested address"):
        await make_server(host="203.0.113.1").start()


async def test_slow_protobuf_is_refused(make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_implementation, "Type", lambda: "python")
    with pytest.raises(StartError, match="upb"):
        await make_server().start()


async def test_state_that_does_not_fit_is_refused(make_server: Callable[..., Server]) -> None:
    with pytest.raises(ModelError, match="--state-bytes"):
        await make_server(state_bytes=1000).start()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
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


def test_kernels_that_differ_from_their_reference_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("norm, decode", 1e-6, 1e-5), Check("conv1d, decode", 0.5, 1e-5)]
    monkeypatch.setattr(kernel_check, "run_selftest", lambda *_, **__: checks)
    with pytest.raises(ModelError, match=r"device: conv1d, decode: error 0\.5, limit 1e-05$"):
        kernel_check.check_kernels(
            torch.device("cpu"), torch.float32, GatedDeltaNetShape(1, 1, 8, 8, 4), StateOptions(1, 1), {}
        )


def test_kernels_are_checked_in_the_sizes_that_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: dict[str, Any] = {}

    def run_selftest(device: torch.device, dtype: torch.dtype, **sizes: Any) -> list[Check]:
        checked.update(sizes, dtype=dtype)
        return []

    monkeypatch.setattr(kernel_check, "run_selftest", run_selftest)
    options = StateOptions(1, 5, state_dtype=torch.bfloat16)
    streams = {"streams": 4, "hidden": 128}
    kernel_check.check_kernels(torch.device("cpu"), torch.float16, GatedDeltaNetShape(2, 6, 16, 8, 3), options, streams)
    assert checked == {
        "num_key_heads": 2,
        "num_value_heads": 6,
        "key_dim": 16,
        "value_dim": 8,
        "conv_width": 3,
        "max_draft": 5,
        "state_dtype": torch.bfloat16,
        "dtype": torch.float16,
        "streams": 4,
        "hidden": 128,
    }


def test_the_kernels_of_a_mamba2_model_are_checked_in_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    families: set[str] = set()

    def run_selftest(*inputs: Any, **sizes: Any) -> list[Check]:
        assert (sizes["num_key_heads"], sizes["num_value_heads"]) == (2, 4)
        assert (sizes["key_dim"], sizes["value_dim"], sizes["conv_width"], sizes["max_draft"]) == (16, 8, 3, 5)
        assert (sizes["norm_groups"], sizes["dt_limit"], sizes["has_conv_bias"]) == (1, (0.1, math.inf), True)
        checks = kernels_selftest(*inputs, **sizes)
        families.update(check.name.split(",")[0] for check in checks)
        return checks

    monkeypatch.setattr(kernel_check, "run_selftest", run_selftest)
    shape = Mamba2Shape(2, 4, 16, 8, 3, 1, (0.1, math.inf), has_conv_bias=True, has_bias=False)
    kernel_check.check_kernels(torch.device("cpu"), torch.float32, shape, StateOptions(1, 5), {})
    assert families == {"conv1d", "mamba2", "lora", "norm"}


def test_the_kernels_of_attention_are_checked_in_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: dict[str, Any] = {}

    def run_selftest(*inputs: Any, **sizes: Any) -> list[Check]:
        checked.update(sizes)
        return kernels_selftest(*inputs, **sizes)

    monkeypatch.setattr(kernel_check, "run_selftest", run_selftest)
    shape = AttentionShape(6, 2, 32, 8, 1e4, 512)
    kernel_check.check_kernels(torch.device("cpu"), torch.float32, shape, StateOptions(1, 5, page_size=32), {})
    assert checked == {
        "recurrence": "attention",
        "num_key_heads": 2,
        "num_value_heads": 6,
        "key_dim": 32,
        "value_dim": 32,
        "rotary_dim": 8,
        "page_size": 32,
        "max_draft": 5,
        "state_dtype": torch.float32,
    }


def run_main(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["deltaline-server", *argv])
    monkeypatch.setattr("deltaline_server.log.configure", lambda level, format: None)
    return __main__.main()


def test_check_accepts_a_sound_model(
    monkeypatch: pytest.MonkeyPatch, model_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "--check", "--random-init", model_file) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--layers", "0:9"],
        ["--spans", "1:3"],
        ["--spans", "0:2,1:2"],
        ["--port", "x"],
        ["--state-bytes", "1KiB"],
        ["--uds", "/nowhere/deltaline.sock"],
        ["--uds", f"/tmp/{'x' * 103}"],
    ],
    ids=lambda argv: " ".join(argv)[:40],
)
def test_check_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch, model_file: str, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert run_main(monkeypatch, "--check", "--random-init", model_file, *argv) == 1
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert captured.err.startswith(f"deltaline-server: error: {argv[0]}: ")


@pytest.mark.parametrize(("flag", "looked_for"), [("--model", "/nowhere/config.json"), ("--random-init", "/nowhere")])
def test_absent_model_is_refused_by_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, looked_for: str
) -> None:
    assert run_main(monkeypatch, "--check", flag, "/nowhere") == 1
    assert f"error: {flag}: expected a file {looked_for}, found none" in capsys.readouterr().err


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
    code = f"import sys; sys.modules[{package!r}] = None; from deltaline_server import __main__"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"deltaline-server: error: {package} is missing: pip install 'deltaline[server]'\n"


def test_command_serves_until_a_signal_and_exits_with_0(model_file: str) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "DELTALINE_LOG_FORMAT": "json"}
    argv = ["--random-init", model_file, "--device", "cpu", "--port", "0", "--metrics-port", "-1"]
    command = [sys.executable, "-m", "deltaline_server", *argv]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        events = [json.loads(process.stderr.readline()) for _ in range(4)]
        assert [event["message"] for event in events] == ["loading", "loaded", "prepared", "ready"]
        check = [sys.executable, "-m", "deltaline_cli", "health"]
        assert subprocess.run([*check, events[3]["address"]], env=environ, capture_output=True).returncode == 0
        process.send_signal(signal.SIGTERM)
        rest = [json.loads(line) for line in process.stderr]
        assert process.wait(10) == 0
        assert [event["message"] for event in rest] == ["drain began", "drain over", "stopped"]
        assert rest[0]["second_signal"] == "stops at once"
    assert subprocess.run([*check, events[3]["address"]], env=environ, capture_output=True).returncode == 1
