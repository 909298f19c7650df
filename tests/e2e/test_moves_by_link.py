"""Sequences that are moved by the local link of a server on this host: its memory carries what is large."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from e2e.conftest import server_of
from e2e.test_moves import pair, reasons, refused_target
from e2e.test_state_files import HOST, folder_of
from rigs.layer_calls import reason_of
from rigs.link_proxy import LinkProxy
from rigs.move_faults import Clock, live_through
from rigs.moved_sequences import DECODE, PREFILL, Calls, all_kinds
from rigs.principals import entry, headers, write_principals
from rigs.small_models import HYBRID
from rigs.until import until

from deltaline.link_socket import connect
from deltaline_server.app import Server
from deltaline_server.errors import shown
from deltaline_server.moving import ways
from deltaline_server.snapshots import exchange


@asynccontextmanager
async def linked_pair(
    tmp_path: Path, model: dict[str, Any] = HYBRID, of_target: Any = None, **options: Any
) -> AsyncIterator[tuple[Server, Server]]:
    """Two servers, of which the first may move sequences to the second by its link alone."""
    path = folder_of(tmp_path, "run") / "link.sock"
    path.parent.chmod(0o700)
    there = {"link": str(path), "advertise": "127.0.0.1", **(of_target or {})}
    options = {"page_size": 16, "move_peers": f"link:{path}", **options}
    async with pair(tmp_path, model, of_target=there, **options) as (source, target):
        yield source, target


def link_of(server: Server) -> str:
    return f"link:{server.link.path}"


async def test_a_sequence_and_its_pages_go_by_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "AHEAD_BYTES", 200_000)  # files that a packet has no room for, several of them
    async with linked_pair(tmp_path) as (source, target), Calls() as calls:
        one, twin = await calls.open(source.address, 2)
        for each in (one, twin):
            await each.step(PREFILL, 2000)
        assert not reasons(await calls.move([one], link_of(target))) and one.address == target.address
        assert source.runtime.mover.bytes_ahead > 2000 // 16 * 16 * 256 > 2 * 200_000
        assert await all_kinds(one) == await all_kinds(twin)


async def test_a_target_with_little_link_memory_takes_moves_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "AHEAD_BYTES", 200_000)
    async with linked_pair(tmp_path, of_target={"link_memory_bytes": 10 << 20}) as (source, target), Calls() as calls:
        one, twin = await calls.open(source.address, 2)
        for each in (one, twin):
            await each.step(PREFILL, 2000)
        assert not reasons(await calls.move([one], link_of(target))) and one.address == target.address
        assert await all_kinds(one) == await all_kinds(twin)


@pytest.mark.parametrize("num_bytes", [0, 1 << 20], ids=["none", "too little"])
async def test_a_target_that_has_no_link_memory_takes_moves_in_packets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """The first move finds that out, and goes once more; the others know it, as they go by the same connection."""
    made = list[str]()

    def counted(path: str) -> Any:
        made.append(path)
        return connect(path)

    monkeypatch.setattr(ways, "connect", counted)
    monkeypatch.setattr(exchange, "AHEAD_BYTES", 200_000)
    async with linked_pair(tmp_path, of_target={"link_memory_bytes": num_bytes}) as (source, target), Calls() as calls:
        one, twin, other = await calls.open(source.address, 3)
        for each in (one, twin, other):
            await each.step(PREFILL, 2000)
        for each in (one, other):
            assert not reasons(await calls.move([each], link_of(target))) and each.address == target.address
        assert await all_kinds(one) == await all_kinds(twin)
        assert len(made) == 2 and source.runtime.mover.num_failed == 0


@pytest.mark.parametrize(
    ("num_bytes", "why"),
    [
        (0, "this server shares no memory"),
        (1 << 20, r"0 of 1048576 bytes .* of shared memory are in use, \d+ bytes more"),
    ],
    ids=["none", "too little"],
)
async def test_why_a_target_gives_no_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_bytes: int, why: str
) -> None:
    """To who asks for a move, and of a drain in the log."""
    monkeypatch.setattr(ways, "PACKET_CHUNK_BYTES", ways.CHUNK_BYTES)
    async with linked_pair(tmp_path, of_target={"link_memory_bytes": num_bytes}) as (source, target), Calls() as calls:
        [one] = await calls.open(source.address)
        await one.step(PREFILL, 2000)
        [refused] = (await calls.move([one], link_of(target))).row_status
        assert reason_of(refused.status) == "MOVE_FAILED"
        told = f"did not answer as it should: no link memory is to be had: {why}"
        assert re.search(told, refused.status.message)
        with caplog.at_level(logging.INFO):
            source.runtime.drain.begin(30.0, link_of(target))
            await until(lambda: "sequences moved" in caplog.text)
        [fields] = [vars(each)["fields"] for each in caplog.records if each.getMessage() == "sequences moved"][:1]
        assert (fields["failed"], fields["reasons"]) == (1, "MOVE_FAILED:1") and re.search(told, fields["why"])
        await one.step(DECODE)


async def test_a_connection_stays_for_the_next_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make its memory takes as long as to send some tens of MB."""
    made = list[str]()

    def counted(path: str) -> Any:
        made.append(path)
        return connect(path)

    monkeypatch.setattr(ways, "connect", counted)
    async with linked_pair(tmp_path) as (source, target), Calls() as calls:
        for one in await calls.open(source.address, 2):
            await one.step(PREFILL, 40)
            assert not reasons(await calls.move([one], link_of(target)))
        assert len(made) == 1


async def test_a_link_that_is_not_listed_or_nobody_s_is_refused(tmp_path: Path) -> None:
    nobody = f"link:{tmp_path}/none.sock"
    async with linked_pair(tmp_path, move_peers=nobody) as (source, target), Calls() as calls:
        [one] = await calls.open(source.address)
        await refused_target(calls, one, nobody, f"{nobody} can't be reached, or does not prove who it is")
        for address in (link_of(target), target.address):
            why = f"expected one of this server's --move-peers, got {shown(address)}"
            await refused_target(calls, one, address, why)


async def test_who_comes_by_the_link_needs_the_role_too(tmp_path: Path) -> None:
    here = write_principals(tmp_path / "here.toml", entry("a", "step"))
    there = tmp_path / "there.toml"
    write_principals(there, entry("a", "step"), entry("us", "step", uids=[os.getuid()]))
    options: Any = {"principals": here, "of_target": {"principals": str(there)}}
    async with linked_pair(tmp_path, **options) as (source, target), Calls(metadata=headers("a")) as calls:
        [one] = await calls.open(source.address)
        await one.step(PREFILL, 40)
        assert reasons(await calls.move([one], link_of(target))) == {0: "MOVE_TARGET_REFUSED"}
        await one.step(DECODE)


async def test_who_comes_by_the_link_with_the_role_moves_for_others(tmp_path: Path) -> None:
    here = write_principals(tmp_path / "here.toml", entry("a", "step"))
    there = write_principals(tmp_path / "there.toml", entry("a", "step"), entry("us", "peer", uids=[os.getuid()]))
    options: Any = {"principals": here, "of_target": {"principals": there}}
    async with linked_pair(tmp_path, **options) as (source, target), Calls(metadata=headers("a")) as calls:
        [one] = await calls.open(source.address)
        await one.step(PREFILL, 40)
        assert not reasons(await calls.move([one], link_of(target)))


@pytest.mark.parametrize("rounds", [8, pytest.param(400, marks=[pytest.mark.sweep, pytest.mark.timeout(1800)])])
async def test_links_that_break_leave_one_owner(tmp_path: Path, rounds: int) -> None:
    random, num_moved, clock = Random(rounds), 0, Clock()
    # The first ends before the other server has said who it is; each second one lasts for some moves.
    of_one, of_some = (2, 14), (30, 90)
    lives = (random.randrange(*(of_some if number % 2 else of_one)) if number else 2 for number in range(10**6))
    folder_of(tmp_path, "run").chmod(0o700)
    options = {"page_size": 16, **HOST}
    there = options | {"link": str(tmp_path / "run" / "link.sock"), "advertise": "127.0.0.1"}
    target = server_of(HYBRID, folder_of(tmp_path, "target"), "cpu", **there)
    async with Server(target.config, clock=clock) as target, Calls() as calls:
        with LinkProxy(tmp_path / "run", str(tmp_path / "run" / "link.sock"), lives) as proxy:
            address = f"link:{proxy.path}"
            async with server_of(HYBRID, tmp_path, "cpu", link="off", move_peers=address, **options) as source:
                for _ in range(rounds):
                    num_tokens = random.choice((5, 50))
                    what = await live_through(calls, source, target, clock, random, address, num_tokens)
                    num_moved += what[0]
                    assert what[1] <= 1 - what[0], "one copy, however often it was asked for"
            assert proxy.kills >= 1 and 0 < num_moved < rounds
