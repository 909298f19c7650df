"""Shares of a bounded amount: nobody takes all, and nobody is turned away who has nothing while there is some."""

from __future__ import annotations

from deltaline_server.front.port.shares import Shares


def fill(shares: Shares, client: str, amount: int = 1) -> int:
    """Take as long as there is room; how much that was."""
    taken = 0
    while shares.has_room(client):
        shares.take(client, amount)
        taken += amount
    return taken


def test_one_client_has_half_at_most_and_others_half_of_what_is_left() -> None:
    shares = Shares(100)
    assert [fill(shares, client) for client in "abc"] == [50, 25, 13]
    assert shares.used == 88 and fill(shares, "a") == 0


def test_who_has_nothing_finds_room_as_long_as_there_is_any() -> None:
    shares = Shares(100)
    for client in map(str, range(100)):
        assert shares.has_room(client)
        shares.take(client, 1)
    assert not shares.has_room("one more")
    shares.give_back("7", 1)
    assert shares.has_room("one more")


def test_a_client_has_no_more_than_the_most_whatever_is_left() -> None:
    shares = Shares(100, most=10)
    assert fill(shares, "a", 3) == 12  # the last is taken whole
    shares.give_back("a", 12)
    assert shares.used == 0 and fill(shares, "a", 10) == 10
