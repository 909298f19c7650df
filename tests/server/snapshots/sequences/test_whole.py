"""Sequences that leave a server as they stand and go on at another: the same bits, the same retries, or nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.exchanged_states import exported, memory_of
from rigs.scheduler_rig import refuses
from rigs.state_rig import PAGE_SIZE, StateRig
from rigs.stored_states import DECODE, MODELS, PREFILL, VERIFY, make_rig
from rigs.until import until
from rigs.whole_sequences import Cell, Traveller, check_idle, imported, opened, prefilled

from deltaline_server.batch import StepBatch
from deltaline_server.errors import Reason
from deltaline_server.principal import ANONYMOUS
from deltaline_server.step import RowOutcome, RowWaypoints

FP32, BF16 = torch.float32, torch.bfloat16


async def goes_on(one: Traveller, other: Traveller, span: int, accepted: int = -1) -> None:
    """Steps of every kind give the same bits at both."""
    steps = (DECODE, 1, accepted), (PREFILL, PAGE_SIZE + 3, -1), (VERIFY, 3, -1), (DECODE, 1, 2)
    for step in steps:
        np.testing.assert_array_equal(await other.step(span, *step), await one.step(span, *step))


async def is_replayed(one: Traveller, other: Traveller, span: int) -> None:
    """The last step sent again gets the same bytes at both."""
    results = [await each.again(span) for each in (one, other)]
    for result in results:
        assert result.outcome.tolist() == [RowOutcome.REPLAYED]
        assert result.position.tolist() == results[0].position.tolist()
        assert result.hidden.tobytes() == results[0].hidden.tobytes() != b""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("accepted", "dtype", "state_dtype"),
    [(None, FP32, FP32), (0, FP32, FP32), (2, FP32, FP32), (4, FP32, FP32), (2, BF16, FP32), (2, BF16, BF16)],
    ids=str,
)
async def test_a_pending_verify_comes_along_and_rides_on_the_next_step(
    pair: Any, name: str, accepted: int | None, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    rig, to = pair(name, dtype=dtype, state_dtype=state_dtype)
    one = await prefilled(rig)
    if accepted is not None:
        for span in range(len(one.cells)):
            await one.step(span, VERIFY, 4)
    other = await one.moved_to(to)
    for span in range(len(one.cells)):
        await is_replayed(one, other, span)
        await goes_on(one, other, span, -1 if accepted is None else accepted)
    assert memory_of(await one.exported()) == memory_of(await other.exported())
    check_idle(rig, to)


@pytest.mark.parametrize("name", ["hybrid, two spans", "mamba2"])
async def test_a_verify_that_came_along_can_be_committed_by_itself(pair: Any, name: str) -> None:
    rig, to = pair(name)
    one = await prefilled(rig)
    await one.step(0, VERIFY, 4)
    other = await one.moved_to(to)
    for each in (one, other):
        each.commit(0, 3)
    await goes_on(one, other, 0)
    check_idle(rig, to)


@pytest.mark.parametrize("committed", [False, True])
async def test_a_commit_that_was_made_comes_along(pair: Any, committed: bool) -> None:
    """By a call, whose retry is told the same; or by another span, which holds this one to its count."""
    rig, to = pair("hybrid, two spans")
    one = await prefilled(rig)
    for span in (0, 1):
        await one.step(span, VERIFY, 4)
    one.commit(0, 2)
    if committed:
        one.commit(1, 2)
    other = await one.moved_to(to)
    assert to.table.ledger.whole(0).fixed == rig.table.ledger.whole(0).fixed == {(46, 0): 2}
    epoch, step = to.table.server_epoch, np.array([2])
    for span, accepted, is_fixed in ((0, 2, True), (0, 1, False), (1, 1, False), (1, 2, True)):
        refusals = to.table.commit(epoch, span, other.handles, step, np.array([accepted], dtype=np.int32))[1]
        assert [one.reason for one in refusals.values()] == ([] if is_fixed else [Reason.COMMIT_CONFLICT])
    if not committed:
        one.commit(1, 2)
        other.cells[1].position += 2
    for span in (0, 1):
        await goes_on(one, other, span)


@pytest.mark.parametrize(
    "steps",
    [
        {0: [(PREFILL, 3)]},
        {1: [(PREFILL, 70)]},
        {0: [(PREFILL, 3)], 1: [(PREFILL, 70), (VERIFY, 4)]},
        {0: [(PREFILL, 70), (VERIFY, 2)], 1: [(PREFILL, 3), (DECODE, 1)]},
    ],
    ids=["the first alone", "the second alone", "the second is ahead", "the first is ahead"],
)
async def test_spans_that_are_uneven_go_on_each_from_where_it_was(pair: Any, steps: dict[int, Any]) -> None:
    """Also one that has not begun, and one that is pages behind another."""
    rig, to = pair("hybrid, two spans")
    one = opened(rig)
    for span, of_span in steps.items():
        for step in of_span:
            await one.step(span, *step)
    other = await one.moved_to(to)
    for span in (1, 0):
        if span in steps:
            await is_replayed(one, other, span)
        await goes_on(one, other, span, 1 if VERIFY in dict(steps.get(span, ())) else -1)
    check_idle(rig, to)


async def test_what_goes_on_from_a_snapshot_travels_before_its_first_step(pair: Any) -> None:
    rig, to = pair("hybrid, two spans")
    first = await prefilled(rig)
    epoch = rig.table.server_epoch
    children = await rig.states.fork(epoch, first.handles, 1, ANONYMOUS, lease_s=1e3)
    one = Traveller(rig, int(children.handles[0]), cells=[Cell(0, 46), Cell(0, 46)])
    other = await one.moved_to(to)
    for span in (0, 1):
        await goes_on(one, other, span)
    check_idle(rig, to)


def watched(rig: StateRig) -> list[StepBatch]:
    """The batches that a rig's engine is given from now on."""
    given, submit = list[StepBatch](), rig.engine.submit

    def noted(batch: StepBatch, *rest: Any, **options: Any) -> None:
        given.append(batch)
        submit(batch, *rest, **options)

    rig.engine.submit = noted  # type: ignore[method-assign]
    return given


async def test_it_is_taken_behind_the_steps_in_flight_and_later_ones_wait(pair: Any) -> None:
    rig, to = pair()
    one = await prefilled(rig)
    rig.engine.eager, given = False, watched(rig)
    one.begin(0, DECODE, 1)
    exporting = asyncio.ensure_future(one.exported())
    await asyncio.sleep(0)
    other = one.at(to, 0)
    after = one.begin(0, DECODE, 1)
    rig.engine.run()
    await until(lambda: rig.tiers.host is not None and rig.tiers.host.used_bytes)
    await asyncio.sleep(0.01)
    assert len(given) == 1, "the state is yet to be copied"
    while not (after.done() and exporting.done()):
        rig.engine.run()
        await asyncio.sleep(0.001)
    assert len(given) == 2
    rig.engine.eager = True
    other.handle = await imported(to, [await exporting])
    np.testing.assert_array_equal(await other.step(0, DECODE, 1), (await after).hidden)
    check_idle(rig, to)


async def test_an_export_of_what_is_closed_meanwhile_is_refused(pair: Any) -> None:
    """What was copied may be of whoever has the line by then."""
    rig, _ = pair()
    one = await prefilled(rig)
    rig.engine.eager = False
    exporting = asyncio.ensure_future(one.exported())
    await until(lambda: rig.tiers.host is not None and rig.tiers.host.used_bytes)
    rig.table.close(rig.table.server_epoch, one.handles)
    rig.engine.run()
    with refuses(Reason.SEQUENCE_CLOSED):
        await exporting
    rig.engine.eager = True
    check_idle(rig)


async def test_the_copy_of_an_export_that_is_cancelled_ends_before_the_next_step(pair: Any) -> None:
    rig, _ = pair()
    one = await prefilled(rig)
    rig.engine.eager, given = False, watched(rig)
    exporting = asyncio.ensure_future(one.exported())
    await until(lambda: rig.tiers.host is not None and rig.tiers.host.used_bytes)
    exporting.cancel()
    with suppress(asyncio.CancelledError):
        await exporting
    after = one.begin(0, DECODE, 1)
    await asyncio.sleep(0.01)
    assert not given
    while not after.done():
        rig.engine.run()
        await asyncio.sleep(0)
    rig.engine.eager = True
    await until(lambda: rig.tiers.host is not None and not rig.tiers.host.used_bytes)
    check_idle(rig)


async def test_a_sequence_that_travels_is_no_snapshot_on_its_way(pair: Any) -> None:
    rig, to = pair()
    one = await prefilled(rig)
    assert rig.exchange is not None
    async with rig.passage.stored(rig.table.server_epoch, one.handles, ANONYMOUS) as id:
        assert rig.snapshots.describe(ANONYMOUS) == ([], False) and rig.snapshots.num_held == 0
        with refuses(Reason.SNAPSHOT_UNKNOWN):
            await exported(rig, id)
    await one.moved_to(to)
    assert to.snapshots.describe(ANONYMOUS) == ([], False) and to.lines.num_frozen == 0
    check_idle(rig, to)


async def test_a_sequence_s_file_is_no_stored_snapshot(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, files=True)
    content = await (await prefilled(rig)).exported()
    await rig.close()
    path = tmp_path / "states" / f"{content[72:88].hex()}.state"
    path.write_bytes(content)
    path.chmod(0o600)
    rig = make_rig(tmp_path, files=True)
    await rig.states.find_stored(lambda name: 0)
    assert rig.snapshots.num_held == 0
    await rig.close()


async def test_a_step_that_left_waypoints_comes_without_its_reply(pair: Any) -> None:
    """The snapshots that it tells of stay where they are."""
    rig, to = pair()
    one = opened(rig)
    await one.step(0, PREFILL, 70, waypoints=RowWaypoints((64,)))
    other = await one.moved_to(to)
    result = await other.again(0)
    assert [refusal.reason for refusal in result.refusals.values()] == [Reason.STEP_STALE]
    await goes_on(one, other, 0)


async def test_pages_of_what_is_closed_before_they_are_read_are_refused(pair: Any) -> None:
    rig, _ = pair()
    one = await prefilled(rig)
    rig.scheduler.settle()
    reading = asyncio.ensure_future(one.pages(0, PAGE_SIZE))
    await asyncio.sleep(0)
    rig.table.close(rig.table.server_epoch, one.handles, ANONYMOUS)
    with refuses(Reason.SEQUENCE_CLOSED):
        await reading
