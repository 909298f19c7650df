"""Batches with adapters on a GPU: replays compute what the CPU does, whatever adapters come and go meanwhile."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rigs.adapter_cases import random_adapter
from rigs.engine_side import MAX_RANK, NUM_SLOTS, Side, bits, values, with_adapters
from rigs.line_batches import CONFIG, MAX_DRAFT, NUM_LINES, WAIT_S, Sequences

from deltaline_server.adapters.copier import AdapterCopier
from deltaline_server.batch import BatchResult
from deltaline_server.engine.executor import CpuExecutor
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.model import ModelOptions, load_model

# Two roundings to 16 bits per projection, in two orders.
TOLERANCE = 3e-2


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def cpu(config: Path) -> Iterator[Side]:
    side = Side(config, "cpu")
    yield side
    side.engine.close()


@pytest.fixture(scope="module")
def plain(config: Path) -> Iterator[Side]:
    side = Side(config, "cuda", has_adapters=False)
    yield side
    side.engine.close()


@pytest.fixture(scope="module")
def gpu(config: Path, plain: Side) -> Iterator[Side]:
    """Made after `plain`: the newest executor counts what is compiled."""
    side = Side(config, "cuda")
    yield side
    side.engine.close()


def error(result: BatchResult, expected: BatchResult) -> float:
    assert result.hidden.shape == expected.hidden.shape
    norm = float(np.linalg.norm(values(expected)))
    return float(np.linalg.norm(values(result) - values(expected))) / max(norm, 1e-9)


def test_the_cpu_takes_rows_with_adapters_and_others_stay_as_they_are(cpu: Side) -> None:
    """The CPU is what the tests on a GPU compare with."""
    cpu.forget()
    batch = Sequences(1).batch(8, verify=False)
    slots = np.array([0, -1, 3, 6, -1, 0, 4, -1], dtype=np.int32)
    slots.setflags(write=False)
    mixed = replace(batch, adapter_places=slots)
    none = replace(batch, adapter_places=np.full(8, -1, dtype=np.int32))
    results = []
    for each in (batch, none, mixed, mixed):
        results += cpu.run([each])
        cpu.forget()
    base, base_too, adapted, again = map(bits, results)
    np.testing.assert_array_equal(base, base_too)
    np.testing.assert_array_equal(adapted, again)
    is_same = (adapted == base).all(axis=1)
    # Nobody has copied anything to slot 6.
    np.testing.assert_array_equal(is_same, (slots == -1) | (slots == 6))
    change = np.linalg.norm(values(results[2]) - values(results[0]), axis=1) / np.linalg.norm(
        values(results[0]), axis=1
    )
    assert change[~is_same].min() > 10 * TOLERANCE


def test_a_model_without_slots_refuses_adapters(config: Path) -> None:
    options = ModelOptions(torch.device("cpu"), random_init=config, dtype=torch.bfloat16, layers=range(1))
    model = load_model(options)
    assert model.adapters is None
    executor = CpuExecutor(model, model.make_pool(StateOptions(NUM_LINES, MAX_DRAFT)))
    batch = replace(Sequences(1).batch(1), adapter_places=np.zeros(1, dtype=np.int32))
    with pytest.raises(ValueError, match="adapter_slots: expected None, as this model has no adapter slots"):
        executor.launch(batch)


@pytest.mark.gpu
def test_replays_with_adapters_compute_what_the_cpu_computes(gpu: Side, cpu: Side) -> None:
    sequences, rng = Sequences(2), np.random.default_rng(2)
    batches = []
    for rows in (1, 2, 3, 5, 8, 13, NUM_LINES):
        for span, want in ((0, "all"), (1, "last"), (0, "none")):
            batches.append(with_adapters(sequences.batch(rows, span, want=want), rng, range(-1, 5)))
            batches.append(with_adapters(sequences.batch(rows, span, False, want=want), rng, [-1, -1, rows % 5]))
        batches.append(sequences.batch(rows))
        batches.append(with_adapters(sequences.batch(1 + rows % 7, long=5 + 40 * rows), rng, range(-1, 7)))
    for side in (gpu, cpu):
        side.forget()
    for batch, result, expected in zip(batches, gpu.run(batches), cpu.run(batches), strict=True):
        assert result.finite.all() and error(result, expected) < TOLERANCE, batch.control


@pytest.mark.gpu
def test_rows_without_adapters_are_bitwise_those_of_a_server_without(gpu: Side, plain: Side) -> None:
    sequences, rng = Sequences(3), np.random.default_rng(3)
    batches = [sequences.batch(rows, verify=verify) for rows in (1, 2, 4, 8, 16, NUM_LINES) for verify in (False, True)]
    for side in (gpu, plain):
        side.forget()
    for result, expected in zip(gpu.run(batches), plain.run(batches), strict=True):
        np.testing.assert_array_equal(bits(result), bits(expected))
    fresh = Sequences(4).batch(8, verify=False)
    for side in (gpu, plain):
        side.forget()
    [expected] = plain.run([fresh])
    for slots in ([-1], range(-1, 5)):
        batch = with_adapters(fresh, rng, slots)
        assert batch.adapter_places is not None
        [result] = gpu.run([batch])
        is_base = batch.adapter_places < 0
        np.testing.assert_array_equal(bits(result)[is_base], bits(expected)[is_base])
        assert (bits(result) == bits(expected)).all(axis=1).sum() == is_base.sum()
        gpu.forget()


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_neighbours_adapters(gpu: Side) -> None:
    batch = Sequences(5).batch(8, verify=False)
    rng = np.random.default_rng(5)
    results = []
    for _ in range(6):
        gpu.forget()
        slots = rng.integers(-1, 5, 8, dtype=np.int32)
        slots[3] = 2
        results += gpu.run([replace(batch, adapter_places=slots)])
    for result in results:
        np.testing.assert_array_equal(bits(result)[3], bits(results[0])[3])
    assert len({result.hidden.tobytes() for result in results}) > 1


@pytest.mark.gpu
def test_serving_and_copying_compile_capture_and_allocate_nothing(gpu: Side, cpu: Side, plain: Side) -> None:
    """While batches run, adapters come to slots that these don't use; later ones find them there."""
    assert gpu.model.adapters is not None
    sequences, rng = Sequences(6), np.random.default_rng(6)
    for side in (gpu, cpu):
        side.forget()
    told: queue.SimpleQueue[bool] = queue.SimpleQueue()
    copier = AdapterCopier(gpu.model.adapters, lambda call: call())
    before = gpu.executor.counts()
    for turn in range(12):
        free, seed = turn % NUM_SLOTS, 100 + turn
        used = [slot for slot in range(-1, NUM_SLOTS) if slot != free]
        adapter = random_adapter(gpu.model.layout, seed, MAX_RANK, dora=seed % 2 > 0)
        copier.copy(free, adapter, told.put)
        batches = []
        for _ in range(6):
            long = int(rng.integers(MAX_DRAFT + 1, 300)) if rng.random() < 0.2 else 0
            batch = sequences.batch(int(rng.integers(1 + bool(long), NUM_LINES + 1)), int(rng.integers(2)), long=long)
            batches.append(batch if rng.random() < 0.2 else with_adapters(batch, rng, used))
        results = gpu.run(batches)
        assert told.get(timeout=WAIT_S)
        for batch, result, expected in zip(batches, results, cpu.run(batches), strict=True):
            assert result.finite.all() and error(result, expected) < TOLERANCE, batch.control
        cpu.fill({free: seed})
    copier.close()
    assert gpu.executor.counts() == before
    assert before.captures == 2 * plain.executor.counts().captures
