"""However a sequence is cut into steps, and whoever its neighbours are, its numbers are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rigs.programs import Alone, Program, Step, relative_error, run_together, state_of, states_differ_by

from deltaline_client import AsyncClient, Row
from deltaline_server.app import Server

TOLERANCE = 1e-4


@pytest.fixture
def small_model(each_small_model: dict[str, Any]) -> dict[str, Any]:
    return each_small_model


CUTS = {
    "whole": [300],
    "decodes first": [1] * 9 + [291],
    "around the chunk": [63, 64, 65, 108],
    "ragged": [2, 3, 1, 250, 1, 1, 42],
    "last alone": [299, 1],
    "last third decoded": [200] + [1] * 100,
}


@pytest.mark.parametrize("chunk_tokens", [64, pytest.param(4096, marks=pytest.mark.sweep)])
async def test_any_cut_of_a_prompt_gives_the_same_result(make_server: Callable[..., Server], chunk_tokens: int) -> None:
    """Cut by the client, and prefills again by a server whose chunks are shorter, against the model's one whole run."""
    hidden = np.random.default_rng(5).standard_normal((301, 64)).astype(np.float32)
    async with make_server(chunk_tokens=chunk_tokens) as server, AsyncClient(server.address) as client:
        alone = Alone(server.runtime.model, server.config.max_draft_tokens)
        expected = alone.run(Program([Step("prefill", hidden[:300], 0), Step("decode", hidden[300:], 0)]))
        for cut in CUTS.values():
            sequence, outputs = await client.open(), []
            for piece in np.split(hidden, np.cumsum(cut)):
                make_row = Row.decode if len(piece) == 1 else Row.prefill
                result = await client.step([make_row(sequence, piece)])
                assert result.timing.batch_tokens <= chunk_tokens
                outputs.append(np.asarray(result.outputs[0]).reshape(-1, 64))
            assert relative_error(np.concatenate(outputs[:-1]), expected[0]) < TOLERANCE, cut
            assert relative_error(outputs[-1], expected[1].reshape(-1, 64)) < TOLERANCE, cut
            assert states_differ_by(state_of(server, sequence), alone.state) < TOLERANCE, cut


async def test_speculative_steps_agree_with_token_by_token_decode(make_server: Callable[..., Server]) -> None:
    rng = np.random.default_rng(11)
    async with make_server() as server, AsyncClient(server.address) as client:
        drafted, decoded = await client.open_many(2)
        counts = np.zeros(5, dtype=int)
        for _ in range(100):
            if rng.random() < 0.25:
                token = rng.standard_normal(64).astype(np.float32)
                assert relative_error(await drafted.decode(token), await decoded.decode(token)) < TOLERANCE
                continue
            drafts = rng.standard_normal((4, 64)).astype(np.float32)
            verified = await drafted.verify(drafts)
            accepted = int(rng.integers(0, 5))
            counts[accepted] += 1
            await drafted.commit(accepted, now=bool(rng.random() < 0.3))
            for i in range(accepted):
                assert relative_error(verified[i], np.asarray(await decoded.decode(drafts[i])).reshape(-1)) < TOLERANCE
        assert (counts > 5).all()
        token = rng.standard_normal(64).astype(np.float32)
        assert relative_error(await drafted.decode(token), await decoded.decode(token)) < TOLERANCE
        assert states_differ_by(state_of(server, drafted), state_of(server, decoded)) < TOLERANCE


async def test_what_neighbours_contain_changes_no_bit_of_a_row(make_server: Callable[..., Server]) -> None:
    """The same bucket (rows, tokens, algorithm) with other neighbours, one of them with huge values."""
    rng = np.random.default_rng(3)
    mine = Program.draw(1, 12, 64)
    async with make_server() as server, AsyncClient(server.address) as client:
        runs = []
        for scale in (1.0, 1e3):
            sequences = await client.open_many(4)
            outputs = []
            for step in mine.steps:
                shape = (len(step.hidden), 64)
                others = [(scale * rng.standard_normal(shape)).astype(np.float32) for _ in range(3)]
                hidden = [others[0], step.hidden, others[1], others[2]]
                rows = [getattr(Row, step.kind)(s, h) for s, h in zip(sequences, hidden, strict=True)]
                results = await client.step(rows)
                outputs.append(np.asarray(results.outputs[1]).tobytes())
                if step.kind == "verify":
                    await client.commit(sequences, [step.accepted] * 4)
            runs.append(outputs)
        assert runs[0] == runs[1]


async def test_the_same_program_twice_gives_the_same_bits(make_server: Callable[..., Server]) -> None:
    program = Program.draw(2, 20, 64)
    async with make_server() as server, AsyncClient(server.address) as client:
        runs = []
        for _ in range(2):
            sequences = await client.open_many(1)
            (outputs,) = await run_together(client, sequences, [program])
            runs.append([np.asarray(output).tobytes() for output in outputs])
        assert runs[0] == runs[1]
