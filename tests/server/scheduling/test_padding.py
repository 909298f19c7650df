"""Rows that do not run keep their places as padding, in the batches of the rows of their request that do."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, PREFILL, VERIFY, Rig, checksum, outputs, reason, turns

from deltaline_server.batch import StepBatch
from deltaline_server.errors import Reason
from deltaline_server.step import OutputRows, RowOutcome


def places(batch: StepBatch) -> list[tuple[int, bool]]:
    """The tokens of each row of a batch, and whether it runs; short rows first."""
    lengths, lines = np.diff(batch.control[0]).tolist(), batch.control[1:3, :-1].T.tolist()
    assert all((read == -1) == (write == -1) for read, write in lines)
    return [(length, read != -1) for length, (read, _) in zip(lengths, lines, strict=True)]


@pytest.mark.parametrize("output", list(OutputRows))
async def test_a_row_that_is_not_admitted_keeps_its_place_and_its_tokens(output: OutputRows) -> None:
    rig = Rig(chunk_tokens=128)
    a, b, c, d, e = rig.open(5)
    rows = [
        (b, DECODE, 7, 0, -1, [2.0]),  # a gap
        (a, DECODE, 1, 0, -1, [1.0]),
        (c ^ 1 << 30, VERIFY, 1, 0, -1, [3.0, 4.0]),  # unknown
        (d, PREFILL, 1, 0, -1, [5.0] * 40),
        (e, PREFILL, 1, 2, -1, [6.0] * 20),  # elsewhere
        (c, PREFILL, 1, 0, -1, [np.inf] * 3),
    ]
    result = await rig.step(*rows, output=output)
    (batch,) = rig.engine.batches
    assert places(batch) == [(1, False), (1, True), (2, False), (3, False), (40, True), (20, False)]
    assert np.concatenate(batch.hidden)[:, 0].tolist() == [2, 1, 3, 4] + [np.inf] * 3 + [5] * 40 + [6] * 20
    assert not batch.control[3:, [0, 2, 3, 5]].any()
    full = {1: [1.0], 3: [checksum([5.0] * n) for n in range(1, 41)]}
    part = {OutputRows.ALL: slice(None), OutputRows.LAST: slice(-1, None), OutputRows.NONE: slice(0, 0)}[output]
    assert [outputs(result, row) for row in range(6)] == [full.get(row, [])[part] for row in range(6)]
    reasons = [Reason.STEP_GAP, None, Reason.SEQUENCE_UNKNOWN, None, Reason.POSITION_MISMATCH, Reason.NON_FINITE_INPUT]
    assert [reason(result, row) for row in range(6)] == reasons


async def test_nothing_is_computed_for_a_request_of_which_nothing_runs() -> None:
    rig = Rig()
    a, b = rig.open(2)
    await rig.step((a, DECODE, 1, 0, -1, [1.0]))
    result = await rig.step((a, DECODE, 1, 0, -1, [1.0]), (b, DECODE, 2, 0, -1, [1.0]))
    assert result.outcome.tolist() == [RowOutcome.REPLAYED, RowOutcome.REFUSED]
    assert len(rig.engine.batches) == 1


async def test_rows_that_are_replayed_or_joined_are_padding_beside_a_new_one() -> None:
    rig = Rig(eager=False)
    a, b, c = rig.open(3)
    done = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1.0])))
    rig.engine.run()
    await done
    running = rig.submit(rig.request((b, VERIFY, 1, 0, -1, [2.0, 3.0])))
    await turns()
    rows = (a, DECODE, 1, 0, -1, [1.0]), (b, VERIFY, 1, 0, -1, [2.0, 3.0]), (c, DECODE, 1, 0, -1, [4.0])
    mixed = rig.submit(rig.request(*rows))
    rig.engine.release()
    result = await mixed
    assert result.outcome.tolist() == [RowOutcome.REPLAYED, RowOutcome.JOINED, RowOutcome.EXECUTED]
    assert places(rig.engine.batches[-1]) == [(1, False), (2, False), (1, True)]
    assert outputs(result, 1) == outputs(await running) and outputs(result, 2) == [4]


async def test_padding_counts_in_what_a_batch_may_have() -> None:
    rig = Rig(eager=False, batch_rows=3, chunk_tokens=128)
    handles = rig.open(7)
    blocker = rig.submit(rig.request((handles.pop(), DECODE, 1, 0, -1, [1.0])))
    await turns()
    rows = [(h, DECODE, s, 0, -1, [1.0]) for h, s in zip(handles, [1, 9, 1, 9], strict=False)]
    decodes = rig.submit(rig.request(*rows))
    rows = [(h, PREFILL, s, 0, -1, [1.0] * 100) for h, s in zip(handles[4:], [9, 1], strict=True)]
    prefills = rig.submit(rig.request(*rows))
    rig.engine.release()
    await asyncio.gather(blocker, decodes, prefills)
    # Beside the prefill in front there is room for less than a chunk of the kernels.
    first, second, *others = [places(batch) for batch in rig.engine.batches[1:]]
    assert first == [(1, True), (1, False), (1, True), (100, False)]
    assert second == [(100, True)] and not others


async def test_padding_behind_the_last_row_that_runs_is_not_computed() -> None:
    rig = Rig(chunk_tokens=64)
    a, b = rig.open(2)
    result = await rig.step((a, PREFILL, 1, 0, -1, [1.0] * 64), (b, PREFILL, 2, 0, -1, [1.0] * 640))
    assert reason(result, 1) is Reason.STEP_GAP
    assert [places(batch) for batch in rig.engine.batches] == [[(64, True)]]


async def test_padding_in_front_is_no_batch_of_its_own_and_takes_its_turn_in_those_of_others() -> None:
    rig = Rig(eager=False, chunk_tokens=128)
    a, b, c = rig.open(3)
    rows = (a, PREFILL, 2, 0, -1, [1.0] * 300), (b, PREFILL, 1, 0, -1, [2.0] * 100)
    alone = rig.submit(rig.request(*rows, client="one"))
    rig.engine.release()
    assert reason(await alone, 0) is Reason.STEP_GAP
    # 300 tokens are chunks of 128, 128 and 44; what of them was alone was not computed.
    assert [places(batch) for batch in rig.engine.batches] == [[(44, False), (64, True)], [(36, True)]]
    rig.engine.eager = False
    blocker = rig.submit(rig.request((c, DECODE, 1, 0, -1, [1.0])))
    await turns()
    rows = (a, PREFILL, 2, 0, -1, [1.0] * 100), (b, PREFILL, 2, 100, -1, [2.0] * 100)
    shared = rig.submit(rig.request(*rows, client="one"))
    decode = rig.submit(rig.request((c, DECODE, 2, 1, -1, [1.0])))
    rig.engine.release()
    await asyncio.gather(blocker, shared, decode)
    assert [places(batch) for batch in rig.engine.batches[3:]] == [[(1, True), (100, False)], [(100, True)]]


async def test_a_row_that_is_dropped_while_it_waits_keeps_its_place() -> None:
    rig = Rig(eager=False, spans=2)
    a, b, c, d = rig.open(4)
    rig.submit(rig.request((d, DECODE, 1, 0, -1, [1.0]), span=0))
    await turns()
    rig.engine.poison_token = 13.0
    rig.submit(rig.request((b, DECODE, 1, 0, -1, [13.0]), span=0))
    await turns()
    rows = [(h, DECODE, 1, 0, -1, [t]) for h, t in ((a, 1.0), (b, 2.0), (c, 3.0))]
    waiting = rig.submit(rig.request(*rows, span=1))
    rig.engine.release()
    result = await waiting
    assert [reason(result, row) for row in range(3)] == [None, Reason.STATE_POISONED, None]
    assert places(rig.engine.batches[-1]) == [(1, True), (1, False), (1, True)]
    assert outputs(result, 0) == [1] and outputs(result, 2) == [3]
    await turns()
    rig.table.check_integrity()
    assert rig.scheduler.load().queued_rows == 0


async def test_a_row_that_loses_its_commit_keeps_its_place() -> None:
    rig = Rig(spans=2, eager=False)
    a, b, c = rig.open(3)
    rig.engine.eager = True
    for span in (0, 1):
        await rig.step(*((h, VERIFY, 1, 0, -1, [2.0, 3.0]) for h in (a, b)), span=span)
    rig.engine.eager = False
    blocker = rig.submit(rig.request((c, DECODE, 1, 0, -1, [1.0]), span=1))
    await turns()
    winner = rig.submit(rig.request((a, DECODE, 2, 1, 1, [9.0]), span=0))
    loser = rig.submit(rig.request((a, DECODE, 2, 2, 2, [9.0]), (b, DECODE, 2, 2, 2, [9.0]), span=1))
    rig.engine.release()
    await asyncio.gather(blocker, winner)
    result = await loser
    assert reason(result, 0) is Reason.COMMIT_CONFLICT and outputs(result, 1) == [checksum([2, 3, 9])]
    assert places(rig.engine.batches[-1]) == [(1, False), (1, True)]


async def test_the_rest_of_a_cut_row_that_went_wrong_is_padding() -> None:
    rig = Rig(eager=False, chunk_tokens=128)
    a, b = rig.open(2)
    rig.engine.poison_token = 13.0
    rows = (a, PREFILL, 1, 0, -1, [13.0] * 320), (b, PREFILL, 1, 0, -1, [2.0] * 64)
    both = rig.submit(rig.request(*rows, output=OutputRows.NONE))
    await turns()
    rig.engine.run()  # the first chunk; the second one is in flight
    await turns()
    rig.engine.release()
    result = await both
    assert [reason(result, row) for row in range(2)] == [Reason.STATE_POISONED, None]
    assert [places(batch) for batch in rig.engine.batches] == [
        [(128, True)],
        [(128, True)],
        [(64, False), (64, True)],
    ]
    await turns()
    assert rig.close(a)[0].name == "CLOSED"
    (again,) = rig.open()
    assert outputs(await rig.step((again, DECODE, 1, 0, -1, [4.0]))) == [4]


async def test_all_rows_of_a_request_count_in_the_queue_until_it_is_finished() -> None:
    rig = Rig(eager=False, queue_rows=4)
    a, b, c = rig.open(3)
    rows = (a, DECODE, 1, 0, -1, [1.0]), (b, DECODE, 5, 0, -1, [1.0]), (c, DECODE, 5, 0, -1, [1.0])
    mixed = rig.submit(rig.request(*rows))
    assert rig.scheduler.load().queued_rows == 3
    rig.engine.release()
    await mixed
    await turns()
    assert rig.scheduler.load().queued_rows == 0


async def test_padding_has_no_adapter_and_waits_for_none() -> None:
    rig = Rig(adapter_slots=2)
    rig.load("1")
    (a,), (b,) = rig.open(adapter="1"), rig.open()
    result = await rig.step((a, DECODE, 3, 0, -1, [1.0]), (b, DECODE, 1, 0, -1, [2.0]))
    assert outputs(result, 1) == [2] and rig.engine.batches[0].adapter_places is None
    first = rig.submit(rig.request((b, DECODE, 9, 0, -1, [1.0]), (a, DECODE, 1, 0, -1, [2.0])))
    await turns()
    rig.device.finish()
    await turns()
    assert outputs(await first, 1) == [checksum([2], 1)]


async def test_padding_has_no_pages() -> None:
    rig = Rig(pages=8)
    a, b = rig.open(2)
    tokens: list[Any] = [1.0] * 8
    result = await rig.step((a, PREFILL, 2, 0, -1, tokens), (b, PREFILL, 1, 0, -1, tokens))
    assert outputs(result, 1) == [checksum(tokens[:n]) for n in range(1, 9)]
    new_pages = rig.engine.batches[0].new_pages
    assert new_pages is not None and new_pages.shape == (3, 2)
    assert new_pages[0].tolist() == rig.engine.batches[0].control[2, 1:2].tolist() * 2
