"""Batches and what becomes of them: which rows run together, cut rows, deadlines, failures, and the stop."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, PREFILL, VERIFY, Rig, checksum, outputs, reason, refuses, turns

from deltaline_server.errors import Reason
from deltaline_server.scheduling.observer import BatchTiming
from deltaline_server.step import OutputRows, RowOutcome, SpanShapes, StepResult
from deltaline_server.tables.sequence import SequenceState


async def test_prefills_are_cut_and_decodes_run_between_the_chunks() -> None:
    rig = Rig(eager=False, chunk_tokens=128)
    a, b = rig.open(2)
    tokens = [float(i % 11) for i in range(300)]
    long = rig.submit(rig.request((a, PREFILL, 1, 0, -1, tokens), output=OutputRows.LAST))
    await asyncio.sleep(0)
    assert len(rig.engine.waiting) == 2  # the second chunk does not wait for the first one's end
    decode = rig.submit(rig.request((b, DECODE, 1, 0, -1, [3])))
    for _ in range(3):
        rig.engine.run()
        await turns(3)
    assert outputs(await decode) == [3] and long.done()
    assert outputs(await long) == [checksum(tokens)]
    assert [int(batch.control[0, -1]) for batch in rig.engine.batches] == [128, 128, 45]
    assert rig.engine.batches[2].num_short == 1


async def test_rows_are_cut_at_multiples_of_the_kernels_chunk() -> None:
    rig = Rig(chunk_tokens=100)
    (a,) = rig.open()
    tokens = [float(i % 7) for i in range(230)]
    assert outputs(await rig.step((a, PREFILL, 1, 0, -1, tokens), output=OutputRows.LAST)) == [checksum(tokens)]
    assert [batch.num_tokens for batch in rig.engine.batches] == [64, 64, 64, 38]


async def test_a_batch_s_times_count_once_for_a_request_with_several_rows_in_it() -> None:
    rig = Rig(chunk_tokens=64)
    short, *long = rig.open(3)
    rows = [(handle, PREFILL, 1, 0, -1, [1.0] * 32) for handle in long]
    # Both long rows, each a piece of its own, and the short one are one batch.
    result = await rig.step((short, DECODE, 1, 0, -1, [1.0]), *rows)
    assert len(rig.engine.batches) == 1 and result.timing is not None
    stages = result.timing.copy_in_s, result.timing.compute_s, result.timing.copy_out_s
    assert stages == (1e-6, 2e-6, 3e-6)
    assert (result.timing.batch_rows, result.timing.batch_tokens) == (3, 65)


async def test_how_long_a_row_waited_is_told_with_its_first_chunk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, told = Rig(chunk_tokens=64), list[BatchTiming]()
    monkeypatch.setattr(rig.counts, "batch_done", told.append)
    (a,) = rig.open()
    await rig.step((a, PREFILL, 1, 0, -1, [1.0] * 200))
    queued = [[(kind, count) for kind, count, _ in timing.queued] for timing in told]
    assert queued == [[(PREFILL, 1)], [], [], []]


async def test_rows_of_waiting_requests_run_in_one_batch_by_priority() -> None:
    rig = Rig(eager=False)
    a, b, c, d = rig.open(4)
    blocker = rig.submit(rig.request((d, DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    waiting = [
        rig.submit(rig.request((handle, DECODE, 1, 0, -1, [token]), priority=priority))
        for handle, token, priority in ((a, 1, 0), (b, 2, 1), (c, 3, -1))
    ]
    rig.engine.release()
    await asyncio.gather(blocker, *waiting)
    assert np.concatenate(rig.engine.batches[1].hidden)[:, 0].tolist() == [2, 1, 3]


async def test_clients_of_one_priority_take_turns_with_their_long_rows() -> None:
    rig = Rig(eager=False, chunk_tokens=64)
    handles = rig.open(4)
    done = [
        rig.submit(rig.request((handle, PREFILL, 1, 0, -1, [float(i)] * 64), client=client, output=OutputRows.NONE))
        for i, (handle, client) in enumerate(zip(handles, ["many", "many", "many", "one"], strict=True))
    ]
    await turns()
    rig.engine.release()
    await asyncio.gather(*done)
    assert [batch.hidden[0][0, 0] for batch in rig.engine.batches] == [0, 1, 3, 2]


async def test_spans_take_turns() -> None:
    rig = Rig(spans=2, eager=False, chunk_tokens=64)
    a, b = rig.open(2)
    long = rig.submit(rig.request((a, PREFILL, 1, 0, -1, [1.0] * 640), span=0))
    await asyncio.sleep(0)
    decode = rig.submit(rig.request((b, DECODE, 1, 0, -1, [3]), span=1))
    for _ in range(3):
        rig.engine.run()
        await turns(3)
    assert decode.done() and not long.done()
    rig.engine.release()
    await long


async def test_a_batch_has_no_more_rows_than_it_may() -> None:
    rig = Rig(eager=False, batch_rows=3, long_rows=2, chunk_tokens=256)
    handles = rig.open(8)
    decodes = [rig.submit(rig.request(*((h, DECODE, 1, 0, -1, [1.0]) for h in handles[:5])))]
    prefills = [rig.submit(rig.request((h, PREFILL, 1, 0, -1, [1.0] * 64))) for h in handles[5:]]
    while rig.scheduler.load().queued_rows:
        await asyncio.sleep(0)
        if rig.engine.waiting:
            rig.engine.run()
    for done in await asyncio.gather(*decodes, *prefills):
        assert (done.outcome == RowOutcome.EXECUTED).all()
    sizes = [(batch.num_short, batch.control.shape[1] - 1 - batch.num_short) for batch in rig.engine.batches]
    assert max(short for short, _ in sizes) == 3 and sum(short for short, _ in sizes) == 5
    assert max(long for _, long in sizes) == 2 and sum(long for _, long in sizes) == 3


async def test_the_end_of_a_cut_row_that_finds_no_room_goes_on_where_it_was_cut() -> None:
    rig = Rig(eager=False, batch_rows=1, chunk_tokens=64)
    a, b, c = rig.open(3)
    tokens = [float(i) for i in range(66)]
    done = [rig.submit(rig.request((b, DECODE, 1, 0, -1, [1]), priority=1))]
    done += [rig.submit(rig.request((a, PREFILL, 1, 0, -1, tokens), output=OutputRows.LAST))]
    await turns()
    done.append(rig.submit(rig.request((c, DECODE, 1, 0, -1, [1]), priority=1)))
    rig.engine.release()
    assert outputs((await asyncio.gather(*done))[1]) == [checksum(tokens)]


@pytest.mark.parametrize("output", list(OutputRows))
async def test_mixed_rows_get_the_outputs_they_want(output: OutputRows) -> None:
    rig = Rig()
    a, b, c = rig.open(3)
    tokens = [float(i) for i in range(1, 101)]
    result = await rig.step(
        (a, PREFILL, 1, 0, -1, tokens), (b, DECODE, 1, 0, -1, [5]), (c, VERIFY, 1, 0, -1, [6, 7]), output=output
    )
    full: list[list[float]] = [[checksum(tokens[:n]) for n in range(1, 101)], [5], [6, 20]]
    wanted = {OutputRows.ALL: slice(None), OutputRows.LAST: slice(-1, None), OutputRows.NONE: slice(0, 0)}[output]
    assert [outputs(result, row) for row in range(3)] == [row[wanted] for row in full]


# -- deadlines ---------------------------------------------------------------------------------------------------------


async def test_a_step_that_is_overdue_takes_those_behind_it_and_none_before_it() -> None:
    rig = Rig(eager=False)
    a, b = rig.open(2)
    blocker = rig.submit(rig.request((b, DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    first = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))
    doomed = rig.submit(rig.request((a, DECODE, 2, 1, -1, [2]), deadline_s=rig.now + 1))
    behind = rig.submit(rig.request((a, DECODE, 3, 2, -1, [3])))
    rig.now += 2
    rig.engine.release()
    await blocker
    assert outputs(await first) == [1]
    assert reason(await doomed) is Reason.QUEUE_DEADLINE
    assert reason(await behind) is Reason.PREDECESSOR_REFUSED
    rig.table.check_integrity()
    assert outputs(await rig.step((a, DECODE, 2, 1, -1, [7]))) == [15]


async def test_a_cut_row_is_not_dropped_after_its_first_chunk() -> None:
    rig = Rig(eager=False, chunk_tokens=64)
    (a,) = rig.open()
    long = rig.submit(rig.request((a, PREFILL, 1, 0, -1, [1.0] * 200), deadline_s=rig.now + 1))
    await asyncio.sleep(0)
    rig.now += 100
    rig.engine.release()
    assert outputs(await long) == [checksum([1.0] * n) for n in range(1, 201)]


async def test_refusing_an_overdue_row_takes_no_more_calls_the_more_there_are() -> None:
    """Many at once are refused on the thread that serves all."""

    async def calls_for(num_rows: int) -> int:
        num_calls = 0

        def count(*_: object) -> None:
            nonlocal num_calls
            num_calls += 1

        rig = Rig(slots=num_rows + 1, eager=False, queue_rows=4096, queue_bytes=1 << 24, reply_bytes=1 << 24)
        first, *others = rig.open(num_rows + 1)
        blocker = rig.submit(rig.request((first, DECODE, 1, 0, -1, [1])))
        await asyncio.sleep(0)
        late = [rig.submit(rig.request((h, DECODE, 1, 0, -1, [1]), deadline_s=rig.now + 1)) for h in others]
        rig.now += 2
        before = sys.getprofile()
        sys.setprofile(count)
        rig.engine.release()
        await asyncio.gather(blocker, *late)
        sys.setprofile(before)
        assert {reason(future.result()) for future in late} == {Reason.QUEUE_DEADLINE}
        return num_calls

    assert await calls_for(400) < 2.5 * await calls_for(200)


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_a_failed_batch_poisons_its_rows_for_good() -> None:
    rig = Rig()
    a, b = rig.open(2)
    await rig.step((b, DECODE, 1, 0, -1, [1]))
    rig.engine.fail_next = True
    assert reason(await rig.step((a, DECODE, 1, 0, -1, [1]))) is Reason.STATE_POISONED
    assert reason(await rig.step((a, DECODE, 1, 0, -1, [1]))) is Reason.STATE_POISONED
    assert outputs(await rig.step((b, DECODE, 2, 1, -1, [2]))) == [5]
    assert rig.close(a) == [SequenceState.CLOSED]
    assert rig.lines.num_used == 1


async def test_stop_refuses_what_waits_and_finishes_what_runs() -> None:
    rig = Rig(eager=False)
    a, b = rig.open(2)
    running = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    behind = rig.submit(rig.request((a, DECODE, 2, 1, -1, [2])))
    waiting = rig.submit(rig.request((b, DECODE, 1, 0, -1, [3])))
    rig.scheduler.stop()
    assert reason(await behind) is Reason.STOPPING and reason(await waiting) is Reason.STOPPING
    with refuses(Reason.STOPPING):
        rig.submit(rig.request((b, DECODE, 1, 0, -1, [3])))
    rig.engine.run()
    assert outputs(await running) == [1]
    await rig.scheduler.drained()
    rig.table.check_integrity()


@pytest.mark.parametrize("reply_turns", [1, 2, 5])
async def test_the_books_are_settled_right_behind_the_reply(reply_turns: int) -> None:
    rig = Rig(eager=False)
    told: list[StepResult] = []
    rig.scheduler.submit(rig.request((rig.open()[0], DECODE, 1, 0, -1, [1])), told.append, reply_turns)
    await turns()
    rig.engine.run()
    while not told:
        await turns(1)
    settled = []
    for _ in range(6):
        settled.append(rig.counts.total.get("executed", 0))
        await turns(1)
    assert settled.index(1) == reply_turns


async def test_rows_that_run_together_may_have_steps_behind_them_or_none() -> None:
    rig = Rig(eager=False)
    a, b, c, d = rig.open(4)
    for busy in (c, d):
        rig.submit(rig.request((busy, DECODE, 1, 0, -1, [1])))
        await turns()
    together = rig.submit(rig.request((a, DECODE, 1, 0, -1, [2]), (b, DECODE, 1, 0, -1, [3])))
    behind = rig.submit(rig.request((b, DECODE, 2, 1, -1, [4])))
    while rig.engine.waiting:
        rig.engine.run()
        await turns()
    assert (outputs(together.result()), outputs(together.result(), 1)) == ([2], [3])
    assert outputs(behind.result()) == [11]
    rig.scheduler.settle()
    rig.table.check_integrity()


@pytest.mark.parametrize(("streams", "expected"), [(0, (3, 4)), (2, (3, 2, 2))])
async def test_outputs_have_their_streams(streams: int, expected: tuple[int, ...]) -> None:
    rig = Rig()
    shapes = SpanShapes(4 // (streams or 1), 4, streams, streams)
    (a,) = rig.open()
    hidden = np.ones((3, 4), np.float32)
    request = rig.request((a, PREFILL, 1, 0, -1, [1, 2, 3]), shapes=shapes, hidden=hidden)
    assert (await rig.submit(request)).hidden.shape == expected


async def test_nothing_more_runs_once_the_engine_is_about_to_close() -> None:
    rig = Rig(eager=False, chunk_tokens=64)
    (a,) = rig.open()
    long = rig.submit(rig.request((a, PREFILL, 1, 0, -1, [1.0] * 200)))
    await turns()
    rig.scheduler.stop()  # what has begun goes on, until
    rig.scheduler.halt()
    num_batches = len(rig.engine.batches)
    rig.engine.release()
    await turns()
    assert len(rig.engine.batches) == num_batches == 2 and not long.done()


@pytest.mark.parametrize("is_answered_first", [False, True], ids=["while a batch completes", "while a request comes"])
async def test_a_bug_in_the_books_ends_the_scheduler(monkeypatch: pytest.MonkeyPatch, is_answered_first: bool) -> None:
    rig = Rig()
    a, b = rig.open(2)
    monkeypatch.setattr(rig.table.ledger, "finish", None)
    assert outputs(await rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))) == [1]
    assert not rig.scheduler.has_failed  # answered, and not in the books yet
    if is_answered_first:
        with refuses(Reason.STOPPING):
            rig.submit(rig.request((b, DECODE, 1, 0, -1, [1])))
    else:
        await turns()
    assert rig.scheduler.has_failed
