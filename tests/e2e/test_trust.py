"""Principals end to end: who may call what, that nobody sees what is another's, and tokens that change while clients
step."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status
from rigs.authority import Authority
from rigs.principals import digest_of, entry, headers, token_of, write_principals
from rigs.raw_link import raw_link
from rigs.served import served
from rigs.target import reason_of
from rigs.until import until

from deltaline import link
from deltaline.v1 import adapter_service_pb2, admin_service_pb2, layer_service_pb2, state_service_pb2
from deltaline.v1.adapter_service_pb2_grpc import AdapterServiceStub
from deltaline.v1.admin_service_pb2_grpc import AdminServiceStub
from deltaline.v1.layer_service_pb2_grpc import LayerServiceStub
from deltaline_cli import main
from deltaline_client import AsyncClient, Client, CredentialsUnknown, NoFreeLines, QuotaExceeded, Retry, Unavailable
from deltaline_server import app
from deltaline_server.app import Server

ONCE = Retry(max_attempts=1)
CLIENTS, HIDDEN = 8, 64
ROLES = ("step", "adapter", "admin", "peer")
STEP, ADAPTER, ANY, EVERYBODY = {"step"}, {"adapter", "admin"}, set(ROLES), None
INVALID, OK = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OK
# Who may call a method, and what becomes of an empty message then.
EXPECTED: dict[str, tuple[set[str] | None, grpc.StatusCode]] = {
    "OpenSequences": (STEP, INVALID),
    "CloseSequences": (STEP, INVALID),
    "DescribeSequences": (STEP, INVALID),
    "RenewLeases": (STEP, INVALID),
    "Step": (STEP, INVALID),
    "CommitSequences": (STEP, INVALID),
    "StepStream": (STEP, OK),
    "ForkSequences": (STEP, INVALID),
    "CreateSnapshots": (STEP, INVALID),
    "RestoreSequences": (STEP, INVALID),
    "FindSnapshots": (STEP, INVALID),
    "ListSnapshots": (STEP, OK),
    "RenewSnapshots": (STEP, INVALID),
    "ReleaseSnapshots": (STEP, INVALID),
    "ExportState": (STEP, grpc.StatusCode.FAILED_PRECONDITION),
    "ImportState": (STEP | {"peer"}, grpc.StatusCode.FAILED_PRECONDITION),
    "MoveSequences": (STEP, INVALID),
    "LoadAdapter": (ADAPTER, INVALID),
    "UnloadAdapter": (ADAPTER, grpc.StatusCode.NOT_FOUND),
    "ListAdapters": (ANY, OK),
    "GetServerInfo": (ANY, OK),
    "GetLoad": (ANY, OK),
    "CreateSharedMemory": (STEP, INVALID),
    "ReleaseSharedMemory": (STEP, OK),
    "Drain": ({"admin"}, INVALID),
    "Check": (EVERYBODY, OK),
    "Watch": (EVERYBODY, OK),
    "List": (EVERYBODY, grpc.StatusCode.UNIMPLEMENTED),
    "ServerReflectionInfo": (ANY, OK),
}
BODIES = {"Drain": admin_service_pb2.DrainRequest(timeout_ms=2**60).SerializeToString()}
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in (
        *(layer_service_pb2, state_service_pb2, adapter_service_pb2, admin_service_pb2),
        *(health_pb2, reflection_pb2),
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, watched: None) -> None:
    """What this process imports, its front ends do; files are looked at often."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(app, "RELOAD_TICK_S", 0.02)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "principals.toml"


@asynccontextmanager
async def serving(
    make_server: Callable[..., Server], file: Path, *entries: Any, **options: Any
) -> AsyncIterator[Server]:
    """A server that knows these principals."""
    path = write_principals(file, *entries)
    async with make_server(principals=path, **({"link": "off"} | options)) as server:
        yield server


async def reach(*clients: AsyncClient) -> None:
    """Connect clients that try everything once: on a busy machine that takes more."""
    for client in clients:
        while True:
            with suppress(Unavailable):
                await client.info()
                break


async def status_of(channel: Any, path: str, metadata: Any) -> grpc.StatusCode:
    """What becomes of a call with an empty message, or a stream of none."""
    method, body = METHODS[path], BODIES.get(path.rpartition("/")[2], b"")
    call: Any
    if method.client_streaming:
        many = channel.stream_stream if method.server_streaming else channel.stream_unary
        call = many(path)(metadata=metadata, timeout=60)
        await call.done_writing()
    else:
        one = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = one(path)(body, metadata=metadata, timeout=60)
    try:
        if not method.server_streaming:
            await call
        elif await call.read() is not grpc.aio.EOF:  # a watch goes on
            call.cancel()
            return OK
        code: grpc.StatusCode = await call.code()
        return code
    except grpc.aio.AioRpcError as failure:
        return failure.code()


def expected(path: str, roles: Iterable[str] | None) -> grpc.StatusCode:
    """The status of a call by who has these roles; None for somebody who is not known."""
    allowed, status = EXPECTED[METHODS[path].name]
    if allowed is EVERYBODY or (roles is not None and allowed & set(roles)):
        return status
    return grpc.StatusCode.UNAUTHENTICATED if roles is None else grpc.StatusCode.PERMISSION_DENIED


def differing(found: dict[Any, grpc.StatusCode], wanted: dict[Any, grpc.StatusCode]) -> dict[Any, Any]:
    return {key: (found[key], wanted[key]) for key in wanted if found[key] != wanted[key]}


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("front_ends", [0, 1], ids=["core", "front end"])
async def test_every_method_for_every_role_and_token(
    make_server: Callable[..., Server], file: Path, front_ends: int
) -> None:
    known = [entry(role, role) for role in ROLES] + [entry("nothing"), entry("all", *ROLES)]
    options = {"adapter_bytes": 1 << 20, "shared_memory_bytes": 1 << 20, "front_ends": front_ends}
    async with (
        serving(make_server, file, *known, entry("removed", *ROLES), **options) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        path = "/deltaline.v1.AdminService/GetLoad"
        assert await status_of(channel, path, headers("removed")) is OK
        write_principals(file, *known)
        await until(lambda: server.principals.generation == 1)
        callers: dict[str, tuple[Any, Iterable[str] | None]] = {
            **{f"right {one['name']}": (headers(one["name"]), one["roles"]) for one in known},
            **{f"wrong {role}": (headers(role, token_of(role) + "x"), None) for role in ROLES},
            "removed": (headers("removed"), None),
            "no": ((), None),
            "the digest": (headers("all", digest_of(token_of("all"))), None),
            "basic": ((("authorization", f"Basic {token_of('all')}"),), None),
        }
        found, wanted = {}, {}
        for path in METHODS:
            for caller, (metadata, roles) in callers.items():
                found[path, caller] = await status_of(channel, path, metadata)
                wanted[path, caller] = expected(path, roles)
    assert not differing(found, wanted)
    assert len(found) == len(METHODS) * len(callers)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("front_ends", [0, 1], ids=["core", "front end"])
async def test_every_method_for_every_role_and_certificate(
    make_server: Callable[..., Server], file: Path, tmp_path: Path, front_ends: int
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    names = {role: [f"{role}.example.org"] for role in ROLES} | {
        "other": ["other.example.org"],
        "step": ["spiffe://example.org/step"],
    }
    known = [entry(role, role, tokens=[], identities=names[role]) for role in ROLES]
    known.append(entry("by token", "admin", tokens=["t"]) | {"name": "by-token"})
    tls = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(authority.ca)}
    options = {"adapter_bytes": 1 << 20, "front_ends": front_ends}
    found: dict[Any, grpc.StatusCode] = {}
    wanted: dict[Any, grpc.StatusCode] = {}
    async with serving(make_server, file, *known, **tls, **options) as server:
        for role in names:
            own = authority.issue(role, *names[role])
            credentials = grpc.ssl_channel_credentials(
                authority.ca.read_bytes(), own.key.read_bytes(), own.cert.read_bytes()
            )
            async with grpc.aio.secure_channel(server.address, credentials) as channel:
                for path in METHODS:
                    found[path, role] = await status_of(channel, path, ())
                    wanted[path, role] = expected(path, [role] if role in ROLES else None)
                    # A token goes before the certificate, right or wrong.
                    found[path, role, "token"] = await status_of(channel, path, headers("", "t"))
                    wanted[path, role, "token"] = expected(path, ["admin"])
                    found[path, role, "wrong token"] = await status_of(channel, path, headers("", "u"))
                    wanted[path, role, "wrong token"] = expected(path, None)
    # This server shares no memory: that is said to who may ask.
    for key in wanted:
        if key[0].endswith("CreateSharedMemory") and wanted[key] is INVALID:
            wanted[key] = grpc.StatusCode.FAILED_PRECONDITION
    assert not differing(found, wanted)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("front_ends", [0, 1], ids=["core", "front end"])
async def test_a_certificate_proves_whole_names_of_one_principal(
    make_server: Callable[..., Server], file: Path, tmp_path: Path, front_ends: int
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    known = (
        entry("a", "step", tokens=[], identities=["a.example.org", "spiffe://example.org/a"]),
        entry("b", "step", tokens=[], identities=["b.example.org"]),
    )
    tls = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(authority.ca)}
    nobody = grpc.StatusCode.UNAUTHENTICATED
    expected = {
        ("a.example.org", "other.example.org"): OK,
        ("spiffe://example.org/a", "a.example.org"): OK,
        ("a.example.org\0.evil.org",): nobody,
        ("spiffe://example.org/a\0/evil",): nobody,
        ("spiffe://example.org/a", "spiffe://example.org/other"): nobody,
        ("*.example.org",): nobody,
        ("A.example.org",): nobody,
        ("a.example.org", "b.example.org"): nobody,
    }
    found = {}
    async with serving(make_server, file, *known, **tls, front_ends=front_ends) as server:
        for names in expected:
            own = authority.issue("client", *names)
            credentials = grpc.ssl_channel_credentials(
                authority.ca.read_bytes(), own.key.read_bytes(), own.cert.read_bytes()
            )
            async with grpc.aio.secure_channel(server.address, credentials) as channel:
                found[names] = await status_of(channel, "/deltaline.v1.AdminService/GetLoad", ())
    assert found == expected


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("role", [*ROLES, None])
async def test_every_method_for_a_user_of_the_link(
    make_server: Callable[..., Server], file: Path, tmp_path: Path, role: str | None
) -> None:
    path = str(tmp_path / "run" / "link.sock")
    mine = entry("mine", *([] if role is None else [role]), uids=[os.geteuid() if role else os.geteuid() + 1])
    found, wanted = {}, {}
    options = {"adapter_bytes": 1 << 20, "shared_memory_bytes": 1 << 20}
    async with serving(make_server, file, mine, entry("all", *ROLES), link=path, **options), raw_link(path) as raw:
        for method in METHODS:
            if method.endswith("Watch"):
                continue
            is_stream = METHODS[method].client_streaming
            for caller, roles, metadata in (
                ("the user", None if role is None else [role], None),
                ("a token", ROLES, headers("all")),
                ("a wrong token", None, headers("all", "wrong")),
            ):
                flags = link.LAST | (link.EMPTY if is_stream else 0)
                body = BODIES.get(METHODS[method].name, b"")
                await raw.begin(method, body, flags=flags, metadata=metadata)
                packet = await raw.receive()
                assert packet is not None
                code = packet.status.code if packet.kind == link.STATUS else 0
                found[method, caller] = next(one for one in grpc.StatusCode if one.value[0] == code)
                wanted[method, caller] = expected(method, roles)
    assert not differing(found, wanted)


@pytest.mark.parametrize("device", ["cpu"])
async def test_why_a_call_is_not_let_in(make_server: Callable[..., Server], file: Path) -> None:
    async with (
        serving(make_server, file, entry("a", "step")) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        for metadata, reason, told in (
            ((), "CREDENTIALS_MISSING", {}),
            (headers("a", "wrong"), "CREDENTIALS_UNKNOWN", {}),
            (headers("a"), "ROLE_MISSING", {"principal": "a", "roles": "admin"}),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await AdminServiceStub(channel).Drain(admin_service_pb2.DrainRequest(), metadata=metadata)
            details = dict(refused.value.trailing_metadata() or ())["grpc-status-details-bin"]
            status, info = status_pb2.Status.FromString(details), error_details_pb2.ErrorInfo()
            assert status.details[0].Unpack(info)
            assert (info.reason, dict(info.metadata)) == (reason, told)
            assert token_of("a") not in str(refused.value)


# -- ownership -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu"])
async def test_what_is_anothers_is_what_never_was(make_server: Callable[..., Server], file: Path) -> None:
    known = entry("alice", "step"), entry("bob", "step")
    async with (
        serving(make_server, file, *known, shared_memory_bytes=1 << 20) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        layers: Any = LayerServiceStub(channel)
        admin: Any = AdminServiceStub(channel)
        alice, bob = headers("alice"), headers("bob")
        opened = await layers.OpenSequences(layer_service_pb2.OpenSequencesRequest(count=1), metadata=alice)
        region = await admin.CreateSharedMemory(
            admin_service_pb2.CreateSharedMemoryRequest(size_bytes=4096), metadata=alice
        )
        never = layer_service_pb2.OpenSequencesResponse(
            server_epoch=opened.server_epoch, sequence=[opened.sequence[0] ^ (1 << 40)]
        )

        async def answers(names: Any, metadata: Any) -> list[bytes]:
            about = {"server_epoch": names.server_epoch, "sequence": names.sequence}
            calls = (
                layers.DescribeSequences(layer_service_pb2.DescribeSequencesRequest(**about), metadata=metadata),
                layers.RenewLeases(layer_service_pb2.RenewLeasesRequest(**about), metadata=metadata),
                layers.CommitSequences(
                    layer_service_pb2.CommitSequencesRequest(**about, step=[1], accepted=[1]), metadata=metadata
                ),
                layers.CloseSequences(layer_service_pb2.CloseSequencesRequest(**about), metadata=metadata),
            )
            told = [await call for call in calls]
            for one in told[0].sequences:
                one.sequence = 0
            return [one.SerializeToString() for one in told]

        assert await answers(opened, bob) == await answers(never, bob) == await answers(never, alice)
        release = admin_service_pb2.ReleaseSharedMemoryRequest(region=region.region)
        await admin.ReleaseSharedMemory(release, metadata=bob)
        assert server.runtime.regions.has(region.region)
        await admin.ReleaseSharedMemory(release, metadata=alice)
        assert not server.runtime.regions.has(region.region)
        assert (await answers(opened, alice))[3] != (await answers(never, alice))[3]


@pytest.mark.parametrize("device", ["cpu"])
async def test_who_guesses_handles_is_slowed_alone(make_server: Callable[..., Server], file: Path) -> None:
    async with (
        serving(make_server, file, entry("alice", "step"), entry("bob", "step"), max_sequences=64) as server,
        AsyncClient(server.address, token=token_of("alice"), retry=ONCE) as alice,
    ):
        await reach(alice)
        sequence = await alice.open()
        async with grpc.aio.insecure_channel(server.address) as channel:
            layers: Any = LayerServiceStub(channel)
            epoch = server.runtime.table.server_epoch
            refused = 0
            for number in range(1, 40):
                guesses = [(number * 64 + i) << 24 | i for i in range(64)]
                request = layer_service_pb2.DescribeSequencesRequest(server_epoch=epoch, sequence=guesses)
                try:
                    await layers.DescribeSequences(request, metadata=headers("bob"))
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    refused += 1
            assert refused >= 15
        await sequence.decode(np.ones(HIDDEN, np.float32))


@pytest.mark.parametrize("device", ["cpu"])
async def test_a_quota_is_told_and_others_have_theirs(make_server: Callable[..., Server], file: Path) -> None:
    known = entry("alice", "step", quotas={"sequences": 2}), entry("bob", "step")
    async with (
        serving(make_server, file, *known, max_sequences=6) as server,
        AsyncClient(server.address, token=token_of("alice"), retry=ONCE) as alice,
        AsyncClient(server.address, token=token_of("bob"), retry=ONCE) as bob,
    ):
        await reach(alice, bob)
        await alice.open_many(2)
        with pytest.raises(QuotaExceeded) as exceeded:
            await alice.open()
        assert exceeded.value.metadata == {"quota": "sequences", "limit": "2", "used": "2", "asked": "1"}
        await bob.open_many(4)
        with pytest.raises(NoFreeLines):
            await bob.open()


@pytest.mark.parametrize("device", ["cpu"])
async def test_uploads_that_come_at_once_are_held_to_one_quota(make_server: Callable[..., Server], file: Path) -> None:
    known = [entry(name, "adapter", quotas={"adapter_bytes": 1000}) for name in ("alice", "bob")]
    upload = adapter_service_pb2.AdapterUpload(config=b"{}", tensors_bytes=800)
    first = adapter_service_pb2.LoadAdapterRequest(name="a", upload=upload)
    async with (
        serving(make_server, file, *known, adapter_bytes=1 << 20) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub: Any = AdapterServiceStub(channel)

        async def why_not(name: str) -> str:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.LoadAdapter(iter([first]), metadata=headers(name), timeout=60)
            status = rpc_status.from_call(refused.value)
            assert status is not None
            return reason_of(status)

        stalled = stub.LoadAdapter(metadata=headers("alice"), timeout=60)
        await stalled.write(first)
        async with asyncio.timeout(60):
            while await why_not("alice") != "QUOTA_EXCEEDED":
                pass  # the other has not come in yet
        assert await why_not("bob") == "INVALID_REQUEST", "fewer bytes than announced"
        stalled.cancel()
        async with asyncio.timeout(60):
            while await why_not("alice") != "INVALID_REQUEST":
                pass


# -- tokens that change ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("front_ends", [0, 1], ids=["core", "front end"])
async def test_tokens_rotate_under_clients_that_step(
    make_server: Callable[..., Server], file: Path, tmp_path: Path, front_ends: int
) -> None:
    tokens, path = [f"token-{i}" for i in range(4)], tmp_path / "token"
    path.write_text(tokens[0])
    is_over, steps = asyncio.Event(), [0] * CLIENTS

    async def step(number: int, address: str) -> None:
        async with AsyncClient(address, token_file=path, retry=ONCE) as client:
            await reach(client)
            sequence = await client.open()
            while not is_over.is_set():
                await sequence.decode(np.ones(HIDDEN, np.float32))
                steps[number] += 1

    async def all_step() -> None:
        before = list(steps)
        await until(lambda: all(now >= then + 2 for now, then in zip(steps, before, strict=True)) or stepping.done())

    async with serving(make_server, file, entry("a", "step", tokens=tokens[:1]), front_ends=front_ends) as server:
        stepping = asyncio.gather(*(step(number, server.address) for number in range(CLIENTS)))
        await all_step()
        for old, new in pairwise(tokens):
            for digests in ([old, new], [new]):
                generation = server.principals.generation
                write_principals(file, entry("a", "step", tokens=digests))
                await until(lambda generation=generation: server.principals.generation > generation)  # type: ignore[misc]
                if len(digests) == 2:
                    beside = tmp_path / "new"
                    beside.write_text(new)
                    beside.rename(path)
                await all_step()
        is_over.set()
        await stepping
        assert server.principals.generation == 6
        assert not server.metrics.registry.get_sample_value(
            "deltaline_refused_total", {"reason": "CREDENTIALS_UNKNOWN"}
        )


@pytest.mark.parametrize("device", ["cpu"])
async def test_a_token_that_is_taken_out_ends_its_stream_and_nothing_else(
    make_server: Callable[..., Server], file: Path
) -> None:
    async with (
        serving(make_server, file, entry("a", "step", tokens=["old", "new"])) as server,
        AsyncClient(server.address, token="old", retry=ONCE) as old,
        AsyncClient(server.address, token="new", retry=ONCE) as new,
    ):
        await reach(old, new)
        theirs, mine = await old.open(), await new.open()
        hidden = np.ones(HIDDEN, np.float32)
        first = await theirs.decode(hidden)
        assert (await mine.decode(hidden)).tolist() == first.tolist()
        write_principals(file, entry("a", "step", tokens=["new"]))
        await until(lambda: server.principals.generation == 1)
        with pytest.raises(CredentialsUnknown):
            await theirs.decode(hidden)
        with pytest.raises(CredentialsUnknown):
            await old.open()
        await mine.decode(hidden)
        assert theirs.position == 1
        assert server.runtime.table.num_open == 2, "a sequence's life is its lease"


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("kind", [Client, AsyncClient], ids=["sync", "async"])
@pytest.mark.parametrize("way", ["grpc", "link"])
async def test_a_client_takes_the_token_that_its_file_has_now(
    make_server: Callable[..., Server], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, way: str
) -> None:
    """By the link too, where the client's tensors lie in memory of its connection."""
    socket, path, names = str(tmp_path / "run" / "link.sock"), tmp_path / "token", list[str]()
    async with serving(make_server, file, entry("a", "step", tokens=["old", "new"]), link=socket) as server:
        path.write_text("old")
        lookup = server.runtime.table.lookup

        def noted(*arguments: Any) -> Any:
            names.append(arguments[2].name)
            return lookup(*arguments)

        monkeypatch.setattr(server.runtime.table, "lookup", noted)
        address = server.address if way == "grpc" else f"link:{socket}"
        client = kind(address, token_file=path, shared_memory_bytes=1 << 20 if way == "link" else 0)

        async def do(call: Callable[[], Any]) -> Any:
            return await call() if kind is AsyncClient else await asyncio.to_thread(call)

        assert not (await do(client.info)).is_linked or way == "link"
        sequence = await do(client.open)
        hidden = await do(lambda: client.empty((1, HIDDEN)))
        hidden[:] = 1
        await do(lambda: sequence.decode(hidden[0]))
        path.write_text("new ")
        await do(lambda: sequence.decode(hidden[0]))
        write_principals(file, entry("a", "step", tokens=["new"]))
        await until(lambda: server.principals.generation == 1)
        await do(lambda: sequence.decode(hidden[0]))
        assert sequence.position == 3 and set(names) == {"a"}
        await do(client.disconnect)


@pytest.mark.parametrize("device", ["cpu"])
def test_the_command_shows_its_token_and_tells_it_nobody(
    make_server: Callable[..., Server],
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    token, path = token_of("ops"), tmp_path / "token"
    path.write_text(token)
    with served(make_server(principals=write_principals(file, entry("ops", "admin")), link="off")) as address:
        assert main.main(["load", address]) == 1
        assert "expected a token" in capsys.readouterr().err
        assert main.main(["load", address, "--token-file", str(path)]) == 0
        monkeypatch.setenv("DELTALINE_TOKEN", token)
        assert main.main(["load", address]) == 0
        path.write_text("another")
        assert main.main(["load", address, "--token-file", str(path)]) == 1, "the file goes before the environment"
        with pytest.raises(SystemExit):
            main.main(["load", "--help"])
    told = capsys.readouterr()
    assert token not in told.out + told.err
