"""Steps that need pages: granted whole before anything runs, refused by the row, kept until the sequence is over."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from rigs.scheduler_rig import DECODE, PREFILL, VERIFY, Rig, outputs, reason, refuses

from deltaline_server.errors import Reason
from deltaline_server.step import RowOutcome


def make_rig(pages: int = 6, **changes: Any) -> Rig:
    rig = Rig(pages=pages, **changes)
    assert rig.pages is not None
    return rig


def used(rig: Rig) -> int:
    assert rig.pages is not None
    return rig.pages.num_used


def tokens(count: int, first: int = 1) -> list[float]:
    return [float(i) for i in range(first, first + count)]


async def test_pages_are_granted_as_tokens_come_and_freed_with_the_sequence() -> None:
    rig = make_rig()
    (handle,) = rig.open()
    await rig.step((handle, PREFILL, 1, 0, -1, tokens(4)))
    assert used(rig) == 1
    for step in range(2, 7):
        await rig.step((handle, DECODE, step, step + 2, -1, [1.0]))
    assert used(rig) == 3
    rig.close(handle)
    assert used(rig) == 0
    rig.table.check_integrity()


async def test_a_row_without_pages_is_refused_alone_and_nothing_of_it_runs() -> None:
    rig = make_rig(4)
    first, second, third = rig.open(3)
    await rig.step((first, PREFILL, 1, 0, -1, tokens(8)))
    result = await rig.step(
        (second, PREFILL, 1, 0, -1, tokens(9)), (third, PREFILL, 1, 0, -1, tokens(5)), (first, DECODE, 2, 8, -1, [3.0])
    )
    assert reason(result, 0) is Reason.PAGES_EXHAUSTED and result.refusals[0].retry_after_s
    assert reason(result, 1) is None
    assert reason(result, 2) is Reason.PAGES_EXHAUSTED
    assert result.refusals[2].metadata == {"step": "1", "position": "8", "pending_tokens": "0"}
    assert (used(rig), rig.counts.total["PAGES_EXHAUSTED"]) == (4, 2)
    rig.close(third)
    again = await rig.step((first, DECODE, 2, 8, -1, [3.0]))
    assert again.outcome.tolist() == [RowOutcome.EXECUTED] and used(rig) == 3


async def test_a_plain_batch_in_which_all_rows_are_refused() -> None:
    rig = make_rig(1)
    first, second = rig.open(2)
    await rig.step((first, PREFILL, 1, 0, -1, tokens(3)))
    result = await rig.step((second, DECODE, 1, 0, -1, [1.0]))
    assert reason(result) is Reason.PAGES_EXHAUSTED and used(rig) == 1
    assert rig.table.replies.used_bytes == (3 + 3) * 8  # of the first step, and nothing more is set aside


async def test_a_retry_and_a_rejected_draft_take_nothing_twice() -> None:
    rig = make_rig(6)
    (handle,) = rig.open()
    prefill = (handle, PREFILL, 1, 0, -1, tokens(6))
    await rig.step(prefill)
    assert (await rig.step(prefill)).outcome.tolist() == [RowOutcome.REPLAYED]
    assert used(rig) == 2
    await rig.step((handle, VERIFY, 2, 6, -1, tokens(4, 7)))
    assert used(rig) == 3
    await rig.step((handle, VERIFY, 3, 6, 0, tokens(4, 20)))  # begins the same page again
    await rig.step((handle, VERIFY, 4, 7, 1, tokens(4, 30)))
    last = await rig.step((handle, DECODE, 5, 8, 1, [40.0]))
    assert used(rig) == 3
    state = [*tokens(6), 20.0, 30.0, 40.0]
    assert outputs(last) == [sum((i + 1) * token for i, token in enumerate(state))]


async def test_a_long_prefill_has_all_its_pages_before_its_first_chunk() -> None:
    rig = make_rig(64, eager=False, chunk_tokens=64)
    first, second = rig.open(2)
    done = rig.submit(rig.request((first, PREFILL, 1, 0, -1, tokens(200))))
    assert used(rig) == 50
    refused = await rig.submit(rig.request((second, PREFILL, 1, 0, -1, tokens(64))))
    assert reason(refused) is Reason.PAGES_EXHAUSTED
    while not done.done():
        rig.engine.run()
        await asyncio.sleep(0)
    told = np.concatenate([batch.new_pages for batch in rig.engine.batches if batch.new_pages is not None], axis=1)
    assert len(rig.engine.batches) > 2 and told[1].tolist() == list(range(50))
    assert outputs(await done)[-1] == sum((i + 1) * token for i, token in enumerate(tokens(200))) % 65521


async def test_a_step_beyond_the_longest_context_is_refused() -> None:
    rig = make_rig(6, max_context=10)
    first, second = rig.open(2)
    await rig.step((first, PREFILL, 1, 0, -1, tokens(9)))
    result = await rig.step((first, VERIFY, 2, 9, -1, [1.0, 2.0]), (second, PREFILL, 1, 0, -1, tokens(10)))
    assert reason(result, 0) is Reason.CONTEXT_EXCEEDED and result.refusals[0].retry_after_s is None
    told = "the sequence would have 11 tokens, at most 10 fit (max_context)"
    assert reason(result, 1) is None and result.refusals[0].message == told
    assert reason(await rig.step((first, DECODE, 2, 9, -1, [1.0]))) is None
    assert reason(await rig.step((first, DECODE, 3, 10, -1, [1.0]))) is Reason.CONTEXT_EXCEEDED
    assert used(rig) == 6


async def test_a_request_that_can_not_be_taken_takes_no_page() -> None:
    rig = make_rig(6, reply_bytes=64)
    (handle,) = rig.open()
    with refuses(Reason.REPLY_BYTES_EXHAUSTED):
        rig.submit(rig.request((handle, PREFILL, 1, 0, -1, tokens(20))))
    assert used(rig) == 0


async def test_pages_of_a_step_that_was_dropped_stay_for_the_next() -> None:
    rig = make_rig(6, eager=False)
    (handle,) = rig.open()
    request = rig.request((handle, PREFILL, 1, 0, -1, tokens(20)), deadline_s=rig.now - 1)
    assert reason(await rig.submit(request)) is Reason.QUEUE_DEADLINE
    assert used(rig) == 5
    rig.engine.eager = True
    assert reason(await rig.step((handle, PREFILL, 1, 0, -1, tokens(24)))) is None
    assert used(rig) == 6


async def test_spans_share_pages_and_those_without_keys_need_none() -> None:
    rig = make_rig(3, spans=3, paged_spans=(0, 2))
    first, second = rig.open(2)
    for span in range(3):
        result = await rig.step((first, PREFILL, 1, 0, -1, tokens(10)), span=span)
        assert reason(result) is None and used(rig) == 3
    assert [batch.new_pages is None for batch in rig.engine.batches] == [False, True, False]
    assert reason(await rig.step((second, PREFILL, 1, 0, -1, tokens(10)), span=1)) is None
    assert reason(await rig.step((second, PREFILL, 1, 0, -1, tokens(10)), span=0)) is Reason.PAGES_EXHAUSTED
