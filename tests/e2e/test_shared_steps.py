"""Steps of the client in shared memory: what goes whole, what is cut, and what becomes of steps without an answer."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from e2e.conftest import server_of
from numpy.typing import NDArray
from rigs.hostile_proxy import HostileProxy
from rigs.layer_calls import HeldEngine
from rigs.shared_memory import lies_in_shared_memory, note_regions
from rigs.small_models import GATED_DELTA_NET

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

pytestmark = pytest.mark.asyncio(loop_scope="module")

HIDDEN = 64
MIB = 1 << 20
ROW_BYTES = HIDDEN * 4
# Rows of a message, and a prompt that is longer.
LIMIT_ROWS, LONG = 16, 300
SHARING = {"shared_memory_bytes": 2 * MIB, "inline_limit_bytes": LIMIT_ROWS * ROW_BYTES}
ONCE = Retry(max_attempts=1, clock=lambda: 0.0)  # a timeout begins when the step is sent
QUICK = Retry(initial_backoff_s=0.002, max_backoff_s=0.01)


def draw(count: int, seed: int) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory, device: str) -> AsyncIterator[Server]:
    """A server whose messages are small, and that shares memory."""
    async with server_of(
        GATED_DELTA_NET, tmp_path_factory.mktemp("sharing"), device, **SHARING | {"shared_memory_bytes": 64 * MIB}
    ) as server:
        yield server
        server.runtime.table.check_integrity()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory, device: str) -> AsyncIterator[AsyncClient]:
    """A client of a server whose messages hold all that is sent here."""
    async with (
        server_of(GATED_DELTA_NET, tmp_path_factory.mktemp("whole"), device) as server,
        AsyncClient(server.address) as client,
    ):
        yield client


class StepCounts:
    """How many steps a server has executed, and answered again, since this was made."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = {outcome: self._sample(outcome) for outcome in ("executed", "replayed", "joined")}

    def _sample(self, outcome: str) -> float:
        return self._server.metrics.registry.get_sample_value("deltaline_steps_total", {"outcome": outcome}) or 0

    def __getitem__(self, outcome: str) -> float:
        return self._sample(outcome) - self._before[outcome]


async def prefill_and_decode(sequence: AsyncSequence, hidden: NDArray[Any], output: Any = "all") -> list[bytes]:
    outputs = [await sequence.prefill(hidden, output=output), await sequence.decode(draw(1, 99))]
    return [array.tobytes() for array in outputs]


@pytest.mark.parametrize("output", ["all", "last", "none"])
async def test_prefill_larger_than_a_message_is_one_step(server: Server, whole: AsyncClient, output: Any) -> None:
    hidden = draw(LONG, 0)
    async with AsyncClient(server.address, shared_memory_bytes=MIB) as client:
        sequence = await client.open()
        assert await prefill_and_decode(sequence, hidden, output) == await prefill_and_decode(
            await whole.open(), hidden, output
        )
        assert sequence.progress().step == 2
        await (await client.open()).prefill(hidden)
        assert server.runtime.table.replies.earlier.used_bytes == 0  # they would lie in memory that is the client's


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
            assert lies_in_shared_memory(await client.empty((size // ROW_BYTES, HIDDEN)))  # all of it is free again


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
            await sequence.prefill(draw(LONG, 0))
        assert not sequence.unfinished and sequence.progress().step == 0
        assert (await sequence.prefill(draw(4, 0))).shape == (4, HIDDEN)


async def test_verify_larger_than_a_message_is_one_step_or_none(
    make_server: Callable[..., Server], whole: AsyncClient
) -> None:
    """A verify pends until it is committed: a second one behind it would be refused, and the first one be there."""
    hidden = draw(6, 0)
    seconds = itertools.count()  # each look at the clock takes one
    retry = Retry(initial_backoff_s=0.002, max_backoff_s=0.01, clock=lambda: float(next(seconds)))
    few = {"shared_memory_bytes": 2 * MIB, "inline_limit_bytes": 4 * ROW_BYTES, "max_draft_tokens": 6}
    expected = await (await whole.open()).prefill(hidden)
    async with (
        make_server(**few) as server,
        AsyncClient(server.address, shared_memory_bytes=MIB, retry=retry) as client,
    ):
        sequence = await client.open()
        everything = await client.empty((MIB // ROW_BYTES, HIDDEN))
        with pytest.raises(SharedMemoryExhausted, match="larger than a message finds no room"):
            await sequence.verify(hidden, timeout_s=20.0)
        assert not sequence.unfinished and sequence.progress().step == 0
        del everything
        np.testing.assert_allclose(await sequence.verify(hidden), expected, rtol=1e-4, atol=1e-5)
        await sequence.commit(2)
        again = await sequence.decode(hidden[2:3])
        np.testing.assert_allclose(again, expected[2:3], rtol=1e-4, atol=1e-5)
        assert sequence.progress().step == 2


async def test_decode_of_many_lies_in_shared_memory(server: Server, whole: AsyncClient) -> None:
    async with AsyncClient(server.address, shared_memory_bytes=MIB) as client:
        sequences, twins = await client.open_many(5), await whole.open_many(5)
        for turn in range(4):
            tokens, copy = draw(5, turn), turn % 2 == 0
            outputs = await client.decode(sequences, tokens, copy=copy)
            assert outputs.tobytes() == (await whole.decode(twins, tokens)).tobytes()
            assert lies_in_shared_memory(outputs) != copy


async def test_two_decodes_at_once_are_refused_while_a_region_is_made(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(server.address, shared_memory_bytes=MIB) as client:
        sequence = await client.open()
        await client.info()
        engine = HeldEngine(server, monkeypatch)
        calls = [asyncio.create_task(client.decode([sequence], draw(1, 0))) for _ in range(2)]
        await engine.holds_one()  # whose step it is depends on who came first behind the wait for the region
        (refused,), (other,) = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(SequenceBusy):
            await refused
        engine.release()
        await other
        assert sequence.progress().step == 1


async def test_lost_steps_are_applied_once(server: Server, whole: AsyncClient) -> None:
    """Whole prefills and decodes of many, a third of them without an answer."""
    rng, counts, turns = np.random.default_rng(3), StepCounts(server), 8

    async def run(client: AsyncClient) -> list[Any]:
        sequences, outputs = await client.open_many(3), []
        for turn in range(turns):
            prompts = [draw(100 + 50 * row, 10 * turn + row) for row in range(3)]
            outputs += await asyncio.gather(*(one.prefill(new) for one, new in zip(sequences, prompts, strict=True)))
            outputs.append(await client.decode(sequences, draw(3, turn)))
        assert [one.progress().step for one in sequences] == [2 * turns] * 3
        return outputs

    def fate() -> str:
        if not proxy.steps:
            return "sent"  # a client that gets no answer about a region does without
        return str(rng.choice(["lost", "unanswered", "sent"], p=[0.15, 0.2, 0.65]))

    async with (
        HostileProxy(server.address, fate) as proxy,
        AsyncClient(proxy.address, shared_memory_bytes=2 * MIB, retry=QUICK) as client,
    ):
        actual = await run(client)
        assert all(step.HasField("output_slice") for step in proxy.steps)
    assert proxy.fates["lost"] and proxy.fates["unanswered"]
    assert counts["executed"] == 3 * 2 * turns and counts["replayed"] + counts["joined"] > 0
    for one, other in zip(actual, await run(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-3)  # other batches, so other roundings


@pytest.mark.parametrize("fate", ["lost", "unanswered"])
async def test_region_that_ends_before_a_retry(
    server: Server, whole: AsyncClient, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    """What was sent whole may have been applied, so it goes whole again, in another region."""
    hidden, counts, numbers = draw(LONG, 0), StepCounts(server), note_regions(server, monkeypatch)

    def first_fails() -> str:
        if len(proxy.steps) == 1:
            return fate
        server.runtime.regions.release(numbers[0])
        return "sent"

    async with (
        HostileProxy(server.address, lambda: first_fails() if proxy.steps else "sent") as proxy,
        AsyncClient(proxy.address, shared_memory_bytes=MIB, retry=QUICK) as client,
    ):
        sequence = await client.open()
        actual = await prefill_and_decode(sequence, hidden)
        assert sequence.progress().step == 2
    assert counts["executed"] == 2
    assert len(numbers) == 2
    assert actual == await prefill_and_decode(await whole.open(), hidden)


@pytest.mark.parametrize("is_another_free", [True, False])
async def test_region_that_ended_before_a_prefill(
    server: Server, whole: AsyncClient, monkeypatch: pytest.MonkeyPatch, is_another_free: bool
) -> None:
    hidden, counts, numbers = draw(LONG, 0), StepCounts(server), note_regions(server, monkeypatch)
    async with AsyncClient(server.address, shared_memory_bytes=MIB, retry=QUICK) as client:
        sequence = await client.open()
        await client.empty((1, HIDDEN))
        [number] = numbers
        server.runtime.regions.release(number)
        if not is_another_free:
            monkeypatch.setattr(server.runtime.regions, "limit_bytes", 0)
        expected = await (await whole.open()).prefill(hidden)
        np.testing.assert_allclose(await sequence.prefill(hidden), expected, rtol=0, atol=1e-3)
        assert sequence.progress().step == (1 if is_another_free else -(-LONG // LIMIT_ROWS))
        assert counts["executed"] == sequence.progress().step


@pytest.mark.parametrize("ends", ["timeout", "cancel"])
@pytest.mark.parametrize("many", [False, True])
async def test_given_up_step_is_resumed_in_its_place(
    server: Server, whole: AsyncClient, monkeypatch: pytest.MonkeyPatch, ends: str, many: bool
) -> None:
    """The same step goes to the same slices, which nobody else was given meanwhile."""
    counts = StepCounts(server)
    async with (
        HostileProxy(server.address) as proxy,
        AsyncClient(proxy.address, shared_memory_bytes=MIB, retry=ONCE) as client,
    ):
        sequence = await client.open()
        await client.empty((1, HIDDEN))
        held = HeldEngine(server, monkeypatch)
        hidden = draw(1 if many else LONG, 0)
        timeout_s = 0.3 if ends == "timeout" else None
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
        taken = await client.empty((100, HIDDEN))
        taken[:] = 1
        held.release()
        resumed = await sequence.resume(copy=False)
        first, again = proxy.steps
        assert first == again and first.HasField("output_slice")
        assert lies_in_shared_memory(resumed) and (taken == 1).all()
        assert counts["executed"] == 1
        expected = await (await whole.open()).prefill(hidden)
        np.testing.assert_allclose(resumed, expected, rtol=0, atol=1e-3)
        del taken, resumed, run
        gc.collect()
        assert lies_in_shared_memory(await client.empty((MIB // ROW_BYTES, HIDDEN)))  # all of it is free again
