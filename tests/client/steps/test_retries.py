"""What the client does when answers are lost or rows are refused: the same step again, until its outcome is known."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.running_sum import HIDDEN, tokens

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client import (
    AsyncClient,
    Client,
    CommitConflict,
    DeadlineExceeded,
    Draining,
    InvalidBatch,
    NoFreeLines,
    NonFiniteInput,
    ProtocolError,
    QueueDeadline,
    QueueFull,
    Retry,
    Row,
    RowOutcome,
    StateElsewhere,
    StateLost,
    StatePoisoned,
    StepError,
    StepUnfinished,
    Unavailable,
)
from deltaline_client._transport.retry import Attempts
from deltaline_server.errors import Reason

LOST = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED]


@pytest.mark.parametrize("code", LOST, ids=lambda code: str(code.name))
def test_a_lost_reply_is_asked_for_again_with_the_same_bytes(driven: Any, server: Any, code: grpc.StatusCode) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    do(sequence.verify(tokens(2)))
    do(sequence.commit(1))
    server.lose("Step", code)
    server.lose("Step", code)
    token = tokens(1, seed=1)
    [row] = do(client.step([Row.decode(sequence, token)])).rows
    np.testing.assert_array_equal(row.output, tokens(2)[:1] + token)
    assert row.outcome is RowOutcome.REPLAYED
    first, *others = [request.SerializeToString(deterministic=True) for request in server.requests["Step"][1:]]
    assert others == [first, first]
    assert (sequence.position, server.streams[sequence.handle][0].step) == (2, 2)


def test_without_retry_info_a_refusal_is_final(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    for reason, error in ((Reason.QUEUE_FULL, QueueFull), (Reason.INVALID_BATCH, InvalidBatch)):
        server.refuse("Step", reason)
        with pytest.raises(error) as caught:
            do(sequence.decode(tokens(1)))
        assert caught.value.reason == reason.name
        assert caught.value.metadata == {"step": "7"}
    assert not sequence.unfinished
    np.testing.assert_array_equal(do(sequence.decode(tokens(1, seed=1))), tokens(1, seed=1))


def test_only_refused_rows_are_sent_again(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(4))
    server.refuse_rows({1: Reason.TOO_MANY_IN_FLIGHT, 3: Reason.QUEUE_FULL}, 0.002)
    server.lose("Step")
    hidden = tokens(4)
    np.testing.assert_array_equal(do(client.decode(sequences, hidden)), hidden)
    again = [sequences[1].handle, sequences[3].handle]
    assert [list(request.sequence) for request in server.requests["Step"][1:]] == [again, again]
    assert [sequence.position for sequence in sequences] == [1] * 4


def test_a_row_may_be_refused_for_good_while_another_is_sent_again(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(3))
    hidden = tokens(3)
    hidden[0, 0] = np.nan
    server.refuse_rows({2: Reason.QUEUE_FULL}, 0.002)
    with pytest.raises(StepError, match="NonFiniteInput") as caught:
        do(client.decode(sequences, hidden))
    assert isinstance(caught.value.errors[0], NonFiniteInput)
    np.testing.assert_array_equal([row.output[0] for row in caught.value.results[1:]], hidden[1:])
    assert [sequence.position for sequence in sequences] == [0, 1, 1]


def test_a_queue_deadline_of_the_caller_is_final(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    server.refuse_rows({0: Reason.QUEUE_DEADLINE}, 0.001)
    with pytest.raises(QueueDeadline):
        do(sequence.decode(tokens(1), queue_timeout_s=0.1))
    server.refuse_rows({0: Reason.QUEUE_DEADLINE}, 0.001)
    do(sequence.decode(tokens(1)))


def test_a_refused_step_keeps_the_commit_for_the_next(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    do(sequence.verify(tokens(3)))
    do(sequence.commit(2))
    with pytest.raises(NonFiniteInput):
        do(sequence.decode(np.full(HIDDEN, np.inf)))
    np.testing.assert_array_equal(do(sequence.decode(tokens(1)[0])), tokens(3)[:2].sum(0) + tokens(1)[0])


@pytest.mark.parametrize("again", ["resume", "the same call", "resume the batch"])
def test_an_unknown_outcome_is_remembered_and_resumed(driven: Any, once: Any, server: Any, again: str) -> None:
    do = driven.do
    sequence = do(once.open())
    do(sequence.prefill(tokens(2)))
    server.hang("Step")
    with pytest.raises(DeadlineExceeded):
        do(sequence.decode(tokens(1), timeout_s=0.2))
    assert sequence.unfinished
    assert sequence.position == 2
    with pytest.raises(StepUnfinished):
        do(sequence.decode(tokens(1) + 1))
    server.released.set()
    if again == "resume":
        output = do(sequence.resume())
    elif again == "the same call":
        output = do(sequence.decode(tokens(1)))
    else:
        output = do(once.resume([sequence])).outputs[0]
    np.testing.assert_array_equal(output, tokens(2).sum(0) + tokens(1))
    assert (sequence.position, server.streams[sequence.handle][0].step) == (3, 2)
    assert not sequence.unfinished
    with pytest.raises(ValueError, match="no unfinished step"):
        do(sequence.resume())


@pytest.mark.parametrize("form", ["decode one", "decode", "verify", "prefill", "step", "a long prefill"])
def test_an_unfinished_step_keeps_its_tokens_when_the_caller_changes_them(
    driven: Any, once: Any, server: Any, form: str
) -> None:
    do = driven.do
    one, other = pair = do(once.open_many(2))
    hidden = np.stack([tokens({"decode": 1, "a long prefill": 150}.get(form, 3), seed=row) for row in range(2)])
    wanted = np.cumsum(hidden, axis=1)
    calls: dict[str, Any] = {
        "decode one": lambda: one.decode(hidden[0, 0]),
        "decode": lambda: once.decode(pair, hidden.reshape(2, HIDDEN)),
        "verify": lambda: once.verify(pair, hidden),
        "prefill": lambda: once.prefill(pair, list(hidden)),
        "step": lambda: once.step([Row.verify(one, hidden[0]), Row.prefill(other, hidden[1])]),
        "a long prefill": lambda: one.prefill(hidden[0]),
    }
    server.lose("Step")
    with pytest.raises((Unavailable, StepError)):
        do(calls[form]())
    hidden += 1
    with pytest.raises(StepUnfinished):
        do(calls[form]())
    unfinished = [sequence for sequence in pair if sequence.unfinished]
    for output, row in zip(do(once.resume(unfinished)).outputs, wanted, strict=False):
        np.testing.assert_array_equal(output, row[: len(output)])


def test_a_long_prefill_is_resumed_where_it_stopped(driven: Any, once: Any, server: Any) -> None:
    do = driven.do
    sequence = do(once.open())
    prompt = tokens(300)
    server.pass_by("Step")
    server.lose("Step")
    with pytest.raises(Unavailable):
        do(sequence.prefill(prompt, output="last"))
    assert sequence.position == 128
    np.testing.assert_array_equal(do(sequence.resume()), prompt.sum(axis=0, keepdims=True))
    steps = [request.step[0] for request in server.requests["Step"]]
    assert (steps[:2], steps[-1], sequence.position) == ([1, 2], 3, 300)


def test_the_last_refusal_is_told_when_time_is_over(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    server.refuse("Step", Reason.QUEUE_FULL, 0.01)
    server.refuse("Step", Reason.QUEUE_FULL, 60.0)
    with pytest.raises(QueueFull):
        do(sequence.decode(tokens(1)))
    assert not sequence.unfinished


@pytest.mark.parametrize(
    ("of", "reason", "error"),
    [
        ("request", Reason.QUEUE_FULL, QueueFull),
        ("row", Reason.QUEUE_FULL, QueueFull),
        ("row", Reason.STATE_ELSEWHERE, StateElsewhere),
    ],
)
def test_a_refusal_after_a_lost_reply_leaves_the_step_in_doubt(
    driven: Any, server: Any, of: str, reason: Reason, error: type[Exception]
) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    server.lose("Step")
    if of == "request":
        server.refuse("Step", reason)
    else:
        server.refuse_rows({0: reason})
    with pytest.raises(error):
        do(sequence.decode(tokens(1)))
    assert sequence.unfinished
    np.testing.assert_array_equal(do(sequence.resume()), tokens(1))


def test_max_attempts_bounds_the_attempts(driven: Any, once: Any, server: Any) -> None:
    sequence = driven.do(once.open())
    server.lose("Step")
    with pytest.raises(Unavailable):
        driven.do(sequence.decode(tokens(1)))
    assert len(server.requests["Step"]) == 1


@pytest.mark.parametrize(
    ("reason", "error"), [(Reason.STATE_POISONED, StatePoisoned), (Reason.STATE_LOST, StateLost)], ids=str
)
def test_a_lost_state_is_never_retried(driven: Any, server: Any, reason: Reason, error: type[Exception]) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    server.refuse_rows({0: reason})
    with pytest.raises(error):
        do(sequence.decode(tokens(1)))
    assert len(server.requests["Step"]) == 1


def test_open_is_retried_with_the_same_token_but_not_during_a_drain(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    server.lose("OpenSequences")
    server.refuse("OpenSequences", Reason.NO_FREE_LINES, 0.002)
    assert len(do(client.open_many(2))) == 2
    assert len(server.streams) == 2
    assert len({request.open_token for request in server.requests["OpenSequences"]}) == 1
    server.refuse("OpenSequences", Reason.DRAINING, 0.001)
    with pytest.raises(Draining):
        do(client.open())
    server.refuse("OpenSequences", Reason.NO_FREE_LINES, 60.0)
    with pytest.raises(NoFreeLines):
        do(client.open())


def test_a_commit_is_sent_again_until_it_is_answered(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    a, b = do(client.open_many(2))
    do(client.verify([a, b], [tokens(3), tokens(2)]))
    server.refuse_rows({1: Reason.QUEUE_FULL}, 0.002, method="CommitSequences")
    server.lose("CommitSequences")
    do(client.commit([a, b], [2, 1], now=True))
    assert (a.position, b.position) == (2, 1)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_commit_in_doubt_stays_what_it_is(driven: Any, once: Any, server: Any, is_elsewhere: bool) -> None:
    do = driven.do
    sequence = do(once.open())
    do(sequence.verify(tokens(2)))
    server.lose("CommitSequences")
    with pytest.raises(Unavailable):
        do(sequence.commit(1, now=True))
    if is_elsewhere:  # who answers so knows nothing of the first
        server.refuse_rows({0: Reason.STATE_ELSEWHERE}, method="CommitSequences")
        with pytest.raises(StateElsewhere):
            do(sequence.commit(1, now=True))
    with pytest.raises(CommitConflict):
        do(sequence.commit(2))
    np.testing.assert_array_equal(do(sequence.decode(tokens(1)[0])), tokens(2)[0] + tokens(1)[0])
    do(sequence.verify(tokens(2)))
    do(sequence.commit(2))
    do(sequence.commit(1))  # the doubt was that commit's


def test_a_reply_against_the_protocol_is_an_error_and_a_doubt(
    driven: Any, once: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, do = server.Step, driven.do

    def spoiled(request: Any, context: Any) -> Any:
        reply = honest(request, context)
        reply.outcome.append(layers.ROW_OUTCOME_EXECUTED)
        return reply

    sequence = do(once.open())
    with monkeypatch.context() as patch:
        patch.setattr(server, "Step", spoiled)
        with pytest.raises(ProtocolError):
            do(sequence.decode(tokens(1)))
    np.testing.assert_array_equal(do(sequence.resume()), tokens(1))


def test_an_error_of_the_channel_is_no_error_of_the_service(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    server.lose("Step", grpc.StatusCode.RESOURCE_EXHAUSTED)
    with pytest.raises(ProtocolError, match="broke"):
        do(sequence.decode(tokens(1)))
    assert sequence.unfinished


def test_an_unreachable_server_is_unavailable(driven: Any, once: Any, server: Any) -> None:
    server.server.stop(None).wait()
    with pytest.raises(Unavailable):
        driven.do(once.open())


async def test_a_cancelled_step_is_resumed(server: Any) -> None:
    async with AsyncClient(server.address) as client:
        sequence = await client.open()
        await client.info()
        server.hang("Step")
        token = tokens(1)
        task = asyncio.create_task(sequence.decode(token))
        await asyncio.to_thread(server.arrived.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        token[:] = 9  # the caller's again
        server.released.set()
        np.testing.assert_array_equal(await sequence.resume(), tokens(1))
        assert server.streams[sequence.handle][0].step == 1


async def test_leaving_a_sequences_block_closes_it(server: Any) -> None:
    with Client(server.address) as client, client.open() as sequence:
        sequence.decode(tokens(1))
    async with AsyncClient(server.address) as other, await other.open() as another:
        await another.decode(tokens(1))
    assert server.streams == {}


def test_the_error_of_the_body_is_not_hidden_by_that_of_closing(server: Any) -> None:
    with Client(server.address, retry=Retry(max_attempts=1)) as client:
        server.lose("CloseSequences")
        with pytest.raises(KeyError), client.open():
            raise KeyError
        server.lose("CloseSequences")
        with pytest.raises(Unavailable), client.open():
            pass


def test_waits_grow_and_jitter_downwards() -> None:
    now = [0.0]
    retry = Retry(
        initial_backoff_s=1.0, max_backoff_s=4.0, jitter=0.5, generator=random.Random(1), clock=lambda: now[0]
    )
    attempts = Attempts(retry, 100.0)
    for bound in (1.0, 2.0, 4.0, 4.0):
        assert attempts.next_timeout_s() == 30.0
        delay_s = attempts.delay_s(None)
        assert delay_s is not None
        assert bound / 2 <= delay_s <= bound
    assert attempts.delay_s(9.0, None, 3.0) == 9.0
    now[0] = 98.0
    assert attempts.next_timeout_s() == 2.0
    assert attempts.delay_s(9.0) is None
    attempts.progressed()
    attempts.next_timeout_s()
    assert attempts.delay_s(None) is not None


@pytest.mark.parametrize("multiplier", [1, 2.0, 1e6, 1e200, sys.float_info.max, 10**308], ids="{:g}".format)
def test_waits_end_at_the_longest_whatever_they_grow_by(multiplier: float) -> None:
    attempts = Attempts(Retry(multiplier=multiplier, max_backoff_s=4.0, jitter=0.0, clock=lambda: 0.0), 100.0)
    waits = []
    for _ in range(70):
        assert attempts.next_timeout_s() == 30.0
        waits.append(attempts.delay_s())
    assert waits[:2] == [0.05, min(4.0, 0.05 * multiplier)]
    assert waits[-1] == (0.05 if multiplier == 1 else 4.0)


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"attempt_timeout_s": 0.0}, {"jitter": 1.5}], ids=str)
def test_retry_refuses_nonsense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Retry(**wrong)
