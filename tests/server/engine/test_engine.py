"""The device thread: order, failures, poisoned rows, and what comes back."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rigs.limits import make_limits
from rigs.small_models import GATED_DELTA_NET

from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.computing import make_executor
from deltaline_server.engine.engine import Engine
from deltaline_server.engine.executor import CpuExecutor
from deltaline_server.layers.state_pool import StateOptions, StatePool
from deltaline_server.models.model import Model, ModelOptions, load_model

HIDDEN = 32
MAX_DRAFT = 4
CONFIG = GATED_DELTA_NET | {"hidden_size": HIDDEN}
WAIT_S = 100.0
LIMITS = make_limits(short_rows=8, long_rows=4, chunk_tokens=160)
LoadFunction = Callable[..., Model]


@pytest.fixture
def load(tmp_path: Path, device: str) -> LoadFunction:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def load_random(dtype: torch.dtype = torch.float32) -> Model:
        return load_model(ModelOptions(torch.device(device), random_init=tmp_path / "config.json", dtype=dtype))

    return load_random


class Driver:
    """An engine that is waited for."""

    def __init__(self, model: Model, num_lines: int = 8) -> None:
        self.model = model
        self.pool: StatePool = model.make_pool(StateOptions(num_lines, MAX_DRAFT))
        self.engine = Engine(make_executor(model, self.pool, LIMITS), model.device)
        self.engine.start()
        self.engine.prepare(lambda done, total: None).result(WAIT_S)

    def run(self, batch: StepBatch) -> BatchResult:
        done: queue.SimpleQueue[BatchResult] = queue.SimpleQueue()
        self.engine.submit(batch, done.put)
        return done.get(timeout=WAIT_S)


@pytest.fixture
def driver(load: LoadFunction) -> Iterator[Driver]:
    driver = Driver(load())
    yield driver
    driver.engine.close()


def make_batch(
    lengths: list[int],
    lines: list[int],
    *,
    hidden: NDArray[Any] | None = None,
    fresh: bool = False,
    span: int = 0,
    wanted: list[int] | None = None,
    dtype: Any = np.float32,
) -> StepBatch:
    """Rows that commit all their tokens; `fresh` rows begin at the zero state."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    control = np.zeros((7, len(lengths) + 1), dtype=np.int32)
    control[0] = starts
    control[1, :-1] = 0 if fresh else lines
    control[2, :-1] = lines
    control[3, :-1] = lengths
    if hidden is None:
        hidden = np.random.default_rng(len(lengths)).standard_normal((starts[-1], HIDDEN)).astype(dtype)
    num_short = next((i for i, n in enumerate(lengths) if n > MAX_DRAFT), len(lengths))
    return StepBatch(span, control, num_short, (hidden,), None if wanted is None else np.array(wanted, dtype=np.int64))


def test_a_batch_comes_back_as_the_model_computes_it(load: LoadFunction, driver: Driver) -> None:
    first, second = make_batch([1, 3, 70], [1, 2, 3], fresh=True), make_batch([1, 1, 1], [1, 2, 3])
    whole = [driver.run(first), driver.run(second)]
    # The same sequences one by one.
    for row, line in enumerate([5, 6, 7]):
        for batch, result in zip((first, second), whole, strict=True):
            begin, end = batch.control[0, row : row + 2]
            fresh = batch is first
            alone = driver.run(make_batch([end - begin], [line], hidden=batch.hidden[0][begin:end], fresh=fresh))
            np.testing.assert_allclose(result.hidden[begin:end], alone.hidden, rtol=1e-4, atol=1e-5)
    assert whole[0].finite.tolist() == [True] * 3
    assert not whole[0].failed
    assert min(whole[0].copy_in_s, whole[0].copy_out_s) >= 0 < whole[0].compute_s


def test_only_wanted_rows_come_back(driver: Driver) -> None:
    everything = driver.run(make_batch([2, 3], [1, 2], fresh=True))
    some = driver.run(make_batch([2, 3], [1, 2], fresh=True, wanted=[1, 4]))
    none = driver.run(make_batch([2, 3], [1, 2], fresh=True, wanted=[]))
    np.testing.assert_array_equal(some.hidden, everything.hidden[[1, 4]])
    assert none.hidden.shape == (0, HIDDEN)
    assert none.finite.tolist() == [True, True]


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"),
    [(torch.float32, np.float32), (torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)],
    ids=["float32", "bfloat16", "float16"],
)
def test_hidden_states_keep_their_dtype(load: LoadFunction, dtype: torch.dtype, numpy_dtype: Any) -> None:
    driver, exact = Driver(load(dtype)), Driver(load())
    batch = make_batch([5, 7], [1, 2], fresh=True, dtype=numpy_dtype)
    result = driver.run(batch)
    reference = exact.run(make_batch([5, 7], [1, 2], fresh=True, hidden=batch.hidden[0].astype(np.float32)))
    for each in (driver, exact):
        each.engine.close()
    assert result.hidden.dtype == np.dtype(numpy_dtype) == driver.model.numpy_dtype
    difference = result.hidden.astype(np.float32) - reference.hidden
    assert np.linalg.norm(difference) < 0.03 * np.linalg.norm(reference.hidden)


def test_inputs_are_left_as_they_are_and_need_not_be_writable(driver: Driver) -> None:
    batch = make_batch([2, 70], [1, 2], fresh=True)
    hidden, control = batch.hidden[0].copy(), batch.control.copy()
    first = driver.run(batch)
    np.testing.assert_array_equal(batch.hidden[0], hidden)
    np.testing.assert_array_equal(batch.control, control)
    for array in (*batch.hidden, batch.control):
        array.flags.writeable = False
    np.testing.assert_array_equal(driver.run(batch).hidden, first.hidden)


def test_a_batch_without_tokens(driver: Driver) -> None:
    result = driver.run(make_batch([0, 0], [1, 2]))
    assert result.hidden.shape == (0, HIDDEN)
    assert result.finite.tolist() == [True, True]


def test_jobs_run_in_the_order_of_their_submission(driver: Driver) -> None:
    done: list[int] = []
    last = threading.Event()
    for i in range(20):
        driver.engine.submit(make_batch([1], [1]), lambda _, i=i: done.append(i))  # type: ignore[misc]
    driver.engine.submit(make_batch([1], [1]), lambda _: last.set())
    assert last.wait(WAIT_S)
    assert done == list(range(20))


def test_zeroed_lines_read_as_new_to_the_batches_behind(driver: Driver) -> None:
    new = driver.run(make_batch([1, 1], [1, 2], fresh=True))
    used = driver.run(make_batch([1, 1], [1, 2]))
    lines = np.array([1], dtype=np.int64)
    driver.engine.zero_lines(lines)
    lines[:] = 2  # what the caller does to its array afterwards is its own affair
    again = driver.run(make_batch([1, 1], [1, 2]))
    np.testing.assert_allclose(again.hidden[0], new.hidden[0], rtol=1e-5, atol=1e-6)
    assert not np.allclose(used.hidden[0], new.hidden[0])
    assert not np.allclose(again.hidden[1], new.hidden[1])


def test_a_row_that_is_not_finite_is_flagged_and_its_neighbours_are_not_changed(driver: Driver) -> None:
    lengths, lines = [1, 3, 2, 70, 65], [1, 2, 3, 4, 5]
    clean = make_batch(lengths, lines, fresh=True)
    poisoned = clean.hidden[0].copy()
    poisoned[2, 5], poisoned[80, 0] = np.nan, np.inf
    expected = driver.run(clean)
    result = driver.run(make_batch(lengths, lines, hidden=poisoned, fresh=True, wanted=[]))
    assert expected.finite.all()
    assert result.finite.tolist() == [True, False, True, True, False]
    outputs = driver.run(make_batch(lengths, lines, hidden=poisoned, fresh=True)).hidden
    for row in (0, 2, 3):
        begin, end = clean.control[0, row : row + 2]
        np.testing.assert_array_equal(outputs[begin:end], expected.hidden[begin:end])


def test_a_sum_that_overflows_is_no_reason_to_flag_a_row(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.model, "forward", lambda span, hidden, *_: torch.full_like(hidden, 3e38))
    assert driver.run(make_batch([2, 1], [1, 2])).finite.tolist() == [True, True]


def test_a_batch_that_fails_is_told_and_the_next_one_runs(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    result = driver.run(make_batch([1, 2], [1, 2], span=7))
    assert result.failed
    assert result.finite.tolist() == [False, False]
    assert result.hidden.shape == (0, HIDDEN)
    assert "a batch of 2 rows failed" in caplog.text
    assert caplog.records[0].exc_info is not None
    assert not driver.run(make_batch([1], [1])).failed
    assert not driver.engine.failed()


def test_a_receiver_that_fails_does_not_stop_the_thread(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: BatchResult) -> None:
        raise ZeroDivisionError

    driver.engine.submit(make_batch([1], [1]), fail)
    assert not driver.run(make_batch([1], [1])).failed
    assert "the receiver of a batch's result failed" in caplog.text


def test_an_engine_that_could_not_zero_a_line_computes_nothing_more(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.engine.zero_lines(np.array([99]))
    assert driver.run(make_batch([1], [1])).failed
    assert driver.engine.failed()
    assert "zeroing 1 lines failed" in caplog.text


def test_close_finishes_what_was_submitted_and_takes_no_more(driver: Driver) -> None:
    done: list[BatchResult] = []
    for _ in range(5):
        driver.engine.submit(make_batch([1], [1]), done.append)
    driver.engine.close()
    driver.engine.close()
    assert len(done) == 5
    with pytest.raises(RuntimeError, match="expected an open engine"):
        driver.engine.submit(make_batch([1], [1]), done.append)
    with pytest.raises(RuntimeError, match="expected an open engine"):
        driver.engine.zero_lines(np.array([1]))


def test_an_engine_that_never_started_can_be_closed(load: LoadFunction) -> None:
    model = load()
    engine = Engine(CpuExecutor(model, model.make_pool(StateOptions(1, 1))), model.device)
    engine.close()
    assert not engine.failed() and engine.heartbeat_s() == 0.0
