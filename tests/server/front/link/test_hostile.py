"""Peers that break the link's rules: their connection ends with a reason, and nothing else changes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import random
import resource
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from rigs.raw_link import RawLink, connected_socket, raw_link
from rigs.until import until

from deltaline import link
from deltaline_client import AsyncClient, Retry
from deltaline_server.app import Server
from deltaline_server.front.link import listener
from deltaline_server.front.link.call import Call
from deltaline_server.front.trust.peer import Peer

INFO = b"/deltaline.v1.AdminService/GetServerInfo"
STREAM = b"/deltaline.v1.LayerService/StepStream"
CALL = link.pack(link.CALL, 1, flags=link.LAST, method=INFO)


@pytest.fixture
async def server(server: Server) -> AsyncIterator[Server]:
    """A server with a sequence that is stepped all the time, as if nobody did anything to other connections."""
    token, outputs, is_over = np.ones(32, np.float32), list[Any](), asyncio.Event()
    async with AsyncClient(f"link:{server.link.path}", retry=Retry(max_attempts=1)) as client:
        witness, twin = await client.open_many(2)

        async def step() -> None:
            while not is_over.is_set():
                outputs.append(await witness.decode(token))
                await asyncio.sleep(0.01)

        stepping = asyncio.create_task(step())
        await until(lambda: len(outputs) > 1)
        files = len(os.listdir("/proc/self/fd"))
        yield server
        await until(lambda: server.link.num_connections == 1)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= files)
        await until(lambda: server.runtime.link_regions.used_bytes == 0)  # a lease tick unmaps
        is_over.set()
        await stepping
        for output in outputs:
            np.testing.assert_array_equal(output, await twin.decode(token))
        server.runtime.table.check_integrity()


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"x", "expected an envelope of 24 bytes, got 1"),
        (CALL[:30], "expected 64 bytes, as the envelope says, got 30"),
        (link.pack(0, 1), "expected a packet of a client, got the kind 0"),
        (link.pack(link.WELCOME, 1), "expected a packet of a client, got the kind 6"),
        (link.pack(link.TAKEN, 1, amount=1), "expected a packet of a client, got the kind 8"),
        (link.pack(255, 1), "expected a packet of a client, got the kind 255"),
        (link.pack(link.CALL, 0), "expected a call's number above 0, got 0"),
        (link.pack(link.MESSAGE, 7), "expected a call that has begun, got 7"),
        (link.pack(link.CANCEL, 7), "expected a call that has begun, got 7"),
        (link.pack(link.ROOM, 7) + bytes(24), "expected a call that has begun, got 7"),
        (link.pack(link.MEMORY, 1), "expected a place of 24 bytes, got 0"),
        (link.pack(link.CALL, 1, flags=link.PLACED, method=INFO) + b"x", "expected a place of 24 bytes, got 1"),
        (link.pack(link.CALL, 1, method=INFO, metadata=b"\xff\0x"), "expected metadata in UTF-8"),
        (link.pack(link.CALL, 1, method=INFO, metadata=b"name"), "expected a value for each name of the metadata"),
        (link.ENVELOPE.pack(link.CALL, 0, 0, 0, 5, 1, 0) + b"admin", "expected no asserted client on a socket"),
    ],
)
async def test_a_packet_that_is_none_ends_its_connection(raw: RawLink, packet: bytes, why: str) -> None:
    await raw.send(packet)
    assert why in await raw.goodbye()


WHOLE = [
    link.pack(link.CALL, 2, flags=link.LAST, method=INFO, metadata=b"name\0value"),
    link.pack(link.CALL, 2, flags=link.LAST | link.PLACED, method=INFO) + link.Place(0, 0, 64).packed(),
    link.pack(link.MESSAGE, 1, flags=link.PLACED) + link.Place(0, 0, 64).packed(),
    link.pack(link.MEMORY, 2) + link.Place(0, 0, 64).packed(),
    link.pack(link.ROOM, 1) + link.Place(0, 0, 64).packed(),
]


@pytest.mark.parametrize("whole", WHOLE, ids=["call", "placed call", "message", "memory", "room"])
async def test_a_packet_that_is_cut_anywhere_ends_its_connection_in_words(server: Server, whole: bytes) -> None:
    for size in range(1, len(whole)):
        async with raw_link(server.link.path) as raw:
            await raw.begin(STREAM.decode(), flags=link.EMPTY)
            await raw.send(whole[:size])
            assert (await raw.goodbye()).startswith("expected ")


async def test_too_large_a_packet_ends_its_connection(raw: RawLink) -> None:
    await raw.send(bytes(link.MAX_PACKET_BYTES + 1))
    assert await raw.goodbye() == f"expected packets of at most {link.MAX_PACKET_BYTES} bytes"


@pytest.mark.parametrize("packet", [CALL, b"", b"x", link.pack(link.MEMORY, 1), bytes(link.MAX_PACKET_BYTES + 1)])
@pytest.mark.parametrize("count", [1, 253])
async def test_descriptors_are_not_taken(raw: RawLink, packet: bytes, count: int) -> None:
    read, write = os.pipe()
    await raw.send(packet, [write] * count)
    os.close(write)
    assert "expected no descriptors" in await raw.goodbye()
    os.set_blocking(read, False)
    assert os.read(read, 1) == b""  # nobody else has the other end
    os.close(read)


@pytest.mark.parametrize(
    ("packets", "why"),
    [
        ([link.pack(link.CALL, 1, method=STREAM, flags=link.EMPTY)] * 2, "expected a call's number above 1, got 1"),
        (
            [link.pack(link.CALL, 1, method=STREAM, flags=link.EMPTY), link.pack(link.ROOM, 1) + bytes(24)],
            "expected no room for a reply of call 1, which asked for none",
        ),
    ],
)
async def test_packets_out_of_turn_end_the_connection(raw: RawLink, packets: list[bytes], why: str) -> None:
    for packet in packets:
        await raw.send(packet)
    assert why in await raw.goodbye()


def test_messages_behind_the_last_or_beyond_the_window_are_refused() -> None:
    line: Any = None
    call, full = (Call(line, number, None, (), 0, Peer("client"), line, False) for number in (1, 2))
    call.add(b"", is_last=True)
    with pytest.raises(link.LinkError, match="expected nothing more for call 1, which had its last message"):
        call.add(b"", is_last=False)
    for _ in range(link.STREAM_MESSAGES):
        full.add(b"", is_last=False)
    with pytest.raises(link.LinkError, match="expected at most 64 messages that are not taken"):
        full.add(b"", is_last=False)


@pytest.mark.parametrize("seed", range(4))
async def test_random_bytes_harm_nobody(server: Server, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        with suppress(OSError):
            connected = connected_socket(server.link.path)
            with connected:
                for _ in range(rng.randrange(1, 6)):
                    head = bytes([rng.randrange(0, 12), rng.randrange(0, 8)])
                    lengths = b"".join(rng.choice([0, 3, 40]).to_bytes(2, "little") for _ in range(3))
                    numbers = rng.randrange(0, 4).to_bytes(8, "little") + rng.randbytes(8)
                    body = rng.choice([b"", INFO, STREAM, rng.randbytes(24), rng.randbytes(500)])
                    await asyncio.to_thread(connected.send, rng.choice([head + lengths + numbers + body, body or b"x"]))
    async with raw_link(server.link.path) as raw:
        assert await raw.call(INFO.decode())
    await until(lambda: server.link.num_connections == 1)


async def test_memory_that_is_not_the_clients_is_refused(raw: RawLink) -> None:
    for place in (link.Place(5, 0, 64), link.Place(2**64 - 1, 2**64 - 1, 2**64 - 1), link.Place(0, 0, 2**63)):
        await raw.begin(INFO.decode(), place.packed(), flags=link.LAST | link.PLACED)
        assert await raw.given_back() == place
        packet = await raw.receive()
        assert packet is not None and packet.status.code in (3, 8)
    place, fd = await raw.memory(4096)
    os.close(fd)
    for wrong in (place._replace(offset=4096, size=64), place._replace(size=4097), place._replace(offset=1, size=8)):
        await raw.begin(INFO.decode(), wrong.packed(), flags=link.LAST | link.PLACED)
        assert await raw.given_back() == wrong
        packet = await raw.receive()
        assert packet is not None and packet.status.code == 3 and "place" in packet.status.message


@pytest.mark.parametrize("count", [2 * listener.MAX_CONNECTIONS, pytest.param(10_000, marks=pytest.mark.sweep)])
async def test_connections_beyond_the_most_are_turned_away_and_leave_nothing(server: Server, count: int) -> None:
    at_once = min(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
    while count > 0:
        held, greeted = list[socket.socket](), 0
        for _ in range(at_once):
            held.append(await asyncio.to_thread(connected_socket, server.link.path))
        for connected in held:
            first = await asyncio.to_thread(connected.recv, link.MAX_PACKET_BYTES)
            greeted += first[0] == link.WELCOME
            if first[0] == link.GOODBYE:
                assert first[link.ENVELOPE.size :] == b"the server has 256 connections, which is the most"
        assert greeted == min(at_once, listener.MAX_CONNECTIONS - 1)  # one is the witness's
        for connected in held:
            connected.close()
        await until(lambda: server.link.num_connections == 1)
        count -= at_once


async def test_another_user_is_turned_away(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    raw = RawLink(await asyncio.to_thread(connected_socket, server.link.path))
    assert await raw.goodbye() == "this server's link is for its own user"
    raw.close()


def connect_as(uid: int, path: str) -> bytes:
    """The first packet that a thread of another user gets. Raises PermissionError."""
    answers = list[bytes | OSError]()

    def connect() -> None:
        answers.append(OSError())
        # The system's call, for this thread alone; the C library's is for the process.
        if ctypes.CDLL(None).syscall({"x86_64": 117, "aarch64": 147}[platform.machine()], uid, uid, uid) == 0:
            try:
                with connected_socket(path) as connected:
                    answers[0] = connected.recv(link.MAX_PACKET_BYTES)
            except OSError as error:
                answers[0] = error

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    if isinstance(answers[0], OSError):
        raise answers[0]
    return answers[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has threads of other users")
async def test_the_kernel_and_then_the_server_keep_other_users_out(make_server: Callable[..., Server]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        async with make_server(link=f"{folder}/run/link.sock") as server:
            path = server.link.path
            with pytest.raises(PermissionError):
                await asyncio.to_thread(connect_as, 12_345, path)
            os.chmod(os.path.dirname(path), 0o711)
            with pytest.raises(PermissionError):
                await asyncio.to_thread(connect_as, 12_345, path)
            os.chmod(path, 0o666)
            goodbye = await asyncio.to_thread(connect_as, 12_345, path)
            assert goodbye == link.pack(link.GOODBYE) + b"this server's link is for its own user"
            assert (await asyncio.to_thread(connect_as, 0, path))[0] == link.WELCOME


async def test_the_group_s_users_are_served(
    make_server: Callable[..., Server], link_option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grp

    group = grp.getgrgid(os.getegid()).gr_name
    async with make_server(link=link_option, link_group=group) as server:
        assert os.stat(server.link.path).st_mode & 0o777 == 0o660
        assert os.stat(os.path.dirname(server.link.path)).st_mode & 0o777 == 0o750
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
        async with raw_link(server.link.path) as raw:
            assert await raw.call(INFO.decode())
        monkeypatch.undo()


async def test_memory_for_a_client_that_hears_nothing_is_given_back(server: Server) -> None:
    async with raw_link(server.link.path) as raw:
        await until(lambda: server.link.num_connections == 2)
        raw.socket.shutdown(socket.SHUT_RD)  # it can still be heard
        await raw.send(link.pack(link.MEMORY, 1) + link.Place(0, 0, 1 << 20).packed())
        await until(lambda: server.link.num_connections == 1)
