"""However a sequence is cut into steps, and whoever its neighbours are, its numbers are the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from programs import Program, relative_error, run_together

from deltaline_client import AsyncClient, Row
from deltaline_server.app import Server

TOLERANCE = 1e-4


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param([200], id="whole"),
        pytest.param([1] * 9 + [191], id="decodes-first"),
        pytest.param([63, 64, 65, 8], id="around-the-chunk"),
        pytest.param([2, 3, 1, 150, 1, 1, 42], id="ragged"),
        pytest.param([199, 1], id="last-alone"),
        pytest.param([100] + [1] * 100, id="half-decoded"),
    ],
)
async def test_any_cut_of_a_prompt_gives_the_same_result(make_server: Callable[..., Server], cuts: list[int]) -> None:
    prompt = np.random.default_rng(5).standard_normal((200, 64)).astype(np.float32)
    async with make_server(chunk_tokens=4096) as server, AsyncClient(server.address) as client:
        whole, pieces = await client.open_many(2)
        expected = await whole.prefill(prompt)
        outputs, begin = [], 0
        for length in cuts:
            piece = prompt[begin : begin + length]
            outputs.append(await (pieces.decode(piece[0]) if length == 1 else pieces.prefill(piece)))
            begin += length
        actual = np.concatenate([output.reshape(-1, 64) for output in outputs])
        assert relative_error(actual, expected) < TOLERANCE
        token = prompt[:1]
        assert relative_error(await pieces.decode(token), await whole.decode(token)) < TOLERANCE


async def test_500_speculative_steps_agree_with_token_by_token_decode(make_server: Callable[..., Server]) -> None:
    rng = np.random.default_rng(11)
    async with make_server() as server, AsyncClient(server.address) as client:
        drafted, decoded = await client.open_many(2)
        counts = np.zeros(5, dtype=int)
        for _ in range(500):
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
        assert (counts > 30).all()
        token = rng.standard_normal(64).astype(np.float32)
        assert relative_error(await drafted.decode(token), await decoded.decode(token)) < TOLERANCE


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
