"""What the audit is told of calls: who, what and how much; never tensors, tokens or handles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from rigs.layer_calls import make_step, refused
from rigs.principals import entry, headers, write_principals

from deltaline.v1 import adapter_service_pb2 as adapters
from deltaline.v1 import adapter_service_pb2_grpc, admin_service_pb2_grpc, layer_service_pb2_grpc
from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.app import Server, StartError


async def test_the_audit_has_who_did_what(make_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    options = {"audit_log": str(path), "shared_memory_bytes": 1 << 20, "drain_timeout_s": 600.0}
    async with make_server(**options) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        other: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
        opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=2, open_token=b"sixteen secrets!"))
        await stub.Step(make_step(opened))
        await other.CreateSharedMemory(admin.CreateSharedMemoryRequest(size_bytes=4096))
        await refused(stub.OpenSequences(pb.OpenSequencesRequest(count=100)))
        await refused(adapter_service_pb2_grpc.AdapterServiceStub(channel).ListAdapters(adapters.ListAdaptersRequest()))
        await other.Drain(admin.DrainRequest(timeout_ms=60_000))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["principal"] for line in lines} == {"anonymous"}
    assert all(line["client"].startswith("ipv4:127.0.0.1:") for line in lines)
    wanted = ("message", "count", "size_bytes", "timeout_ms", "method", "reason")
    assert [[line[name] for name in wanted if name in line] for line in lines] == [
        ["opened", 2],
        ["shared memory", 4096],
        ["refused", "/deltaline.v1.LayerService/OpenSequences", "INVALID_REQUEST"],
        ["refused", "/deltaline.v1.AdapterService/ListAdapters", "ADAPTERS_OFF"],
        ["drained", 60_000],
    ]
    text = path.read_text()
    assert "secrets" not in text and not any(str(handle) in text for handle in opened.sequence)


async def test_who_was_refused_is_told_where_it_is_known(make_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = write_principals(tmp_path / "p.toml", entry("a", "step"))
    async with (
        make_server(audit_log=str(path), principals=file) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
        for metadata in (headers("a"), headers("a", "wrong")):
            await refused(stub.Drain(admin.DrainRequest(), metadata=metadata))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["reason"], line["principal"]) for line in lines] == [
        ("ROLE_MISSING", "a"),
        ("CREDENTIALS_UNKNOWN", ""),
    ]


async def test_a_file_that_cannot_be_written_ends_the_start(make_server: Callable[..., Server], tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^--audit-log: can't write .* \(No such file or directory\)$"):
        async with make_server(audit_log=str(tmp_path / "none" / "audit")):
            pass
