"""Who may move a sequence where, whose it is there, and what servers prove to each other."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e.conftest import server_of
from e2e.test_moves import num_calls, pair, reasons
from e2e.test_state_files import HOST, folder_of
from rigs.authority import Authority
from rigs.layer_calls import reason_of, refused, status_of
from rigs.moved_sequences import DECODE, PREFILL, Calls
from rigs.principals import entry, headers, token_of, write_principals
from rigs.small_models import GATED_DELTA_NET

from deltaline.v1 import layer_service_pb2 as pb


@pytest.fixture
def token(tmp_path: Path) -> str:
    """The file of the token of the server that moves sequences away."""
    path = tmp_path / "token"
    path.write_text(token_of("source") + "\n")
    return str(path)


async def test_a_moved_sequence_is_the_same_principal_s(tmp_path: Path, token: str) -> None:
    known = write_principals(
        tmp_path / "p.toml", entry("first", "step"), entry("a", "step"), entry("b", "step"), entry("source", "peer")
    )
    here = write_principals(tmp_path / "here.toml", entry("a", "step"), entry("b", "step"), entry("guest", "step"))
    options: Any = {"principals": here, "of_target": {"principals": known}, "move_token_file": token}
    async with (
        pair(tmp_path, **options) as (source, target),
        Calls(metadata=headers("a")) as calls,
        Calls(metadata=headers("b")) as others,
        Calls(metadata=headers("guest")) as guests,
    ):
        [one], [guest] = await calls.open(source.address), await guests.open(source.address)
        await one.step(PREFILL, 3)
        mine = (one.address, one.epoch, one.handle)
        [stolen] = await others.open(source.address)
        stolen.handle = one.handle
        assert reasons(await others.move([stolen], target.address)) == {0: "SEQUENCE_UNKNOWN"}
        assert source.metrics.registry.get_sample_value("deltaline_unknown_handles_total") == 1
        assert reasons(await calls.move([one], target.address)) == {}
        last = await one.again()
        stolen.address, stolen.epoch, stolen.handle = one.address, one.epoch, one.handle
        assert (await stolen.state())[0] == pb.SEQUENCE_STATE_UNKNOWN
        stolen.address, stolen.epoch, stolen.handle = mine
        assert (await stolen.state())[0] == pb.SEQUENCE_STATE_UNKNOWN, "nobody else is told where it lives"
        assert last and reasons(await guests.move([guest], target.address)) == {0: "STATE_MISMATCH"}
        await guest.step(DECODE)


@pytest.mark.parametrize("content", ["", "a\nb", "t\xf6ken"], ids=["empty", "two lines", "not ASCII"])
async def test_a_file_that_has_no_token_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content, encoding="utf-8")
    async with pair(tmp_path, move_token_file=str(path)) as (source, target), Calls() as calls:
        [one] = await calls.open(source.address)
        error = await refused(calls.move([one], target.address))
        assert reason_of(status_of(error)) == "MOVE_TARGET_REFUSED" and target.runtime.table.num_open == 0
        await one.step(PREFILL, 3)


@pytest.mark.parametrize("roles", [("step", "adapter", "admin"), None], ids=["no peer", "not known"])
async def test_a_target_takes_states_of_others_from_peers_alone(
    tmp_path: Path, token: str, roles: tuple[str, ...] | None
) -> None:
    entries = [entry("a", "step"), entry("b", "step")] + ([] if roles is None else [entry("source", *roles)])
    principals = write_principals(tmp_path / "p.toml", *entries)
    async with (
        pair(tmp_path, principals=principals, move_token_file=token) as (source, target),
        Calls(metadata=headers("a")) as calls,
    ):
        [one] = await calls.open(source.address)
        if roles is None:
            error = await refused(calls.move([one], target.address))
            assert reason_of(status_of(error)) == "MOVE_TARGET_REFUSED"
        else:
            assert reasons(await calls.move([one], target.address)) == {0: "MOVE_TARGET_REFUSED"}
        await one.step(DECODE)
        assert target.runtime.table.num_open == 0


@pytest.mark.parametrize("of", ["the same", "another", "another for clients"])
async def test_servers_know_each_other_by_certificate(tmp_path: Path, of: str) -> None:
    ours, other = Authority(tmp_path), Authority(tmp_path, "other")
    names = ("127.0.0.1", "server.example")
    target_pair, source_pair = (
        (other if of == "another" else ours).issue("target", *names),
        (other if of == "another for clients" else ours).issue("source", *names),
    )
    client = ours.issue("client", "a.example")
    principals = write_principals(
        tmp_path / "p.toml",
        entry("a", "step", tokens=[], identities=["a.example"]),
        entry("server", "peer", tokens=[], identities=["server.example"]),
    )
    common = {"link": "off", "principals": principals, "tls_client_ca": str(ours.ca), **HOST}
    async with AsyncExitStack() as stack:
        of_target = {"tls_cert": str(target_pair.cert), "tls_key": str(target_pair.key), **common}
        target = await stack.enter_async_context(
            server_of(GATED_DELTA_NET, folder_of(tmp_path, "two"), "cpu", **of_target)
        )
        of_source = {"tls_cert": str(source_pair.cert), "tls_key": str(source_pair.key), **common}
        of_source["move_peers"] = target.address
        source = await stack.enter_async_context(
            server_of(GATED_DELTA_NET, folder_of(tmp_path, "one"), "cpu", **of_source)
        )
        roots = ours.ca.read_bytes() + other.ca.read_bytes()
        credentials = grpc.ssl_channel_credentials(roots, client.key.read_bytes(), client.cert.read_bytes())
        calls = await stack.enter_async_context(Calls(credentials))
        [one] = await calls.open(source.address)
        await one.step(PREFILL, 3)
        if of == "the same":
            assert reasons(await calls.move([one], target.address)) == {}
            assert one.address == target.address
        else:
            error = await refused(calls.move([one], target.address))
            assert reason_of(status_of(error)) == "MOVE_TARGET_REFUSED"
            assert num_calls(target) == 0
        await one.step(DECODE)
