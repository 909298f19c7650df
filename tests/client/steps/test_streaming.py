"""Many steps in flight on one stream: order, windows, refusals in the middle, broken streams, calls side by side."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.running_sum import HIDDEN, status_of, tokens

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client import AsyncClient, Client, Retry, StepError, StepStale, Unavailable
from deltaline_client._steps import exchange
from deltaline_client._steps.sequences import begin
from deltaline_client._transport.caller import Caller
from deltaline_client._transport.channels import spread
from deltaline_client._transport.channels.channel import OPTIONS
from deltaline_client._transport.channels.stream import Mailbox, StepStream
from deltaline_client._transport.flow import Server
from deltaline_server.errors import Reason

MIB = 1 << 20
LIMIT = 4096 // (HIDDEN * 4)
"""Tokens that the fake takes in one request."""


class Script:
    """Takes over a fake's streams: the test sees each request and says what is answered, and when."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.came: queue.SimpleQueue[layers.StepStreamRequest] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[layers.StepStreamResponse | None] = queue.SimpleQueue()
        server.script = self._stream

    def _stream(self, requests: Any, context: Any) -> Iterator[layers.StepStreamResponse]:
        def collect() -> None:
            try:
                for request in requests:
                    self.came.put(request)
            except grpc.RpcError:
                pass  # the stream is over

        threading.Thread(target=collect, daemon=True).start()
        while (answer := self.answers.get(timeout=60)) is not None:
            yield answer
        context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")

    def take(self, count: int) -> list[layers.StepStreamRequest]:
        return [self.came.get(timeout=60) for _ in range(count)]

    def apply(self, request: layers.StepStreamRequest) -> layers.StepStreamResponse:
        """Run a step; return the answer to it."""
        return layers.StepStreamResponse(
            correlation_id=request.correlation_id, step=self._server.Step(request.step, None)
        )

    def break_off(self) -> None:
        self.answers.put(None)


@pytest.fixture
def script(server: Any) -> Script:
    return Script(server)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_a_long_prefill_has_a_window_of_steps_in_flight(
    server: Any, driven: Any, script: Script, pool: ThreadPoolExecutor
) -> None:
    sequence = driven.do(driven.client.open())
    prompt = tokens(12 * LIMIT - 5)
    call = pool.submit(lambda: driven.do(sequence.prefill(prompt)))
    first = script.take(8)
    assert [list(request.step.step) for request in first] == [[step] for step in range(1, 9)]
    with pytest.raises(queue.Empty):
        script.came.get(timeout=0.1)
    answers = [script.apply(request) for request in first]
    for index in (7, 3, 0, 5, 1, 6, 2, 4):  # in any order
        script.answers.put(answers[index])
    for request in script.take(4):
        script.answers.put(script.apply(request))
    np.testing.assert_array_equal(call.result(60), np.cumsum(prompt, axis=0))
    assert (sequence.position, server.streams_opened) == (len(prompt), 1)


@pytest.mark.parametrize("output", ["all", "last", "none"])
@pytest.mark.parametrize("fault", ["refused", "refused row", "stream broken"])
def test_a_long_prefill_goes_on_after_a_fault_in_the_middle(driven: Any, server: Any, output: Any, fault: str) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    prompt = tokens(5 * LIMIT)
    server.pass_by("Step")
    server.pass_by("Step")
    if fault == "refused":
        server.refuse("Step", Reason.QUEUE_FULL, 0.002)
    elif fault == "refused row":
        server.refuse_rows({0: Reason.TOO_MANY_IN_FLIGHT}, 0.002)
    else:
        server.lose("Step")
    expected = np.cumsum(prompt, axis=0)
    wanted = {"all": expected, "last": expected[-1:], "none": expected[:0]}[output]
    np.testing.assert_array_equal(do(sequence.prefill(prompt, output=output)), wanted)
    assert (sequence.position, server.streams[sequence.handle][0].step) == (len(prompt), 5)
    assert server.streams_opened == (2 if fault == "stream broken" else 1)
    np.testing.assert_array_equal(do(sequence.decode(tokens(1)[0])), expected[-1] + tokens(1)[0])


def test_a_prefill_that_is_refused_for_good_says_how_far_it_came(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequence, other = do(client.open_many(2))
    prompt, fine = tokens(5 * LIMIT), tokens(3 * LIMIT, seed=1)
    prompt[3 * LIMIT] = np.nan
    with pytest.raises(StepError) as caught:
        do(client.prefill([sequence, other], [prompt, fine]))
    bad, good = caught.value.results
    assert (list(caught.value.errors), bad.tokens, sequence.position) == ([0], 3 * LIMIT, 3 * LIMIT)
    np.testing.assert_array_equal(bad.output, np.cumsum(prompt[: 3 * LIMIT], axis=0))
    np.testing.assert_array_equal(good.output, np.cumsum(fine, axis=0))
    assert not sequence.unfinished
    np.testing.assert_array_equal(do(sequence.decode(tokens(1)[0])), prompt[: 3 * LIMIT].sum(0) + tokens(1)[0])


@pytest.mark.parametrize("output", ["all", "last"])
def test_replies_that_are_lost_with_the_stream(
    driven: Any, server: Any, script: Script, pool: ThreadPoolExecutor, output: Any
) -> None:
    """A server that gave replies up: what was applied stays applied, and lost outputs are told."""
    sequence = driven.do(driven.client.open())
    prompt = tokens(3 * LIMIT)
    call = pool.submit(lambda: driven.do(sequence.prefill(prompt, output=output)))
    first, *others = script.take(3)
    script.answers.put(script.apply(first))
    for request in others:
        script.apply(request)
    script.break_off()
    for request in script.take(2):
        script.answers.put(script.apply(request))
    if output == "all":
        with pytest.raises(StepStale, match=f"from position {LIMIT} on were applied") as caught:
            call.result(60)
        cause = caught.value.__cause__
        assert isinstance(cause, StepError)
        np.testing.assert_array_equal(cause.results[0].output, np.cumsum(prompt[:LIMIT], axis=0))
    else:
        np.testing.assert_array_equal(call.result(60), prompt.sum(axis=0, keepdims=True))
    assert (sequence.position, sequence.progress().step, sequence.unfinished) == (3 * LIMIT, 3, False)


def test_a_step_that_was_answered_is_not_sent_again_with_one_before_it(
    driven: Any, server: Any, script: Script, pool: ThreadPoolExecutor
) -> None:
    sequence = driven.do(driven.client.open())
    prompt = tokens(3 * LIMIT)
    call = pool.submit(lambda: driven.do(sequence.prefill(prompt, output="none")))
    first, *others = script.take(3)
    script.apply(first)
    for request in others:
        script.answers.put(script.apply(request))
    script.break_off()
    [again] = script.take(1)
    assert list(again.step.step) == [1]
    script.answers.put(script.apply(again))
    assert call.result(60).shape == (0, HIDDEN)
    assert (sequence.position, sequence.progress().step, sequence.unfinished) == (3 * LIMIT, 3, False)


def test_a_step_without_an_answer_is_remembered_whatever_became_of_those_behind_it(
    driven: Any, once: Any, server: Any, script: Script, pool: ThreadPoolExecutor
) -> None:
    sequence = driven.do(once.open())
    call = pool.submit(lambda: driven.do(sequence.prefill(tokens(2 * LIMIT))))
    _, behind = script.take(2)
    status = status_of(Reason.QUEUE_FULL)
    script.answers.put(layers.StepStreamResponse(correlation_id=behind.correlation_id, status=status))
    script.break_off()
    with pytest.raises(Unavailable):
        call.result(60)
    assert sequence.unfinished


def test_steps_that_another_has_taken_are_not_ours(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequence = do(client.open())
    (other,) = begin(client, type(sequence), Server(sequence.server_epoch, ""), [sequence.handle], 0, None, b"")
    do(other.prefill(tokens(2 * LIMIT)))
    with pytest.raises(StepStale):
        do(sequence.prefill(tokens(2 * LIMIT, seed=1)))
    assert (sequence.position, sequence.unfinished) == (0, False)


def test_calls_of_many_threads_share_a_stream(server: Any) -> None:
    with Client(server.address) as client, ThreadPoolExecutor(8) as threads:
        sequences = client.open_many(8)
        hidden = [tokens(20, seed=row) for row in range(8)]

        def run(row: int) -> NDArray[Any]:
            return np.concatenate([sequences[row].decode(hidden[row][i : i + 1]) for i in range(20)])

        for row, outputs in enumerate(threads.map(run, range(8))):
            np.testing.assert_array_equal(outputs, np.cumsum(hidden[row], axis=0))
    assert server.streams_opened == 1


def test_a_broken_stream_breaks_no_call(server: Any) -> None:
    with Client(server.address) as client, ThreadPoolExecutor(8) as threads:
        sequences = client.open_many(8)
        for _ in range(4):
            for _ in range(7):
                server.pass_by("Step")
            server.lose("Step")
        list(threads.map(lambda sequence: [sequence.decode(tokens(1)) for _ in range(10)], sequences))
        assert [server.streams[sequence.handle][0].step for sequence in sequences] == [10] * 8
        assert [sequence.position for sequence in sequences] == [10] * 8
    assert server.streams_opened == 5


async def test_a_cancelled_call_leaves_the_stream_to_the_others(server: Any, script: Script) -> None:
    async with AsyncClient(server.address) as client:
        one, other = await client.open_many(2)
        calls = [asyncio.create_task(sequence.decode(tokens(1))) for sequence in (one, other)]
        first, second = await asyncio.to_thread(script.take, 2)
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        script.answers.put(script.apply(first))  # nobody waits for it
        script.answers.put(script.apply(second))
        np.testing.assert_array_equal(await calls[1], tokens(1))
        assert (one.unfinished, other.unfinished, server.streams_opened) == (True, False, 1)
        resumed = asyncio.create_task(one.resume())
        script.answers.put(script.apply(*(await asyncio.to_thread(script.take, 1))))
        np.testing.assert_array_equal(await resumed, tokens(1))
        script.break_off()


@pytest.mark.parametrize("form", ["one row", "several rows"])
def test_a_step_larger_than_the_channel_carries_is_cut_beside_those_of_others(
    server: Any, script: Script, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    server.info.inline_limit_bytes = 4 * MIB
    limits = [(name, MIB if "message_length" in name else value) for name, value in OPTIONS]
    monkeypatch.setattr(spread, "OPTIONS", tuple(limits))
    monkeypatch.setattr(exchange, "MAX_TENSOR_BYTES", MIB // 2)
    tokens_of_a_mib = MIB // (HIDDEN * 4)
    with Client(server.address, retry=Retry(max_attempts=1)) as client:
        held, *others = client.open_many(4)
        call = pool.submit(held.decode, tokens(1))
        [first] = script.take(1)
        counts = [2 * tokens_of_a_mib] if form == "one row" else [tokens_of_a_mib // 2] * 3
        hidden = [tokens(count, seed=row) for row, count in enumerate(counts)]
        larger = pool.submit(client.prefill, others[: len(hidden)], hidden)
        for request in script.take(sum(counts) * 2 // tokens_of_a_mib):
            script.answers.put(script.apply(request))
        for outputs, row in zip(larger.result(60), hidden, strict=True):
            np.testing.assert_array_equal(outputs, np.cumsum(row, axis=0))
        script.answers.put(script.apply(first))
        np.testing.assert_array_equal(call.result(60), tokens(1))
        script.break_off()
    assert server.streams_opened == 1


def test_a_stream_that_fails_by_a_bug_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", told.put)

    def fail(requests: Iterator[bytes], metadata: Any) -> Iterator[bytes]:
        next(requests)
        raise RuntimeError("a bug")
        yield b""

    stream, mailbox = StepStream(fail, Caller()), Mailbox()
    for number in (1, 2):  # the second one opens another stream
        stream.send(number, [b""], mailbox)
        answer = mailbox.get(timeout=60)
        assert answer[0] == number and isinstance(answer[1], Unavailable)
        assert told.get(timeout=60).exc_type is RuntimeError
