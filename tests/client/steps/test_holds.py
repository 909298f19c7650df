"""Two calls at once on a span of a sequence: one goes, the other is told, whichever way they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.running_sum import tokens

from deltaline_client import Client, DuplicateSequence, Row, SequenceBusy, StepUnfinished, Unavailable


@pytest.fixture
def slow_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may run between the look at who holds a sequence and what follows."""
    count_nonzero = np.count_nonzero

    def look(numbers: NDArray[Any]) -> Any:
        count = count_nonzero(numbers)
        time.sleep(0.02)
        return count

    monkeypatch.setattr(np, "count_nonzero", look)


def decode_batch(client: Client, sequences: Any) -> Any:
    return client.decode(sequences, tokens(len(sequences)))


def step_batch(client: Client, sequences: Any) -> Any:
    return client.step([Row.decode(sequence, tokens(1)) for sequence in sequences])


def decode_one(client: Client, sequences: Any) -> Any:
    return sequences[0].decode(tokens(1))


@pytest.mark.parametrize(("one", "other"), [(decode_batch, decode_batch), (step_batch, decode_one)])
@pytest.mark.usefixtures("slow_to_look")
def test_of_two_threads_that_begin_at_once_one_is_refused(
    server: Any, one: Callable[..., Any], other: Callable[..., Any]
) -> None:
    with Client(server.address) as client, ThreadPoolExecutor(2) as threads:
        sequences = client.open_many(2)
        client.info()
        server.hang("Step")
        errors = []

        def run(call: Callable[..., Any]) -> None:
            try:
                call(client, sequences)
            except SequenceBusy as error:
                errors.append(error)
                server.released.set()

        for future in [threads.submit(run, call) for call in (one, other)]:
            future.result(60)
        assert len(errors) == 1
        assert len(server.requests["Step"]) == 1
        assert not any(sequence.progress().busy for sequence in sequences)
        assert server.streams[sequences[0].handle][0].step == sequences[0].progress().step == 1


def test_a_batch_that_is_refused_holds_none_of_its_sequences(server: Any) -> None:
    with Client(server.address) as client, ThreadPoolExecutor(1) as threads:
        free, taken = client.open_many(2)
        client.info()
        server.hang("Step")
        call = threads.submit(taken.decode, tokens(1))
        assert server.arrived.wait(60)
        with pytest.raises(SequenceBusy):
            client.decode([free, taken], tokens(2))
        with pytest.raises(DuplicateSequence):
            client.decode([free, free], tokens(2))
        with pytest.raises(SequenceBusy):
            taken.commit(0)
        with pytest.raises(SequenceBusy):
            taken.resume()
        assert (free.progress().busy, taken.progress().busy) == (False, True)
        server.released.set()
        np.testing.assert_array_equal(free.decode(tokens(1)), tokens(1))
        np.testing.assert_array_equal(call.result(60), tokens(1))
        np.testing.assert_array_equal(taken.decode(tokens(1)), 2 * tokens(1))


def test_a_commit_under_way_keeps_steps_away(server: Any) -> None:
    with Client(server.address) as client, ThreadPoolExecutor(1) as threads:
        sequence = client.open()
        sequence.verify(tokens(3))
        server.hang("CommitSequences")
        call = threads.submit(sequence.commit, 2, now=True)
        assert server.arrived.wait(60)
        with pytest.raises(SequenceBusy):
            sequence.decode(tokens(1))
        with pytest.raises(SequenceBusy):
            sequence.commit(1)
        server.released.set()
        call.result(60)
        np.testing.assert_array_equal(sequence.decode(tokens(1)[0]), tokens(3)[:2].sum(0) + tokens(1)[0])
        assert list(server.requests["Step"][-1].accepted) == [-1]


def test_what_is_refused_before_it_is_sent_lets_go(driven: Any, once: Any, server: Any) -> None:
    do = driven.do
    sequence, other = do(once.open_many(2))
    server.lose("Step")
    with pytest.raises(Unavailable):
        do(sequence.decode(tokens(1)))
    with pytest.raises(StepUnfinished, match=r"rows\[1\]"):
        do(once.decode([other, sequence], tokens(2) + 1))
    np.testing.assert_array_equal(do(other.decode(tokens(1))), tokens(1))
    np.testing.assert_array_equal(do(sequence.resume()), tokens(1))
