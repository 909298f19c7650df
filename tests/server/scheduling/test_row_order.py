"""Steps in flight whose requests name the same sequences in another order: what is told of a row stays the row's."""

from __future__ import annotations

import asyncio

from rigs.scheduler_rig import DECODE, PREFILL, VERIFY, Rig, checksum, outputs, reason

from deltaline_server.step import RowOutcome, StepResult


async def finish(rig: Rig, futures: list[asyncio.Future[StepResult]]) -> list[StepResult]:
    """Compute what was sent: two batches are on their way, so that the last request came before its rows could run."""
    await asyncio.sleep(0)
    assert len(rig.engine.waiting) == 2
    rig.engine.release()
    for _ in range(100):
        await asyncio.sleep(0)
    assert all(future.done() for future in futures) and not rig.scheduler.has_failed
    return [await future for future in futures]


async def test_drafts_and_commits_stay_with_their_rows() -> None:
    rig = Rig(eager=False)
    a, b = rig.open(2)
    requests = [
        rig.request((a, VERIFY, 1, 0, -1, [1.0, 2.0, 3.0]), (b, PREFILL, 1, 0, -1, [4.0])),
        rig.request((b, VERIFY, 2, 1, -1, [5.0, 6.0]), (a, DECODE, 2, 2, 2, [7.0])),
        rig.request((a, DECODE, 3, 3, -1, [8.0]), (b, DECODE, 3, 2, 1, [9.0])),
    ]
    futures = [rig.submit(request) for request in requests]
    _, second, third = await finish(rig, futures)
    assert [reason(result, row) for result in (second, third) for row in range(2)] == [None] * 4
    assert outputs(second, 0) == [checksum([4, 5]), checksum([4, 5, 6])]
    assert outputs(second, 1) == [checksum([1, 2, 7])]
    assert (outputs(third, 0), outputs(third, 1)) == ([checksum([1, 2, 7, 8])], [checksum([4, 5, 9])])


async def test_a_reply_is_kept_for_the_row_that_it_answers() -> None:
    rig = Rig(eager=False)
    a, b = rig.open(2)
    last = (b, DECODE, 3, 2, -1, [6.0]), (a, DECODE, 3, 2, -1, [5.0])
    futures = [
        rig.submit(rig.request((a, DECODE, 1, 0, -1, [1.0]), (b, DECODE, 1, 0, -1, [2.0]))),
        rig.submit(rig.request((a, DECODE, 2, 1, -1, [3.0]), (b, DECODE, 2, 1, -1, [4.0]))),
        rig.submit(rig.request(*last)),
    ]
    await finish(rig, futures)
    again = await rig.step(*last)
    assert again.outcome.tolist() == [RowOutcome.REPLAYED] * 2
    assert (outputs(again, 0), outputs(again, 1)) == ([checksum([2, 4, 6])], [checksum([1, 3, 5])])


async def test_adapters_stay_with_their_rows() -> None:
    rig = Rig(eager=False, adapter_slots=2)
    rig.load("1", "2")
    (a,), (b,) = rig.open(adapter="1"), rig.open(adapter="2")
    first = [rig.submit(rig.request((handle, DECODE, 1, 0, -1, [1.0]))) for handle in (a, b)]
    for _ in first:
        rig.device.finish()
    await asyncio.sleep(0)
    rig.engine.release()
    await asyncio.gather(*first)
    rig.engine.eager = False
    futures = [
        rig.submit(rig.request((a, DECODE, 2, 1, -1, [2.0]), (b, DECODE, 2, 1, -1, [3.0]))),
        rig.submit(rig.request((a, DECODE, 3, 2, -1, [4.0]), (b, DECODE, 3, 2, -1, [5.0]))),
        rig.submit(rig.request((b, DECODE, 4, 3, -1, [6.0]), (a, DECODE, 4, 3, -1, [7.0]))),
    ]
    last = (await finish(rig, futures))[-1]
    assert (outputs(last, 0), outputs(last, 1)) == ([checksum([1, 3, 5, 6], 2)], [checksum([1, 2, 4, 7], 1)])
