"""Streamed prefills end to end: equal to one whole step, and exact when connections are killed under them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.programs import relative_error, state_of, states_differ_by

from deltaline_client import AsyncClient, Client, Retry
from deltaline_server.app import Server

HIDDEN = 64
STEP_TOKENS = 16
"""Tokens of one step where the inline limit is small."""
LIMIT = STEP_TOKENS * HIDDEN * 4
TOLERANCE = 1e-4


def prompt(seed: int, num_tokens: int) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal((num_tokens, HIDDEN)).astype(np.float32)


class KillingProxy:
    """Forwards TCP connections to a server, and kills each after a random number of bytes."""

    def __init__(self, port: int, seed: int, max_kills: int) -> None:
        self._server_port, self._rng, self._max_kills = port, np.random.default_rng(seed), max_kills
        self.kills = 0

    async def __aenter__(self) -> KillingProxy:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        left = int(self._rng.integers(30_000, 200_000))

        async def forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal left
            while left > 0 and (data := await source.read(4096)):
                left -= len(data) if self.kills < self._max_kills else 0
                sink.write(data)
                await sink.drain()

        ways = [asyncio.create_task(forward(reader, far_writer)), asyncio.create_task(forward(far_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.kills += left <= 0
            for way in ways:
                way.cancel()
            for end in (writer, far_writer):
                end.transport.abort()
            await asyncio.gather(*ways, return_exceptions=True)


@pytest.mark.parametrize("output", ["all", "last", "none"])
async def test_streamed_prefill_equals_one_whole_step(make_server: Callable[..., Server], output: Any) -> None:
    hidden, token = prompt(0, 20 * STEP_TOKENS + 5), prompt(1, 1)
    async with make_server() as whole, make_server(inline_limit_bytes=LIMIT) as cut:
        results = []
        for server in (whole, cut):
            async with AsyncClient(server.address) as client:
                sequence = await client.open()
                outputs = [await sequence.prefill(hidden, output=output), await sequence.decode(token)]
                results.append((outputs, state_of(server, sequence), sequence.progress().step))
        (expected, state, steps), (actual, cut_state, cut_steps) = results
        assert (steps, cut_steps) == (2, 22)
        assert [one.shape for one in actual] == [one.shape for one in expected]
        for one, other in zip(actual, expected, strict=True):
            assert not one.size or relative_error(one, other) < TOLERANCE
        assert states_differ_by(cut_state, state) < TOLERANCE


async def test_both_clients_stream_to_the_same_bits(make_server: Callable[..., Server]) -> None:
    hidden = prompt(0, 9 * STEP_TOKENS)
    async with make_server(inline_limit_bytes=LIMIT) as server, AsyncClient(server.address) as client:
        expected = await (await client.open()).prefill(hidden)

        def blocking() -> NDArray[Any]:
            with Client(server.address) as other, other.open() as sequence:
                return sequence.prefill(hidden)

        np.testing.assert_array_equal(await asyncio.to_thread(blocking), expected)


@pytest.mark.timeout(120)
async def test_prefills_are_exact_when_connections_are_killed(make_server: Callable[..., Server]) -> None:
    num_sequences, num_steps, kills = 4, 30, 12
    prompts = [prompt(i, num_steps * STEP_TOKENS) for i in range(num_sequences)]
    tokens = prompt(99, num_sequences)
    async with make_server(inline_limit_bytes=LIMIT) as server:
        async with AsyncClient(server.address) as client:
            sequences = await client.open_many(num_sequences)
            expected = await asyncio.gather(*(s.prefill(p) for s, p in zip(sequences, prompts, strict=True)))
            decoded = await client.decode(sequences, tokens)
        sample = server.metrics.registry.get_sample_value
        before = sample("deltaline_steps_total", {"outcome": "executed"}) or 0
        retry = Retry(initial_backoff_s=0.002, max_backoff_s=0.05)
        port = int(server.address.rsplit(":", 1)[1])
        async with (
            KillingProxy(port, seed=3, max_kills=kills) as proxy,
            AsyncClient(f"127.0.0.1:{proxy.port}", retry=retry) as client,
        ):
            sequences = await client.open_many(num_sequences)
            outputs = await asyncio.gather(*(s.prefill(p) for s, p in zip(sequences, prompts, strict=True)))
            assert relative_error(await client.decode(sequences, tokens), decoded) < TOLERANCE
        assert proxy.kills >= 5
        for actual, wanted in zip(outputs, expected, strict=True):
            assert actual.shape == wanted.shape
            assert relative_error(actual, wanted) < TOLERANCE
        executed = sample("deltaline_steps_total", {"outcome": "executed"}) or 0
        assert executed - before == num_sequences * (num_steps + 1)
        assert (sample("deltaline_steps_total", {"outcome": "replayed"}) or 0) > 0
        assert [sequence.position for sequence in sequences] == [num_steps * STEP_TOKENS + 1] * num_sequences
        server.runtime.table.check_integrity()
