"""Steps of one sequence and of batches, by both clients: what goes in, what comes out, what the client remembers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.running_sum import HIDDEN, tokens

from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import tensor_pb2
from deltaline_client import (
    AcceptedOutOfRange,
    DuplicateSequence,
    MessageTooLarge,
    NothingToCommit,
    Row,
    RowOutcome,
    SequenceClosed,
    SequenceExpired,
    SequenceState,
    StepError,
    VerifyPending,
)


def sums(*parts: NDArray[Any]) -> NDArray[Any]:
    return np.cumsum(np.concatenate(parts), axis=0)


def test_a_sequence_prefills_and_decodes(driven: Any) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    prompt, token = tokens(5), tokens(1, seed=1)
    np.testing.assert_array_equal(do(sequence.prefill(prompt)), sums(prompt))
    output = do(sequence.decode(token[0]))
    assert output.shape == (HIDDEN,)
    np.testing.assert_array_equal(output, sums(prompt, token)[-1])
    assert do(sequence.decode(token)).shape == (1, HIDDEN)
    assert sequence.position == 7


def test_a_prefill_returns_the_wanted_rows(driven: Any) -> None:
    client, do = driven.client, driven.do
    prompt = tokens(5)
    for output, expected in (("all", sums(prompt)), ("last", sums(prompt)[-1:]), ("none", sums(prompt)[:0])):
        np.testing.assert_array_equal(do(do(client.open()).prefill(prompt, output=output)), expected)


@pytest.mark.parametrize("accepted", [0, 2])
def test_a_remembered_commit_rides_on_the_next_step_alone(driven: Any, server: Any, accepted: int) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    prompt, drafts, more = tokens(3), tokens(4, seed=1), tokens(2, seed=2)
    do(sequence.prefill(prompt))
    np.testing.assert_array_equal(do(sequence.verify(drafts)), sums(prompt, drafts)[3:])
    do(sequence.commit(accepted))
    assert sequence.position == 3 + accepted
    outputs = [do(sequence.decode(token)) for token in more]
    np.testing.assert_array_equal(outputs, sums(prompt, drafts[:accepted], more)[-2:])
    assert not server.requests["CommitSequences"]
    assert [list(request.accepted) for request in server.requests["Step"][-2:]] == [[accepted], [-1]]


def test_a_commit_now_is_sent(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    do(sequence.verify(tokens(3)))
    do(sequence.commit(1, now=True))
    assert (sequence.position, server.streams[sequence.handle][0].position) == (1, 1)
    np.testing.assert_array_equal(do(sequence.decode(tokens(1, seed=1))), sums(tokens(3)[:1], tokens(1, seed=1))[1:])
    assert list(server.requests["Step"][-1].accepted) == [-1]


def test_commits_are_checked_before_they_are_remembered(driven: Any) -> None:
    client, do = driven.client, driven.do
    sequence, other = do(client.open_many(2))
    with pytest.raises(NothingToCommit):
        do(sequence.commit(0))
    do(sequence.verify(tokens(3)))
    with pytest.raises(AcceptedOutOfRange):
        do(sequence.commit(4))
    with pytest.raises(NothingToCommit):
        do(client.commit([sequence, other], [1, 1]))
    do(other.close())
    with pytest.raises(SequenceClosed):
        do(client.commit([sequence, other], [1, 0]))
    with pytest.raises(ValueError, match="2 counts"):
        do(client.commit([sequence, other], [1]))
    for wrong, error in ((1.5, TypeError), (1 << 80, AcceptedOutOfRange)):
        with pytest.raises(error, match=r"^accepted: expected .*, got "):
            do(sequence.commit(wrong))
    with pytest.raises(VerifyPending):
        do(sequence.decode(tokens(1)))


def test_batches_of_each_kind(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(3))
    prompts = [tokens(count, seed=count) for count in (1, 3, 2)]
    for output, prompt in zip(do(client.prefill(sequences, prompts)), prompts, strict=True):
        np.testing.assert_array_equal(output, sums(prompt))
    token = tokens(3, seed=9)
    outputs = do(client.decode(sequences, token))
    np.testing.assert_array_equal(outputs, np.stack([p.sum(0) for p in prompts]) + token)
    drafts = [tokens(count, seed=20 + count) for count in (4, 1, 2)]
    before = [outputs[row] for row in range(3)]
    for row, output in enumerate(do(client.verify(sequences, drafts))):
        np.testing.assert_array_equal(output, before[row] + np.cumsum(drafts[row], axis=0))
    do(client.commit(sequences, [4, 0, 1]))
    assert [sequence.position for sequence in sequences] == [6, 4, 4]
    assert len(server.requests["Step"]) == 3


def test_commits_of_more_rows_than_a_reply_could_refuse_are_two_calls(driven: Any, server: Any) -> None:
    """With a status each, those of 9,197 rows fit the 4 MiB that any client takes."""
    client, do = driven.client, driven.do
    server.info.max_sequences, server.info.inline_limit_bytes = 10_000, 1 << 30
    sequences = do(client.open_many(9198))
    do(client.verify(sequences, np.ones((9198, 1, HIDDEN), np.float32)))
    do(client.commit(sequences, [1] * 9198, now=True))
    assert sum(len(request.sequence) for request in server.requests["CommitSequences"]) == 9198
    assert max(len(request.sequence) for request in server.requests["CommitSequences"]) < 9198
    assert {sequence.position for sequence in sequences} == {1}


def test_a_mixed_step_is_one_request(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    a, b, c = do(client.open_many(3))
    rows = [Row.prefill(a, tokens(3)), Row.decode(b, tokens(1)[0]), Row.verify(c, tokens(2))]
    result = do(client.step(rows, priority=3, queue_timeout_s=0.5, span=1))
    assert [len(output) for output in result.outputs] == [3, 1, 2]
    assert [row.outcome for row in result.rows] == [RowOutcome.EXECUTED] * 3
    assert (result.timing.queue_s, result.timing.batch_rows) == (0.001, 3)
    (request,) = server.requests["Step"]
    assert list(request.kind) == [layers.ROW_KIND_PREFILL, layers.ROW_KIND_DECODE, layers.ROW_KIND_VERIFY]
    assert (request.priority, request.queue_timeout_us, request.span) == (3, 500_000, 1)
    assert (a.position, a.progress(1).position) == (0, 3)


@pytest.mark.parametrize("output", ["all", "last", "none"])
def test_a_prefill_beyond_the_inline_limit_is_cut_into_steps(driven: Any, server: Any, output: Any) -> None:
    client, do = driven.client, driven.do
    limit = 4096 // (HIDDEN * 4)
    sequence, short = do(client.open_many(2))
    prompt = tokens(2 * limit + 37)
    outputs = do(client.prefill([short, sequence], [tokens(5), prompt], output=output))
    expected = {"all": sums(prompt), "last": sums(prompt)[-1:], "none": sums(prompt)[:0]}[output]
    np.testing.assert_array_equal(outputs[1], expected)
    assert sequence.position == len(prompt)
    assert [list(request.step) for request in server.requests["Step"]] == [[1], [1], [2], [3]]
    assert max(request.query_start_loc[-1] for request in server.requests["Step"]) == limit
    asked = [layers.OutputRows.Name(request.output) for request in server.requests["Step"][1:]]
    before_the_last = "NONE" if output == "last" else output.upper()
    assert asked == [f"OUTPUT_ROWS_{rows}" for rows in (before_the_last, before_the_last, output.upper())]


def test_rows_that_do_not_fit_one_request_go_in_the_next(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    server.info.inline_limit_bytes = 5 * HIDDEN * 4
    sequences = do(client.open_many(7))
    outputs = do(client.verify(sequences, [tokens(3, seed=row) for row in range(7)]))
    for row, output in enumerate(outputs):
        np.testing.assert_array_equal(output, sums(tokens(3, seed=row)))
    assert [len(request.sequence) for request in server.requests["Step"]] == [1] * 7


def test_a_verify_is_never_cut(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    server.info.inline_limit_bytes = 2 * HIDDEN * 4
    sequence = do(client.open())
    with pytest.raises(MessageTooLarge, match=r"hidden: a message holds 2 of 3 tokens, and a verify is one"):
        do(sequence.verify(tokens(3)))
    assert not server.requests["Step"] and not sequence.unfinished
    np.testing.assert_array_equal(do(sequence.verify(tokens(2))), sums(tokens(2)))


def test_a_row_that_is_refused_for_good_loses_no_other_result(driven: Any) -> None:
    client, do = driven.client, driven.do
    good, gone, third = do(client.open_many(3))
    do(client.close([gone]))
    with pytest.raises(StepError) as caught:
        do(client.decode([good, gone, third], tokens(3)))
    assert list(caught.value.errors) == [1]
    assert isinstance(caught.value.errors[1], SequenceExpired)
    np.testing.assert_array_equal(caught.value.results[2].output, tokens(3)[2:])
    assert [row.outcome for row in caught.value.results] == [1, RowOutcome.REFUSED, 1]
    assert (good.position, gone.position, third.position) == (1, 0, 1)
    with pytest.raises(SequenceExpired) as alone:
        do(gone.decode(tokens(1)))
    assert isinstance(alone.value.__cause__, StepError)


@pytest.mark.parametrize("value", ["float64", "int32", "bfloat16", "torch float32", "torch bfloat16"])
@pytest.mark.parametrize("served", ["float32", "bfloat16"])
def test_inputs_become_the_servers_type(driven: Any, server: Any, value: str, served: str) -> None:
    client, do = driven.client, driven.do
    if served == "bfloat16":
        server.info.dtype = tensor_pb2.DATA_TYPE_BFLOAT16
    hidden: Any = tokens(3)
    if value.startswith("torch"):
        torch = pytest.importorskip("torch")
        hidden = torch.from_numpy(hidden).to(getattr(torch, value.split()[1]))
    else:
        hidden = hidden.astype(ml_dtypes.bfloat16 if value == "bfloat16" else value)
    output = do(do(client.open()).prefill(hidden))
    assert output.dtype == (ml_dtypes.bfloat16 if served == "bfloat16" else np.float32)
    np.testing.assert_array_equal(output.astype(np.float32), sums(tokens(3)))
    output[0] = 0  # the caller's own memory


def test_wrong_arrays_are_named(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequence, other = do(client.open_many(2))
    for method, hidden, message in (
        (sequence.prefill, np.zeros((2, 9)), r"width 8, \[\.\.\., 8\], got shape \(2, 9\)"),
        (
            sequence.prefill,
            np.zeros((0, 8)),
            r"^hidden: expected shape \[tokens, 8\] of at least one token, got \(0, 8\)",
        ),
        (sequence.prefill, np.float32(1), "width 8"),
        (sequence.decode, np.zeros((2, 8)), r"one token in a decode row, \[1, 8\], got shape \(2, 8\)"),
        (sequence.verify, np.zeros((5, 8)), "at most 4"),
    ):
        with pytest.raises(ValueError, match=message):
            do(method(hidden))
    with pytest.raises(TypeError, match="numbers"):
        do(sequence.decode(np.array(["x"] * 8)))
    with pytest.raises(ValueError, match="output"):
        do(sequence.prefill(tokens(1), output="first"))
    with pytest.raises(ValueError, match="2 rows"):
        do(client.decode([sequence, other], tokens(3)))
    with pytest.raises(DuplicateSequence):
        do(client.decode([sequence, sequence], tokens(2)))
    assert not server.requests["Step"]
    assert do(sequence.decode(tokens(1)[0])).shape == (HIDDEN,)


@pytest.mark.parametrize("name", ["timeout", "queue_timeout", "waypoints", "output", "span_"])
def test_keywords_that_no_step_takes_are_named(driven: Any, server: Any, name: str) -> None:
    client, do = driven.client, driven.do
    one, other = pair = do(client.open_many(2))
    wrong: Any = {name: "none"}
    token, drafts = tokens(2), tokens(4).reshape(2, 2, HIDDEN)
    calls: list[Callable[[], Any]] = [
        lambda: client.decode(pair, token, **wrong),
        lambda: client.verify(pair, drafts, **wrong),
        lambda: one.decode(token[0], **wrong),
        lambda: one.verify(token, **wrong),
        lambda: client.resume(pair, **wrong),
        lambda: one.resume(**wrong),
    ]
    if name != "output":
        calls += [lambda: client.prefill(pair, drafts, **wrong), lambda: client.step([Row.decode(one, token)], **wrong)]
        calls += [lambda: other.prefill(token, **wrong)] * (name != "waypoints")
    for call in calls:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; .* span, .* timeout_s"):
            do(call())
    assert not server.requests["Step"]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"span": -1}, "span: expected 0 .. 4294967295, got -1"),
        ({"span": 1 << 40}, "span: expected 0 .. 4294967295, got 1099511627776"),
        ({"span": 0.5}, "span: expected a whole number, got 0.5"),
        ({"priority": 8}, "priority: expected -8 .. 7, got 8"),
        ({"priority": 1 << 40}, "priority: expected -8 .. 7, got 1099511627776"),
        ({"priority": 1.5}, "priority: expected a whole number, got 1.5"),
    ],
)
def test_numbers_that_no_step_takes_are_named(driven: Any, server: Any, option: Any, expected: str) -> None:
    client, do = driven.client, driven.do
    one, other = pair = do(client.open_many(2))
    calls: list[Callable[[], Any]] = [
        lambda: client.decode(pair, tokens(2), **option),
        lambda: client.verify(pair, tokens(2)[:, None], **option),
        lambda: client.prefill(pair, tokens(2)[:, None], **option),
        lambda: client.resume(pair, **option),
        lambda: one.decode(tokens(1)[0], **option),
        lambda: other.prefill(tokens(2), **option),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError), match=f"^{expected}$"):
            do(call())
    assert not server.requests["Step"]


@pytest.mark.parametrize("count", [-1, 0, 1.5, 1 << 40])
def test_a_count_that_no_open_takes_is_named(driven: Any, server: Any, count: Any) -> None:
    expected = f"count: expected {'a whole number' if count == 1.5 else '1 .. 4294967295'}, got {count}"
    with pytest.raises((TypeError, ValueError), match=f"^{expected}$"):
        driven.do(driven.client.open_many(count))
    assert not server.requests["OpenSequences"]


def test_the_life_of_sequences(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(2, lease_s=1.5))
    assert server.requests["OpenSequences"][0].lease_ms == 1500
    do(client.verify(sequences[:1], [tokens(2)]))
    described = do(client.describe(sequences))
    assert [one.state for one in described] == [SequenceState.OPEN] * 2
    assert (described[0].spans[0].step, described[0].spans[0].pending_tokens) == (1, 2)
    assert described[0].lease_remaining_s == 1.5
    assert do(client.renew(sequences, 3.0)) == [SequenceState.OPEN] * 2
    assert server.requests["RenewLeases"][0].lease_ms == 3000
    assert do(client.close(sequences)) == [SequenceState.CLOSED] * 2
    assert do(client.load()).sequences_open == 0
    assert do(client.drain(2.0)) == 0
    assert server.requests["Drain"][0].timeout_ms == 2000


def test_info_is_asked_for_once(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    info = do(client.info())
    assert (info.hidden_size, info.scope, info.dtype, info.default_lease_s) == (HIDDEN, "block", np.float32, 60.0)
    do(do(client.open()).decode(tokens(1)))
    assert len(server.requests["GetServerInfo"]) == 1
    server.info.server_epoch = 78  # the server was restarted
    do(do(client.open()).decode(tokens(1)))
    assert len(server.requests["GetServerInfo"]) == 2
