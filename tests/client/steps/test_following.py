"""Sequences that are moved while a client uses them: it goes on at their owners, or says where they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.running_sum import FAST, Fault, tokens

from deltaline_client import (
    Client,
    Retry,
    Row,
    RowOutcome,
    SequenceState,
    StateElsewhere,
    StepError,
    Unavailable,
)


def before(fake: Any, method: str, work: Callable[[], object], skip: int = 0) -> None:
    """Let something happen just before a call, that behind the next `skip` ones."""
    for _ in range(skip):
        fake.pass_by(method)
    fake.faults[method].append(Fault(before=work))


def lives_at(sequence: Any) -> tuple[str, int, int]:
    return sequence.server, sequence.server_epoch, sequence.handle


def sums(hidden: NDArray[Any]) -> NDArray[Any]:
    return np.cumsum(hidden.astype(np.float64), axis=0).astype(np.float32)


def test_a_sequence_that_was_moved_goes_on_at_its_owner(
    driven: Any, clients: Any, server: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    do, client = driven.do, clients(other)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("a move is no reason to wait"))
    sequence, stays = do(client.open_many(2))
    hidden = tokens(6)
    outputs = [do(client.decode([sequence, stays], hidden[[0, 0]]))[0]]
    own = server.move(sequence.handle, other)
    for token in hidden[1:3]:
        outputs.append(do(client.decode([sequence, stays], token[None].repeat(2, 0)))[0])
    assert lives_at(sequence) == (other.address, 78, own) and stays.server_epoch == 77
    outputs += [do(sequence.decode(token)) for token in hidden[3:]]
    np.testing.assert_array_equal(outputs, sums(hidden))
    assert sequence.position == other.streams[own][0].position == 6 and stays.position == 3
    assert {(request.server_epoch, *request.sequence) for request in other.requests["Step"]} == {(78, own)}
    assert [len(request.sequence) for request in server.requests["Step"]] == [2, 2, 1]


def test_a_step_whose_outcome_is_unknown_is_sent_again_to_the_owner_which_kept_its_reply(
    driven: Any, clients: Any, server: Any, other: Any
) -> None:
    do, client = driven.do, clients(other, retry=Retry(max_attempts=1))
    sequence, repeated = do(client.open_many(2))
    hidden = tokens(2)
    for one in (sequence, repeated):
        server.lose("Step", grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(Unavailable):
            do(one.decode(hidden[0]))
        assert one.unfinished
        server.move(one.handle, other)
    np.testing.assert_array_equal(do(sequence.resume())[0], hidden[0])
    result = do(client.step([Row.decode(repeated, hidden[0])]))
    assert [row.outcome for row in result.rows] == [RowOutcome.REPLAYED]
    np.testing.assert_array_equal(result.outputs[0][0], hidden[0])
    for one in (sequence, repeated):
        assert not one.unfinished and one.server_epoch == 78
        assert other.streams[one.handle][0].step == one.progress().step == 1
        np.testing.assert_array_equal(do(one.decode(hidden[1])), sums(hidden)[1])


def test_a_move_is_no_attempt(driven: Any, clients: Any, server: Any, other: Any) -> None:
    do, client = driven.do, clients(other, retry=Retry(max_attempts=2, initial_backoff_s=0.0))
    sequence, earlier = do(client.open_many(2))
    server.move(earlier.handle, other)
    do(earlier.decode(tokens(1)[0]))  # the way there is known
    before(server, "Step", lambda: server.move(sequence.handle, other))
    other.lose("Step")
    np.testing.assert_array_equal(do(sequence.decode(tokens(1)[0])), tokens(1)[0])
    assert other.streams[sequence.handle][0].step == 1


def test_rows_of_one_batch_that_were_moved_apart_all_go_on(
    driven: Any, clients: Any, server: Any, other: Any, third: Any
) -> None:
    do, client = driven.do, clients(other, third, retry=Retry(max_attempts=1))
    sequences = do(client.open_many(5))
    hidden = tokens(2)
    do(client.decode(sequences, hidden[[0] * 5]))

    def move() -> None:
        for sequence, to in zip(sequences, (other, third, other), strict=False):
            server.move(sequence.handle, to)

    before(server, "Step", move)
    result = do(client.step([Row.decode(sequence, hidden[1]) for sequence in sequences]))
    np.testing.assert_array_equal(result.outputs, sums(hidden)[1][None, None].repeat(5, 0))
    assert [sequence.server_epoch for sequence in sequences] == [78, 79, 78, 77, 77]
    assert [sequence.progress().step for sequence in sequences] == [2] * 5
    assert [len(fake.requests["Step"]) for fake in (server, other, third)] == [2, 1, 1]


def test_a_long_prefill_goes_on_where_its_sequence_was_moved(
    driven: Any, clients: Any, server: Any, other: Any
) -> None:
    do, client = driven.do, clients(other)
    sequence = do(client.open())
    hidden = tokens(1000)
    before(server, "Step", lambda: server.move(sequence.handle, other), skip=3)
    before(other, "Step", lambda: other.move(sequence.handle, server), skip=3)
    np.testing.assert_array_equal(do(sequence.prefill(hidden)), sums(hidden))
    assert sequence.server_epoch == 77 and sequence.position == 1000
    steps = [step for fake in (server, other) for request in fake.requests["Step"] for step in request.step]
    assert set(steps) == set(range(1, 9)) and server.streams[sequence.handle][0].step == 8


def test_moves_one_after_the_other_are_followed_and_a_circle_is_not_for_ever(
    driven: Any, clients: Any, server: Any, other: Any, third: Any
) -> None:
    do, client = driven.do, clients(other, third, retry=Retry(max_attempts=1))
    sequence = do(client.open())
    first = sequence.handle
    at_other = server.move(first, other)
    at_third = other.move(at_other, third)
    np.testing.assert_array_equal(do(sequence.decode(tokens(1)[0])), tokens(1)[0])
    assert lives_at(sequence) == (third.address, 79, at_third)
    own = third.move(at_third, other)
    other.streams.clear()
    other.moved[own] = third.moved[at_third]  # itself
    num_before = len(other.requests["Step"])
    calls: list[Callable[[], Any]] = [
        lambda: sequence.decode(tokens(1)[0]),
        lambda: client.renew([sequence]),
        lambda: sequence.fork(),
    ]
    for call in calls:
        with pytest.raises(StateElsewhere):
            do(call())
    assert len(other.requests["Step"]) - num_before < 10 and len(other.requests["RenewLeases"]) < 10
    assert not sequence.unfinished


def test_an_owner_that_the_client_may_not_follow_is_told(driven: Any, clients: Any, server: Any, other: Any) -> None:
    do, client = driven.do, clients()
    sequence, verified = do(client.open_many(2))
    do(verified.verify(tokens(2)))
    do(verified.commit(1))
    home, owners = lives_at(sequence), [server.move(one.handle, other) for one in (sequence, verified)]
    calls: list[Callable[[], Any]] = [
        lambda: sequence.decode(tokens(1)[0]),
        lambda: client.decode([sequence], tokens(1)),
        lambda: client.close([sequence]),
        lambda: client.renew([sequence]),
        lambda: client.describe([sequence]),
        lambda: sequence.fork(),
        lambda: sequence.export(),
        lambda: client.snapshots.create([sequence]),
        lambda: verified.commit(1, now=True),
    ]
    for call in calls:
        with pytest.raises((StateElsewhere, StepError)) as raised:
            do(call())
        error: Any = raised.value.errors[0] if isinstance(raised.value, StepError) else raised.value
        told = error.server, error.server_epoch, error.handle
        assert told == (other.address, 78, owners[call is calls[-1]])
    assert lives_at(sequence) == home and not sequence.unfinished
    assert not other.requests


def test_what_is_no_address_and_number_is_no_owner() -> None:
    told = {"server": "b:1", "server_epoch": "5", "sequence": "6"}
    error = StateElsewhere("", metadata=told)
    assert (error.server, error.server_epoch, error.handle) == ("b:1", 5, 6)
    for name, text in (("server", ""), ("server_epoch", "0"), ("sequence", str(2**64)), ("sequence", "٣")):
        error = StateElsewhere("", metadata=told | {name: text})
        assert (error.server, error.server_epoch, error.handle) == ("", 0, 0)
    assert StateElsewhere("").server == ""


def test_questions_about_sequences_are_answered_by_their_owners(
    driven: Any, clients: Any, server: Any, other: Any, third: Any
) -> None:
    do, client = driven.do, clients(other, third)
    sequences = do(client.open_many(4))
    do(client.decode(sequences, tokens(4)))
    expected = [3, 2, 1, 0]
    for sequence, count in zip(sequences, expected, strict=True):
        for _ in range(count):
            do(sequence.decode(tokens(1)[0]))
    handles = [sequence.handle for sequence in sequences]
    owners = [server.move(handles[0], other), server.move(handles[2], third)]
    assert [one.spans[0].step for one in do(client.describe(sequences))] == [4, 3, 2, 1]
    assert [sequence.handle for sequence in sequences] == [owners[0], handles[1], owners[1], handles[3]]
    other.move(owners[0], third)
    assert do(client.renew(sequences)) == [SequenceState.OPEN] * 4
    assert [len(fake.requests["RenewLeases"]) for fake in (server, other, third)] == [1, 1, 2]
    server.move(handles[3], third)
    assert do(client.close(sequences)) == [SequenceState.CLOSED] * 4
    assert not server.streams and not other.streams and not third.streams


def test_those_that_can_be_closed_are_where_one_was_moved_out_of_reach(
    driven: Any, clients: Any, server: Any, other: Any, third: Any
) -> None:
    do, client = driven.do, clients(other)
    sequences = do(client.open_many(3))
    server.move(sequences[0].handle, third)
    server.move(sequences[1].handle, other)
    with pytest.raises(StateElsewhere) as raised:
        do(client.close(sequences))
    assert raised.value.server == third.address and len(third.streams) == 1
    assert not server.streams and not other.streams


@pytest.mark.parametrize("now", [True, False])
def test_a_commit_reaches_the_owner(driven: Any, clients: Any, server: Any, other: Any, now: bool) -> None:
    do, client = driven.do, clients(other)
    moved, stays = sequences = do(client.open_many(2))
    hidden = tokens(3)
    do(client.verify(sequences, [hidden, hidden]))
    server.move(moved.handle, other)
    do(client.commit(sequences, [2, 1], now=now))
    outputs = do(client.decode(sequences, hidden[[2, 2]]))
    np.testing.assert_array_equal(outputs, [hidden.sum(axis=0), hidden[0] + hidden[2]])
    assert [sequence.position for sequence in sequences] == [3, 2]
    assert other.streams[moved.handle][0].position == 3
    assert len(other.requests["CommitSequences"]) == now and stays.server_epoch == 77


def test_forks_snapshots_and_files_are_made_at_the_owner(
    driven: Any, clients: Any, server: Any, other: Any, tmp_path: Path
) -> None:
    do, client = driven.do, clients(other)
    hidden, made = tokens(3), []
    captures: list[Callable[[Any], Any]] = [
        lambda one: one[0].fork(2),
        lambda one: client.snapshots.create(one),
        lambda one: one[0].export(),
        lambda one: one[0].save(tmp_path / "file"),
    ]
    for capture in captures:
        sequences = do(client.open_many(2))
        for sequence in sequences:
            for span in (0, 1):
                do(sequence.prefill(hidden, span=span))
            server.move(sequence.handle, other)
        made.append(do(capture(sequences)))
        assert {sequence.server_epoch for sequence in sequences[: 1 + (len(made) == 2)]} == {78}
    children, snapshots, exported, _ = made
    assert [child.server_epoch for child in children] == [78, 78]
    np.testing.assert_array_equal(do(children[1].decode(hidden[0])), hidden.sum(axis=0) + hidden[0])
    assert len(other.states.kept) == 2 and not server.states.kept
    assert [do(snapshot.restore())[0].server_epoch for snapshot in snapshots] == [78, 78]
    assert exported == (tmp_path / "file").read_bytes() == b"[3, 3]"


def test_a_snapshot_of_sequences_that_were_moved_apart_is_a_mistake(
    driven: Any, clients: Any, server: Any, other: Any
) -> None:
    do, client = driven.do, clients(other)
    sequences = do(client.open_many(2))
    server.move(sequences[1].handle, other)
    with pytest.raises(ValueError, match="one server process, got 2 of 2"):
        do(client.snapshots.create(sequences))
    assert not server.states.kept and not other.states.kept


def test_threads_step_spans_of_sequences_that_are_moved_meanwhile(server: Any, other: Any) -> None:
    """No request pairs a handle with a server at which it never was."""
    hidden, done = tokens(300), threading.Semaphore(0)
    num_steps = len(hidden)
    with Client(server.address, retry=FAST, servers=[other.address]) as client, ThreadPoolExecutor(3) as threads:
        sequences = client.open_many(3)

        def step(span: int) -> list[NDArray[Any]]:
            outputs = []
            for token in hidden:
                outputs.append(client.decode(sequences, token[None].repeat(3, 0), span=span))
                done.release()
            return outputs

        def ask() -> None:
            for _ in range(num_steps):
                client.renew(sequences)

        steps, asking = [threads.submit(step, span) for span in (0, 1)], threads.submit(ask)
        homes = {one: (server, one.handle) for one in sequences}
        for turn in range(num_steps):
            assert done.acquire(timeout=60)
            one = sequences[turn % 3]
            here, handle = homes[one]
            there = other if here is server else server
            homes[one] = there, here.move(handle, there)
        for call in steps:
            np.testing.assert_array_equal(call.result(60), sums(hidden)[:, None].repeat(3, 1))
        asking.result(60)
    for here, handle in homes.values():
        assert [here.streams[handle][span].step for span in (0, 1)] == [num_steps] * 2
