"""Calls that the gate counts: one whose refusal is kept back counts for so long, whether its client waits or not. Those
that are not let in count apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from rigs.principals import entry, headers, write_principals
from rigs.scheduler_rig import refuses
from rigs.until import until

from deltaline_server.app import Server
from deltaline_server.errors import Code, Reason, RequestError
from deltaline_server.front.port import gate
from deltaline_server.front.port.gate import Gate
from deltaline_server.front.trust import refusals

METHOD = "/deltaline.v1.LayerService/Step"


class Context:
    """A call of gRPC's."""

    def __init__(self, client: str = "a") -> None:
        self._client = client

    def peer(self) -> str:
        return self._client


async def held(made: Gate, seconds: float, code: Code = Code.ABORTED, client: str = "a", method: str = METHOD) -> None:
    """A call whose refusal is kept back for so long: its task is gRPC's."""
    await made.enter(method, Context(client)).hold(seconds, code)


async def given_up(made: Gate, seconds: float, code: Code = Code.ABORTED) -> None:
    """The same, whose client leaves at once."""
    holding = asyncio.create_task(held(made, seconds, code))
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


@pytest.mark.parametrize("code", [Code.UNAUTHENTICATED, Code.PERMISSION_DENIED])
async def test_who_is_not_let_in_has_no_place_while_its_refusal_is_kept_back(code: Code) -> None:
    made = Gate()
    waiting = asyncio.create_task(held(made, 3600, code))
    await given_up(made, 3600, code)
    assert (made.calls.used, made.turned_away.used) == (0, 2)
    waiting.cancel()


@pytest.mark.parametrize("method", [gate.WATCH, gate.WATCH.replace("Watch", "Check")])
async def test_a_refused_probe_has_no_place_either(method: str) -> None:
    made = Gate()
    waiting = asyncio.create_task(held(made, 3600, Code.INVALID_ARGUMENT, method=method))
    await asyncio.sleep(0)
    assert (made.probes.used, made.watches.used, made.turned_away.used) == (0, 0, 1)
    waiting.cancel()


async def test_a_refused_probe_keeps_its_place_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answered at once it would be a way to go on at once."""
    monkeypatch.setattr(gate, "MAX_TURNED_AWAY", 2)
    made = Gate()
    waiting = [asyncio.create_task(held(made, 3600, Code.INVALID_ARGUMENT, method=gate.WATCH)) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert made.turned_away.used + made.watches.used == 5 and made.watches.used >= 3
    assert not any(one.done() for one in waiting)
    for one in waiting:
        one.cancel()


async def test_where_many_were_not_let_in_others_are_told_so_at_once_and_their_connections_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "MAX_TURNED_AWAY", 2)
    made, code = Gate(), Code.UNAUTHENTICATED
    waiting = [asyncio.create_task(held(made, 3600, code, client)) for client in "ab"]

    async def late(client: str) -> None:
        entered = made.enter(METHOD, Context(client))
        await asyncio.sleep(0)
        await entered.hold(3600, code)

    await asyncio.gather(*map(late, "cdcd"))
    await asyncio.sleep(0)
    assert made.turned_away.used == 4, "each connection counts once"
    for client in "abcd":
        with refuses(Reason.TOO_MANY_CALLS):
            made.enter(METHOD, Context(client))
    made.enter(METHOD, Context("x"))
    for one in waiting:
        one.cancel()


async def test_strangers_leave_the_port_s_places_to_who_is_known(
    make_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MAX_CALLS", 16)
    monkeypatch.setattr(gate, "MAX_TURNED_AWAY", 8)
    for name, value in (("BURST", 0), ("PER_S", 1 / 3600), ("MAX_HOLD_S", 3600.0)):
        monkeypatch.setattr(refusals, name, value)
    file = write_principals(tmp_path / "principals.toml", entry("victim", "step"))
    apart = [("grpc.use_local_subchannel_pool", 1)]
    async with make_server(principals=file) as server:
        channels: list[Any] = [grpc.aio.insecure_channel(server.address, options=apart) for _ in range(7)]
        loads = [channel.unary_unary("/deltaline.v1.AdminService/GetLoad") for channel in channels]
        calls = [asyncio.ensure_future(load(b"", metadata=headers("x"))) for load in loads[1:] * 16]
        await until(lambda: 0 < sum(not call.done() for call in calls) <= 8 and not server.gate.calls.used)
        await loads[0](b"", metadata=headers("victim"), timeout=60)
        for channel in channels:
            await channel.close()
        await asyncio.gather(*calls, return_exceptions=True)


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
    await given_up(made, 1.0)
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
