"""Sequences that a client has its servers move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rigs.running_sum import tokens

from deltaline_client import Moved, MoveError, MoveTargetRefused, NoFreeLines, ProtocolError, QueueFull, StateElsewhere
from deltaline_server.errors import Reason


def test_moved_sequences_go_on_at_their_owner_without_having_to_ask(
    driven: Any, clients: Callable[..., Any], server: Any, other: Any
) -> None:
    do, client = driven.do, clients(other)
    server.targets[other.address] = other
    sequences = do(client.open_many(20))  # more than a request may have
    hidden = tokens(40).reshape(2, 20, -1)
    do(client.decode(sequences[:10], hidden[0, :10]))
    do(client.verify(sequences[10:], hidden[0, 10:, None]))
    do(client.commit(sequences[10:], [1] * 10))
    moved = do(client.move(sequences, other.address))
    assert moved == [Moved(one, other.address, 78, one.handle) for one in sequences]
    assert set(other.streams) == {one.handle for one in sequences} and not server.streams
    num_steps = len(server.requests["Step"])
    for part in (slice(0, 10), slice(10, 20)):
        np.testing.assert_array_equal(do(client.decode(sequences[part], hidden[1, part])), hidden[:, part].sum(axis=0))
    assert len(server.requests["Step"]) == num_steps and len(other.requests["Step"]) == 2
    assert [len(one.sequence) for one in server.requests["MoveSequences"]] == [16, 4]


def test_a_move_whose_answer_was_lost_is_made_once(
    driven: Any, clients: Callable[..., Any], server: Any, other: Any
) -> None:
    do, client = driven.do, clients(other)
    server.targets[other.address] = other
    sequence = do(client.open())
    server.lose("MoveSequences")
    [moved] = do(client.move([sequence], other.address))
    first, again = server.requests["MoveSequences"]
    assert first == again and len(first.request_id) == 16
    assert list(other.streams) == [moved.handle] == [sequence.handle]


def test_where_the_client_may_not_go_it_tells_where_they_live(
    driven: Any, clients: Callable[..., Any], server: Any, other: Any
) -> None:
    do, client = driven.do, clients()
    server.targets["gpu-2:50051"] = other
    sequence = do(client.open())
    handle = sequence.handle
    [moved] = do(client.move([sequence], "gpu-2:50051"))  # which its server calls otherwise
    assert (moved.server, moved.server_epoch) == (other.address, 78) and moved.handle in other.streams
    assert (sequence.handle, sequence.server_epoch) == (handle, 77)
    expected = f"lives at {other.address}, where this client may not go: name it in Client\\(..., servers="
    calls: list[Callable[[], Any]] = [lambda: sequence.decode(tokens(1)[0]), lambda: client.renew([sequence])]
    for call in calls:
        with pytest.raises(StateElsewhere, match=expected) as raised:
            do(call())
        assert raised.value.handle == moved.handle
    assert do(client.move([sequence], "gpu-2:50051")) == [moved]  # it had been


@pytest.mark.parametrize("servers", [None, ["127.0.0.1:1"]])
def test_the_target_that_the_program_named_is_followed(
    driven: Any, server: Any, other: Any, servers: list[str] | None
) -> None:
    do, client = driven.do, driven.make(server.address, servers=servers, channels=2)
    server.targets[other.address] = other
    sequence = do(client.open())
    do(client.move([sequence], other.address))
    np.testing.assert_array_equal(do(sequence.decode(tokens(1)[0])), tokens(1)[0])
    assert (sequence.server, sequence.server_epoch) == (other.address, 78)
    do(client.disconnect())


def test_those_that_stay_go_on_and_the_error_tells_them(
    driven: Any, clients: Callable[..., Any], server: Any, other: Any, third: Any
) -> None:
    do, client = driven.do, clients(other, third)
    server.targets[other.address] = server.targets[third.address] = other
    sequences = do(client.open_many(3))
    server.refuse_rows({0: Reason.NO_FREE_LINES, 2: Reason.QUEUE_FULL}, method="MoveSequences")
    with pytest.raises(MoveError, match="2 of 3 sequences were not moved; the first: NoFreeLines") as raised:
        do(client.move(sequences, other.address))
    error = raised.value
    assert {one: type(why) for one, why in error.errors.items()} == {sequences[0]: NoFreeLines, sequences[2]: QueueFull}
    assert error.moved == (Moved(sequences[1], other.address, 78, sequences[1].handle),)
    assert [one.server_epoch for one in sequences] == [77, 78, 77]
    np.testing.assert_array_equal(do(client.decode(sequences, tokens(3))), tokens(3))
    # Of several servers each is asked; the one that knows no such target stops no other.
    with pytest.raises(MoveError) as raised:
        do(client.move(sequences, third.address))
    assert list(raised.value.errors) == [sequences[1]] and len(raised.value.moved) == 2


def test_what_ends_the_whole_call_is_raised_itself(
    driven: Any, clients: Callable[..., Any], server: Any, other: Any
) -> None:
    do, client = driven.do, clients(other)
    sequences = do(client.open_many(2))
    with pytest.raises(MoveTargetRefused):
        do(client.move(sequences, other.address))
    with pytest.raises(TypeError, match="target: expected an address, got FakeServer"):
        do(client.move(sequences, other))
    server.targets[other.address] = other
    server.states.empty_answers.add("MoveSequences")
    with pytest.raises(ProtocolError, match="asked for 2 sequences to be moved"):
        do(client.move(sequences, other.address))


def test_a_drain_tells_where_sequences_are_moved(driven: Any, server: Any, other: Any) -> None:
    assert driven.do(driven.client.drain(5.0, target=other.address)) == 0
    assert driven.do(driven.client.drain()) == 0
    told = [(request.timeout_ms, request.target) for request in server.requests["Drain"]]
    assert told == [(5000, other.address), (0, "")]
