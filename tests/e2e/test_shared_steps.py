"""Steps of the client in shared memory: what goes whole, what is cut, and what becomes of steps without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.faulty_stream import FaultyStream
from rigs.layer_calls import HeldEngine

from deltaline_client import (
    AsyncClient,
    AsyncSequence,
    DeadlineExceeded,
    MessageTooLarge,
    Retry,
    SequenceBusy,
    SharedMemoryExhausted,
)
from deltaline_server.app import Server

HIDDEN = 64
MIB = 1 << 20
ROW_BYTES = HIDDEN * 4
# Rows of a message, and a prompt that is longer.
LIMIT_ROWS, LONG = 16, 300
SHARING = {"shared_memory_bytes": 2 * MIB, "inline_limit_bytes": LIMIT_ROWS * ROW_BYTES}
QUICK = Retry(initial_backoff_s=0.002, max_backoff_s=0.01)


def draw(count: int, seed: int) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


async def whole(make_server: Callable[..., Server], hidden: NDArray[Any], output: Any = "all") -> list[NDArray[Any]]:
    """The outputs of a prefill that fits a message, and of a token after it."""
    async with make_server() as server, AsyncClient(server.address) as client:
        sequence = await client.open()
        return [await sequence.prefill(hidden, output=output), await sequence.decode(draw(1, 99))]


def steps(server: Server, outcome: str) -> float:
    return server.metrics.registry.get_sample_value("deltaline_steps_total", {"outcome": outcome}) or 0


@pytest.mark.parametrize("output", ["all", "last", "none"])
async def test_prefill_larger_than_a_message_is_one_step(make_server: Callable[..., Server], output: Any) -> None:
    hidden = draw(LONG, 0)
    expected = await whole(make_server, hidden, output)
    async with make_server(**SHARING) as server, AsyncClient(server.address, shared_memory_bytes=MIB) as client:
        sequence = await client.open()
        actual = [await sequence.prefill(hidden, output=output), await sequence.decode(draw(1, 99))]
        assert sequence.progress().step == 2
        await (await client.open()).prefill(hidden)
        assert server.runtime.table.replies.earlier.used_bytes == 0  # they would lie in memory that is the client's
    assert [one.tobytes() for one in actual] == [one.tobytes() for one in expected]


@pytest.mark.parametrize("full", ["region", "queue", "replies"])
async def test_prefill_that_does_not_fit_is_cut(make_server: Callable[..., Server], full: str) -> None:
    hidden = draw(LONG, 0)
    limits = {"queue": {"queue_bytes": 200 * ROW_BYTES}, "replies": {"reply_bytes": 200 * ROW_BYTES}}.get(full, {})
    size = 500 * ROW_BYTES if full == "region" else MIB
    async with make_server(**SHARING, **limits) as server:
        async with AsyncClient(server.address) as inline:
            expected = await (await inline.open()).prefill(hidden)
            steps_inline = -(-LONG // LIMIT_ROWS)
        async with AsyncClient(server.address, shared_memory_bytes=size) as client:
            sequence = await client.open()
            assert (await sequence.prefill(hidden)).tobytes() == expected.tobytes()
            assert sequence.progress().step == steps_inline
            region = client._shared._region
            everything = await client.empty((size // ROW_BYTES, HIDDEN))
            assert region is not None and region[1].offset(everything) == 0


@pytest.mark.parametrize("shared_bytes", [0, MIB])
async def test_steps_that_may_never_wait_are_refused_at_once(
    make_server: Callable[..., Server], shared_bytes: int
) -> None:
    async with (
        make_server(**SHARING, queue_bytes=4 * ROW_BYTES) as server,
        AsyncClient(server.address, shared_memory_bytes=shared_bytes) as client,
    ):
        sequence = await client.open()
        with pytest.raises(MessageTooLarge, match="all that may wait here"):
            await asyncio.wait_for(sequence.prefill(draw(LONG, 0)), 5.0)
        assert not sequence.unfinished and sequence.progress().step == 0
        assert (await sequence.prefill(draw(4, 0))).shape == (4, HIDDEN)


async def test_verify_larger_than_a_message_is_one_step_or_none(make_server: Callable[..., Server]) -> None:
    """A verify pends until it is committed: a second one behind it would be refused, and the first one be there."""
    hidden, few = (
        draw(6, 0),
        {"shared_memory_bytes": 2 * MIB, "inline_limit_bytes": 4 * ROW_BYTES, "max_draft_tokens": 6},
    )
    async with make_server() as server, AsyncClient(server.address) as client:
        expected = await (await client.open()).prefill(hidden)
    async with (
        make_server(**few) as server,
        AsyncClient(server.address, shared_memory_bytes=MIB, retry=QUICK) as client,
    ):
        sequence = await client.open()
        everything = await client.empty((MIB // ROW_BYTES, HIDDEN))
        with pytest.raises(SharedMemoryExhausted, match="larger than a message finds no room"):
            await sequence.verify(hidden, timeout_s=0.1)
        assert not sequence.unfinished and sequence.progress().step == 0
        del everything
        np.testing.assert_allclose(await sequence.verify(hidden), expected, rtol=1e-4, atol=1e-5)
        await sequence.commit(2)
        again = await sequence.decode(hidden[2:3])
        np.testing.assert_allclose(again, expected[2:3], rtol=1e-4, atol=1e-5)
        assert sequence.progress().step == 2


async def test_decode_of_many_lies_in_shared_memory(make_server: Callable[..., Server]) -> None:
    async with make_server(**SHARING) as server, AsyncClient(server.address, shared_memory_bytes=MIB) as client:
        sequences, twins = await client.open_many(5), await client.open_many(5)
        async with AsyncClient(server.address) as inline:
            twins = [AsyncSequence(inline, twin.handle, twin.server_epoch) for twin in twins]
            for turn in range(4):
                tokens = draw(5, turn)
                outputs = await client.decode(sequences, tokens, copy=turn % 2 == 0)
                assert outputs.tobytes() == (await inline.decode(twins, tokens)).tobytes()
                region = client._shared._region
                assert region is not None and (region[1].offset(outputs) is not None) == (turn % 2 == 1)


async def test_two_decodes_at_once_are_refused_while_a_region_is_made(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_server(**SHARING) as server, AsyncClient(server.address, shared_memory_bytes=MIB) as client:
        sequence = await client.open()
        await client.info()
        engine = HeldEngine(server, monkeypatch)
        calls = [asyncio.create_task(client.decode([sequence], draw(1, 0))) for _ in range(2)]
        await engine.holds_one()  # whose step it is depends on who came first behind the wait for the region
        (refused,), (other,) = await asyncio.wait(calls, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(SequenceBusy):
            await refused
        engine.release()
        await other
        assert sequence.progress().step == 1


async def test_lost_steps_are_applied_once(make_server: Callable[..., Server]) -> None:
    """Whole prefills and decodes of many, a third of them without an answer."""
    rng = np.random.default_rng(3)
    async with make_server(**SHARING) as server:
        async with AsyncClient(server.address, shared_memory_bytes=2 * MIB, retry=QUICK) as client:
            mine = await client.open_many(3)
            await region_of(client, server)
            stream = FaultyStream(client, lambda: rng.choice(["lost", "unanswered", "sent"], p=[0.15, 0.2, 0.65]))
            actual = []
            for turn in range(12):
                prompts = [draw(100 + 50 * row, 10 * turn + row) for row in range(3)]
                actual += await asyncio.gather(*(one.prefill(new) for one, new in zip(mine, prompts, strict=True)))
                actual.append(await client.decode(mine, draw(3, turn)))
            assert stream.faults > 10 and [one.progress().step for one in mine] == [24] * 3
        assert steps(server, "executed") == 3 * 24 and steps(server, "replayed") + steps(server, "joined") > 0
        async with AsyncClient(server.address, shared_memory_bytes=2 * MIB) as client:
            theirs, expected = await client.open_many(3), []
            for turn in range(12):
                prompts = [draw(100 + 50 * row, 10 * turn + row) for row in range(3)]
                expected += [await one.prefill(new) for one, new in zip(theirs, prompts, strict=True)]
                expected.append(await client.decode(theirs, draw(3, turn)))
        server.runtime.table.check_integrity()
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-3)  # other batches, so other roundings


@pytest.mark.parametrize("fate", ["lost", "unanswered"])
async def test_region_that_ends_before_a_retry(make_server: Callable[..., Server], fate: str) -> None:
    """What was sent whole may have been applied, so it goes whole again, in another region."""
    hidden = draw(LONG, 0)
    expected = await whole(make_server, hidden)
    async with (
        make_server(**SHARING) as server,
        AsyncClient(server.address, shared_memory_bytes=MIB, retry=QUICK) as client,
    ):
        sequence = await client.open()
        old = await region_of(client, server)

        def first_fails() -> str:
            if stream.faults:
                server.runtime.regions.release(old)
                return "sent"
            return fate

        stream = FaultyStream(client, first_fails)
        actual = [await sequence.prefill(hidden), await sequence.decode(draw(1, 99))]
        assert sequence.progress().step == 2
        assert steps(server, "executed") == 2
        [new] = server.runtime.regions._regions
        assert new != old
    assert [one.tobytes() for one in actual] == [one.tobytes() for one in expected]


async def region_of(client: AsyncClient, server: Server) -> int:
    """The number of the region that a client has, once it has one."""
    await client.empty((1, HIDDEN))
    [number] = server.runtime.regions._regions
    return number


@pytest.mark.parametrize("is_another_free", [True, False])
async def test_region_that_ended_before_a_prefill(make_server: Callable[..., Server], is_another_free: bool) -> None:
    hidden = draw(LONG, 0)
    expected = await whole(make_server, hidden)
    async with (
        make_server(**SHARING) as server,
        AsyncClient(server.address, shared_memory_bytes=MIB, retry=QUICK) as client,
    ):
        sequence = await client.open()
        server.runtime.regions.release(await region_of(client, server))
        if not is_another_free:
            server.runtime.regions.limit_bytes = 0
        np.testing.assert_allclose(await sequence.prefill(hidden), expected[0], rtol=0, atol=1e-3)
        assert sequence.progress().step == (1 if is_another_free else -(-LONG // LIMIT_ROWS))
        assert steps(server, "executed") == sequence.progress().step


@pytest.mark.parametrize("ends", ["timeout", "cancel"])
@pytest.mark.parametrize("many", [False, True])
async def test_given_up_step_is_resumed_in_its_place(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, ends: str, many: bool
) -> None:
    """The same step goes to the same slices, which nobody else was given meanwhile."""
    async with (
        make_server(**SHARING) as server,
        AsyncClient(server.address, shared_memory_bytes=MIB, retry=Retry(max_attempts=1)) as client,
    ):
        sequence, other, twin = await client.open_many(3)
        await region_of(client, server)
        held = HeldEngine(server, monkeypatch)
        hidden = draw(1 if many else LONG, 0)
        timeout_s = 0.3 if ends == "timeout" else 20.0
        run = asyncio.create_task(
            client.decode([sequence], hidden, timeout_s=timeout_s)
            if many
            else sequence.prefill(hidden, timeout_s=timeout_s)
        )
        await held.holds_one()
        if ends == "cancel":
            run.cancel()
        with pytest.raises(asyncio.CancelledError if ends == "cancel" else DeadlineExceeded):
            await run
        [placement] = client._shared._unsettled.values()
        taken = await client.empty((100, HIDDEN))
        taken[:] = 1
        held.release()
        resumed = await sequence.resume(copy=False)
        region = client._shared._region
        assert region is not None and region[1].offset(resumed) == placement.room_offset
        assert not client._shared._unsettled and (taken == 1).all()
        assert steps(server, "executed") == 1
        for again in (other, twin):
            expected = await again.prefill(hidden)
            np.testing.assert_allclose(resumed, expected, rtol=0, atol=1e-3)
