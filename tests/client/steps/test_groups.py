"""Groups of sequences: stepped together again and again, in other company, and by other clients."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from rigs.running_sum import tokens

from deltaline_client import Client, DuplicateSequence, Row
from deltaline_client._steps.hold import MOST_GROUPS


def test_sequences_are_stepped_in_any_company(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(6))
    steps = dict.fromkeys(sequences, 0)
    rng = np.random.default_rng(0)
    for turn in range(3 * MOST_GROUPS):
        group = [sequences[place] for place in rng.permutation(6)[: 1 + turn % 6]]
        token = tokens(len(group), seed=turn)
        rows = [Row.decode(sequence, own) for sequence, own in zip(group, token, strict=True)]
        outputs = np.concatenate(do(client.step(rows)).outputs) if turn % 2 else do(client.decode(group, token))
        for sequence, output in zip(group, outputs, strict=True):
            steps[sequence] += 1
            np.testing.assert_array_equal(output, server.streams[sequence.handle][0].total)
    assert [sequence.progress().step for sequence in sequences] == list(steps.values())
    assert [server.streams[sequence.handle][0].step for sequence in sequences] == list(steps.values())


def test_a_list_may_change_while_its_sequences_are_stepped(server: Any) -> None:
    with Client(server.address) as client, ThreadPoolExecutor(1) as threads:
        group = client.open_many(2)
        handles = [sequence.handle for sequence in group]
        client.info()
        server.hang("Step")
        call = threads.submit(client.decode, group, tokens(2))
        assert server.arrived.wait(60)
        group.clear()
        gc.collect()
        others = client.open_many(100)
        server.released.set()
        np.testing.assert_array_equal(call.result(60), tokens(2))
        assert [server.streams[handle][0].step for handle in handles] == [1, 1]
        assert not any(sequence.progress().step for sequence in others)


def test_a_sequence_twice_is_refused_after_the_group_was_stepped(driven: Any) -> None:
    client, do = driven.client, driven.do
    first, second = do(client.open_many(2))
    do(client.decode([first, second], tokens(2)))
    with pytest.raises(DuplicateSequence, match=r"^rows 1 and 2 are of the same sequence$"):
        do(client.decode([second, first, first], tokens(3)))
    np.testing.assert_array_equal(do(client.decode([first, second], tokens(2))), 2 * tokens(2))


def test_another_client_steps_sequences_but_not_those_of_two(server: Any) -> None:
    with Client(server.address) as client, Client(server.address) as other:
        own, foreign = client.open(), other.open()
        np.testing.assert_array_equal(other.decode([own], tokens(1)), tokens(1))
        assert own.progress().step == 1
        with pytest.raises(ValueError, match="several clients"):
            client.decode([own, foreign], tokens(2))
        np.testing.assert_array_equal(own.decode(tokens(1)), 2 * tokens(1))


def test_sequences_that_are_closed_are_not_kept(driven: Any) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(3))
    do(client.decode(sequences, tokens(3)))
    do(client.close(sequences))
    left = [weakref.ref(sequence) for sequence in sequences]
    del sequences
    for _ in range(100):
        gc.collect()
        if not any(one() for one in left):
            break
        do(client.info())  # what ended a call may wait for a turn of the loop
    assert [one() for one in left] == [None] * 3


def test_a_result_keeps_neither_request_nor_reply(driven: Any) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(2))
    hidden = tokens(2)
    result = do(client.step([Row.decode(one, own) for one, own in zip(sequences, hidden, strict=True)]))
    given = weakref.ref(hidden)
    del hidden
    gc.collect()
    assert given() is None
    assert all(output.base is not None and output.base.base is None for output in result.outputs)
    assert [row.position for row in result.rows] == [1, 1]


def test_a_mistake_in_an_option_leaves_nothing_unfinished(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(2))
    with pytest.raises((TypeError, ValueError)):
        do(client.decode(sequences, tokens(2), priority=2**40))
    assert not any(sequence.unfinished or sequence.progress().busy for sequence in sequences)
    np.testing.assert_array_equal(do(client.decode(sequences, tokens(2))), tokens(2))
    assert len(server.requests["Step"]) == 1


def test_a_mistake_in_a_call_of_several_requests_leaves_nothing_unfinished(driven: Any, server: Any) -> None:
    do, info = driven.do, driven.do(driven.client.info())
    sequence = do(driven.client.open())
    with pytest.raises((TypeError, ValueError)):
        do(sequence.prefill(tokens(1 + info.inline_limit_bytes // tokens(1).nbytes), priority=2**40))
    assert not sequence.unfinished and not sequence.progress().busy
    np.testing.assert_array_equal(do(sequence.prefill(tokens(1))), tokens(1))
    assert len(server.requests["Step"]) == 1
