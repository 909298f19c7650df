"""Exactly once over a hostile network: a proxy drops requests and replies, duplicates and delays; no step is lost or
doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rigs.hostile_proxy import HostileProxy
from rigs.programs import Program, relative_error, run_together, state_of, states_differ_by

from deltaline_client import AsyncClient, AsyncSequence, Retry
from deltaline_server.app import Server

TOLERANCE = 1e-4
NUM_CLIENTS, SEQUENCES_EACH = 8, 5
RETRY = Retry(initial_backoff_s=0.002, max_backoff_s=0.02, attempt_timeout_s=300.0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps_each", [25, pytest.param(250, marks=pytest.mark.sweep)])
async def test_steps_over_a_hostile_network_are_applied_once(
    make_server: Callable[..., Server], steps_each: int
) -> None:
    programs = [Program.draw(i, steps_each, 64, lengths=(1, 2, 9)) for i in range(NUM_CLIENTS * SEQUENCES_EACH)]
    rng = np.random.default_rng(1)

    def fate() -> str:
        return str(rng.choice(["sent", "lost", "unanswered", "doubled", "late"], p=[0.72, 0.06, 0.06, 0.06, 0.1]))

    async with make_server(max_sequences=128) as server, HostileProxy(server.address, fate) as proxy:

        async def one_client(number: int) -> tuple[list[AsyncSequence], list[list[Any]]]:
            mine = programs[number * SEQUENCES_EACH : (number + 1) * SEQUENCES_EACH]
            async with AsyncClient(proxy.address, retry=RETRY, timeout=600.0) as client:
                sequences = await client.open_many(SEQUENCES_EACH)
                return sequences, await run_together(client, sequences, mine)

        disturbed = await asyncio.gather(*(one_client(number) for number in range(NUM_CLIENTS)))
        sample = server.metrics.registry.get_sample_value
        counted = {o: sample("deltaline_steps_total", {"outcome": o}) or 0 for o in ("executed", "replayed", "joined")}
        sequences = [sequence for mine, _ in disturbed for sequence in mine]
        outputs = [output for _, mine in disturbed for output in mine]

        async with AsyncClient(server.address) as client:  # the undisturbed run
            expected = await run_together(client, undisturbed := await client.open_many(len(programs)), programs)
        assert all(proxy.fates.values()) and len(proxy.fates) == 5
        assert counted["executed"] == len(programs) * steps_each
        assert counted["replayed"] + counted["joined"] > 0
        for actual, wanted in zip(outputs, expected, strict=True):
            assert max(relative_error(a, w) for a, w in zip(actual, wanted, strict=True)) < TOLERANCE
        server.runtime.table.check_integrity()
        for one, other in zip(sequences, undisturbed, strict=True):
            assert states_differ_by(state_of(server, one), state_of(server, other)) < TOLERANCE
        assert [sequence.progress().step for sequence in sequences] == [steps_each] * len(sequences)
