"""What a client has not read: large replies wait for their turn, small ones go, and who has most loses what waits."""

from __future__ import annotations

import asyncio

import pytest

from deltaline_server.front.ends.reader import GIVEN_BYTES, SMALL_BYTES, Reader, Unread
from deltaline_server.front.link.held import Held

LARGE = GIVEN_BYTES // 2


class Client:
    """A connection with calls that have a reply each, in the order of the bytes given."""

    def __init__(self, held: Held, *replies: int) -> None:
        self.reader, self.cut = Reader(held), list[int]()
        self.calls: list[Unread] = []
        self.turns: list[asyncio.Task[None]] = []
        for number, num_bytes in enumerate(replies):
            unread = self.reader.join(lambda why, number=number: self.cut.append(number))  # type: ignore[misc]
            self.calls.append(unread)
            self.reader.came(unread, num_bytes)
            self.turns.append(asyncio.create_task(self.reader.turn(unread, num_bytes)))

    async def given(self) -> list[bool]:
        """Which replies gRPC has."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [turn.done() for turn in self.turns]


async def test_large_replies_go_in_their_order_as_the_client_reads() -> None:
    held = Held(1 << 30)
    client = Client(held, LARGE, LARGE, LARGE, SMALL_BYTES, LARGE)
    assert await client.given() == [True, True, False, True, False]
    assert not client.reader.leave(client.calls[0])
    assert await client.given() == [True, True, True, True, False]
    client.reader.was_read(client.calls[1], LARGE)  # of a stream
    assert await client.given() == [True] * 5
    assert [client.reader.leave(client.calls[number]) for number in (1, 2, 3, 4)] == [False] * 3 + [True]
    assert held.num_bytes == 0


async def test_who_gives_up_waits_no_more() -> None:
    held = Held(1 << 30)
    client = Client(held, LARGE, LARGE, LARGE, LARGE)
    await client.given()
    client.turns[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.turns[2]
    client.reader.leave(client.calls[2])
    client.reader.leave(client.calls[0])
    assert await client.given() == [True, True, True, True]
    assert held.num_bytes == 2 * LARGE


async def test_who_has_most_loses_what_waits() -> None:
    held = Held(8 * LARGE)
    modest, greedy = Client(held, LARGE, LARGE, LARGE), Client(held, LARGE, LARGE, LARGE, LARGE, LARGE)
    await modest.given()
    await greedy.given()
    late = modest.reader.join(lambda why: modest.cut.append(9))
    modest.reader.came(late, SMALL_BYTES)
    assert (modest.cut, sorted(greedy.cut)) == ([], [2, 3, 4])
    assert await greedy.given() == [True] * 5  # those that waited look what became of them
    assert held.num_bytes == 5 * LARGE + SMALL_BYTES
    assert [greedy.reader.leave(call) for call in greedy.calls] == [False] * 4 + [True]
    assert held.num_bytes == 3 * LARGE + SMALL_BYTES
    for turn in modest.turns:
        turn.cancel()
