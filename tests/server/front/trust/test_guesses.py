"""Who names many sequences that are none is slowed, and nobody else."""

from __future__ import annotations

import pytest
from rigs.scheduler_rig import refuses

from deltaline_server.errors import Reason
from deltaline_server.front.trust import guesses
from deltaline_server.front.trust.guesses import LEAST_BURST, PER_S, Guesses
from deltaline_server.principal import ANONYMOUS, Principal


class Rig:
    def __init__(self, max_sequences: int = 64) -> None:
        self.now = 0.0
        self.guesses = Guesses(max_sequences, lambda: self.now)

    def guess(self, connection: str, count: int, principal: Principal = ANONYMOUS) -> None:
        self.guesses.check(connection, principal)
        self.guesses.add(connection, principal, count)


def test_a_few_unknown_handles_slow_nobody() -> None:
    rig = Rig()
    for _ in range(LEAST_BURST):
        rig.guess("honest", 1)
    assert rig.guesses.num_unknown == LEAST_BURST


def test_a_connection_beyond_its_burst_gets_a_rate() -> None:
    rig = Rig()
    rig.guess("guesser", LEAST_BURST + 50)
    with refuses(Reason.TOO_MANY_UNKNOWN) as refused:
        rig.guess("guesser", 1)
    retry_s = refused.value.refusal.retry_after_s or 0.0
    assert retry_s == pytest.approx(51 / PER_S)
    rig.guess("another", 1)
    rig.now += retry_s / 2
    with refuses(Reason.TOO_MANY_UNKNOWN):
        rig.guess("guesser", 1)
    rig.now += retry_s / 2 + 1e-6
    rig.guess("guesser", 1)
    assert rig.guesses.num_unknown == LEAST_BURST + 52


def test_a_client_may_lose_all_sequences_of_a_large_server() -> None:
    rig = Rig(max_sequences=4096)
    for _ in range(4):
        rig.guess("honest", 4096)
    with refuses(Reason.TOO_MANY_UNKNOWN):
        rig.guess("honest", 1)


@pytest.mark.parametrize("asks", ["honest", "another"])
def test_nothing_stays_of_a_bucket_that_has_leaked_whoever_asks(asks: str) -> None:
    rig = Rig()
    assert not rig.guesses.is_slowing
    rig.guess("honest", 100)
    rig.guess("another", 0)
    assert rig.guesses.is_slowing
    rig.now += 100 / PER_S
    rig.guesses.check(asks, ANONYMOUS)
    assert not rig.guesses.is_slowing


def test_the_connections_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "MAX_CONNECTIONS", 2)
    rig = Rig()
    for connection in ("first", "second", "first", "third"):
        rig.guess(connection, LEAST_BURST - 1)
    for connection, is_slowed in (("first", True), ("second", False)):
        if is_slowed:
            with refuses(Reason.TOO_MANY_UNKNOWN):
                rig.guess(connection, 1)
        else:
            rig.guess(connection, 1)


def test_principals_that_share_a_connection_do_not_share_its_bucket() -> None:
    """As behind a proxy, or on a UNIX socket, whose clients all have one name."""
    rig, guesser, honest = Rig(), Principal(1, "guesser"), Principal(2, "honest")
    rig.guess("unix:", LEAST_BURST, guesser)
    with refuses(Reason.TOO_MANY_UNKNOWN):
        rig.guess("unix:", 1, guesser)
    rig.guess("unix:", 1, honest)
