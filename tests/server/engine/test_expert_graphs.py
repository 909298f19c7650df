"""Batches of a model with experts, each token of which has few of many: bits that company and adapters leave alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.engine_side import Side, bits, with_adapters
from rigs.line_batches import CHUNK, CONFIG, MAX_DRAFT, NUM_LINES, Sequences

from deltaline_server.batch import StepBatch

# An MLP in the last layer, which is a span of its own.
EXPERTS = CONFIG | {
    "model_type": "qwen3_next",
    "num_experts": 24,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "mlp_only_layers": [2],
}
# Rows, and tokens of the last one where it is long.
SHAPES = [(1, 0), (2, 0), (5, 0), (13, 0), (NUM_LINES, 0), (3, 60), (6, 300), (2, CHUNK)]


@pytest.fixture(scope="module")
def side(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    config = tmp_path_factory.mktemp("model") / "config.json"
    config.write_text(json.dumps(EXPERTS))
    side = Side(config, device)
    yield side
    side.engine.close()


def run_fresh(side: Side, batch: StepBatch) -> NDArray[np.uint16]:
    """The bits of a batch's outputs, on fresh lines."""
    side.forget()
    [result] = side.run([batch])
    return bits(result)


def with_others(batch: StepBatch, row: int, others: NDArray[np.float32]) -> StepBatch:
    """The batch with other tokens in all rows but one."""
    (own,) = np.split(np.concatenate(batch.hidden), batch.control[0, row : row + 2])[1:2]
    hidden = others.astype(own.dtype)
    hidden[slice(*batch.control[0, row : row + 2])] = own
    return replace(batch, hidden=(hidden,))


@pytest.mark.parametrize(("num_rows", "long"), SHAPES)
def test_a_row_does_not_depend_on_its_company(side: Side, num_rows: int, long: int) -> None:
    """Of the same bucket: whatever others hold, finite or not, and what was computed there before."""
    batch, rng = Sequences(num_rows).batch(num_rows, long=long), np.random.default_rng(num_rows)
    shape = (batch.num_tokens, np.concatenate(batch.hidden).shape[1])
    whole = run_fresh(side, batch)
    np.testing.assert_array_equal(run_fresh(side, batch), whole)
    for row in {0, num_rows // 2, num_rows - 1}:
        tokens = slice(*batch.control[0, row : row + 2])
        for others in (rng.standard_normal(shape), np.full(shape, np.nan)):
            made = run_fresh(side, with_others(batch, row, others.astype(np.float32)))
            np.testing.assert_array_equal(made[tokens], whole[tokens])


def test_rows_without_adapters_keep_their_bits(side: Side) -> None:
    """Beside experts the mixers, and MLPs of other layers, have adapters."""
    rng = np.random.default_rng(1)
    for num_rows in (2, 8, NUM_LINES):
        batch = with_adapters(Sequences(num_rows).batch(num_rows, verify=False), rng, range(-1, 5))
        assert batch.adapter_places is not None
        batch.adapter_places[:2] = 3, -1
        none = replace(batch, adapter_places=np.full(num_rows, -1, dtype=np.int32))
        is_same = (run_fresh(side, batch) == run_fresh(side, none)).all(axis=1)
        np.testing.assert_array_equal(is_same, batch.adapter_places < 0)


def test_a_bad_row_is_bad_alone(side: Side) -> None:
    batch = Sequences(2).batch(6, verify=False)
    others = np.concatenate(batch.hidden).astype(np.float32)
    others[3] = np.nan
    side.forget()
    [result] = side.run([replace(batch, hidden=(others.astype(batch.hidden[0].dtype),))])
    assert result.finite.tolist() == [row != 3 for row in range(6)]


@pytest.mark.gpu
def test_serving_compiles_captures_and_allocates_nothing(side: Side) -> None:
    """Whoever has which experts, in buckets of every way in which they are computed."""
    sequences, rng = Sequences(5), np.random.default_rng(6)
    side.forget()
    before = side.executor.counts()
    batches = []
    for _ in range(300):
        long = int(rng.integers(MAX_DRAFT + 1, CHUNK + 1)) if rng.random() < 0.3 else 0
        rows = int(rng.integers(1 + bool(long), NUM_LINES + 1))
        want = ("all", "last", "none")[rng.integers(3)]
        batch = sequences.batch(rows, int(rng.integers(2)), bool(rng.random() < 0.5), long, want)
        batches.append(batch if rng.random() < 0.5 else with_adapters(batch, rng, range(-1, 5)))
    assert all(result.finite.all() for result in side.run(batches))
    assert side.executor.counts() == before
