"""Calls that the gate counts: one whose refusal is kept back counts for so long, whether its client waits or not."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from rigs.scheduler_rig import refuses
from rigs.until import until

from deltaline_server.errors import Reason, RequestError
from deltaline_server.front.port import gate
from deltaline_server.front.port.gate import Gate

METHOD = "/deltaline.v1.LayerService/Step"


class Context:
    """A call of gRPC's."""

    def __init__(self, client: str = "a") -> None:
        self._client = client

    def peer(self) -> str:
        return self._client


async def held(made: Gate, seconds: float) -> None:
    """A call whose refusal is kept back for so long: its task is gRPC's."""
    await made.enter(METHOD, Context()).hold(seconds)


async def given_up(made: Gate, seconds: float) -> None:
    """The same, whose client leaves at once."""
    holding = asyncio.create_task(held(made, seconds))
    await asyncio.sleep(0)
    holding.cancel()
    await asyncio.wait([holding])


async def test_a_call_that_is_given_up_while_its_refusal_is_kept_back_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "MAX_CALLS", 8)
    made = Gate()
    for _ in range(4):
        await given_up(made, 3600)
    assert made.calls.used == 4
    with refuses(Reason.TOO_MANY_CALLS):
        made.enter(METHOD, Context())


async def test_watches_leave_probes_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_WATCHES", 4)
    made = Gate()
    for client in "abcdefgh":
        with suppress(RequestError):
            made.enter(gate.WATCH, Context(client))
    assert made.watches.used == made.watches.limit == 4
    made.enter(gate.WATCH.replace("Watch", "Check"), Context("x"))
    assert (made.probes.used, made.calls.used) == (1, 0)


async def test_its_place_is_free_once_its_time_is_over() -> None:
    made = Gate()
    await given_up(made, 0.05)
    assert made.calls.used == 1
    await asyncio.create_task(held(made, 0))
    await asyncio.sleep(0)
    assert made.calls.used == 1, "a place that nothing keeps is free at once"
    await until(lambda: not made.calls.used)


@pytest.mark.parametrize("reply", [b"", b"reply"])
async def test_nothing_is_kept_of_a_client_whose_calls_are_over(reply: bytes) -> None:
    made = Gate()

    async def call() -> None:
        made.enter(METHOD, Context()).hand_over(reply)

    await asyncio.create_task(call())
    await asyncio.sleep(0)
    for shares in (made.calls, made.unread):
        assert (shares.used, shares.num_clients) == (0, 0)
