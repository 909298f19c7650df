"""Streamed prefills end to end: equal to one whole step, and exact when connections are killed under them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.killing_proxy import KillingProxy
from rigs.programs import relative_error, state_of, states_differ_by

from deltaline_client import AsyncClient, Retry
from deltaline_server.app import Server

HIDDEN = 64
STEP_TOKENS = 16
"""Tokens of one step where the inline limit is small."""
LIMIT = STEP_TOKENS * HIDDEN * 4
TOLERANCE = 1e-4


def prompt(seed: int, num_tokens: int) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal((num_tokens, HIDDEN)).astype(np.float32)


async def test_streamed_prefill_equals_one_whole_step(make_server: Callable[..., Server]) -> None:
    hidden, token = prompt(0, 20 * STEP_TOKENS + 5), prompt(1, 1)
    async with make_server() as whole, make_server(inline_limit_bytes=LIMIT) as cut:
        for output in ("all", "last", "none"):
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


@pytest.mark.timeout(600)
async def test_prefills_are_exact_when_connections_are_killed(make_server: Callable[..., Server]) -> None:
    num_sequences, num_steps = 4, 20
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
        async with (
            KillingProxy(server.address, [150_000] * 8) as proxy,
            AsyncClient(proxy.address, retry=retry, timeout=600.0) as client,
        ):
            sequences = await client.open_many(num_sequences)
            outputs = await asyncio.gather(*(s.prefill(p) for s, p in zip(sequences, prompts, strict=True)))
            assert relative_error(await client.decode(sequences, tokens), decoded) < TOLERANCE
        assert proxy.kills >= 4  # hidden states and outputs are 650 kB
        for actual, wanted in zip(outputs, expected, strict=True):
            assert actual.shape == wanted.shape
            assert relative_error(actual, wanted) < TOLERANCE
        executed = sample("deltaline_steps_total", {"outcome": "executed"}) or 0
        assert executed - before == num_sequences * (num_steps + 1)
        assert [sequence.position for sequence in sequences] == [num_steps * STEP_TOKENS + 1] * num_sequences
        server.runtime.table.check_integrity()
