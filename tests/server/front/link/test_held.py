"""What messages make the server hold: each counts until its handler is done with it, wherever it came from."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from deltaline import link
from deltaline_server.front.link.connection import Connection, Served
from deltaline_server.front.link.held import Held
from deltaline_server.front.link.methods import IN_PLACE
from deltaline_server.front.trust.peer import Peer
from deltaline_server.memory.lent import Lent

SIZE = 50_000
[LENT] = IN_PLACE


class Rig:
    """A connection whose calls wait: those of `one` with the one message that they have, those of `all` for more, and
    those of LENT too, which keep what they are lent."""

    def __init__(self) -> None:
        self.may_end, self.num_read, self.num_copied = asyncio.Event(), 0, 0
        handlers: dict[bytes, Any] = {
            b"one": grpc.unary_unary_rpc_method_handler(self._one),
            b"all": grpc.stream_unary_rpc_method_handler(self._all),
            LENT: grpc.stream_unary_rpc_method_handler(self._all),
        }
        self.lent: list[Lent] = []
        nothing: Any = SimpleNamespace(
            copy_out=self._copy_out, view=lambda *place: memoryview(b""), refused=lambda reason, count: None
        )
        self.held = Held(4 * SIZE)
        buffer = memoryview(bytearray(link.MAX_PACKET_BYTES))
        served = Served(handlers.get, nothing, self.held, nothing, 1, 1 << 20, buffer)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.socket, theirs):
            end.setblocking(False)
        self.ends: list[Connection] = []
        self.connection = Connection(served, theirs, Peer("peer"), self.ends.append)
        self.connection.start()

    def _copy_out(self, region: int, offset: int, size: int, owner: str) -> bytes:
        self.num_copied += 1
        return bytes(size)

    async def _one(self, body: bytes, context: Any) -> bytes:
        self.num_read += 1
        await self.may_end.wait()
        return b""

    async def _all(self, _: Any, context: Any) -> bytes:
        while (message := await context.read()) is not grpc.aio.EOF:
            self.num_read += 1
            if isinstance(message, Lent):
                self.lent.append(message)
        return b""

    def send(self, kind: int, call: int, method: bytes = b"", *, is_placed: bool, is_last: bool = False) -> None:
        """Send a message of SIZE bytes."""
        body = link.Place(1, 0, SIZE).packed() if is_placed else bytes(SIZE)
        flags = (link.PLACED if is_placed else 0) | (link.LAST if is_last else 0)
        self.socket.send(link.pack(kind, call, flags=flags, method=method) + body)

    def places_back(self) -> int:
        """How many places have come back since this was asked last."""
        count = 0
        with suppress(BlockingIOError):
            while True:
                envelope = link.read(memoryview(self.socket.recv(link.MAX_PACKET_BYTES)))
                count += envelope.kind == link.TAKEN and envelope.flags == link.PLACED
        return count

    async def turns(self) -> None:
        """Let the loop go on until nothing is left to do."""
        for _ in range(50):
            await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    made.connection.end("")
    made.socket.close()
    await made.turns()
    assert made.held.num_bytes == 0 and not made.held.shares


@pytest.mark.parametrize("is_placed", [True, False])
async def test_a_message_counts_until_its_handler_ends(rig: Rig, is_placed: bool) -> None:
    for number in (1, 2, 3):
        rig.send(link.CALL, number, b"one", is_placed=is_placed, is_last=True)
        await rig.turns()
    assert (rig.num_read, rig.held.num_bytes) == (3, 3 * SIZE)
    rig.may_end.set()
    await rig.turns()
    assert rig.held.num_bytes == 0 and rig.ends == []


@pytest.mark.parametrize("is_placed", [True, False])
async def test_of_a_stream_the_message_in_hand_counts(rig: Rig, is_placed: bool) -> None:
    for count in range(1, 9):
        rig.send(link.CALL if count == 1 else link.MESSAGE, 1, b"all" if count == 1 else b"", is_placed=is_placed)
        await rig.turns()
        assert (rig.num_read, rig.held.num_bytes) == (count, 0)  # it asked for another


async def test_what_is_lent_counts_until_it_is_given_back(rig: Rig) -> None:
    for number in (1, 2, 3):
        rig.send(link.CALL if number == 1 else link.MESSAGE, 1, LENT if number == 1 else b"", is_placed=True)
    await rig.turns()
    assert (len(rig.lent), rig.num_copied, rig.held.num_bytes) == (3, 0, 3 * SIZE)
    for _ in range(2):  # once counts
        rig.lent[1].give_back()
    assert rig.held.num_bytes == 2 * SIZE and rig.places_back() == 1
    rig.send(link.CANCEL, 1, is_placed=False)
    await rig.turns()
    assert rig.held.num_bytes == 0 and rig.places_back() == 2


async def test_who_has_too_much_in_hand_is_ended_before_more_is_copied(rig: Rig) -> None:
    for number in range(1, 7):
        rig.send(link.CALL, number, b"one", is_placed=True, is_last=True)
    await rig.turns()
    assert (rig.num_read, rig.num_copied) == (4, 4)
    assert rig.ends == [rig.connection] and rig.held.num_bytes == 0


def test_who_left_holds_nothing_and_nobody_is_ended_for_it() -> None:
    ends = list[str]()
    held = Held(100)
    left, stays = held.join(ends.append), held.join(ends.append)
    left.take(60)
    left.leave()
    left.take(90)  # what has begun goes on for a while
    stays.take(60)
    left.give_back(90)
    assert (ends, left.num_bytes, held.num_bytes) == ([], 0, 60)
