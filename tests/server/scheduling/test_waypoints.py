"""Waypoints: prefills leave snapshots on their way, told once with the step, and nothing is held of those that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, PREFILL, Rig, checksum, outputs, reason, turns

from deltaline_server.errors import Reason
from deltaline_server.principal import ANONYMOUS, Principal, Quotas
from deltaline_server.step import WAYPOINT_BYTES, LeftWaypoint, RowOutcome, RowWaypoints, StepResult
from deltaline_server.tables.captured.snapshot import SnapshotState
from deltaline_server.tables.prefixes.cost import ReusePolicy
from deltaline_server.tables.prefixes.keys import PrefixKeys

NO_LINES = Reason.NO_SNAPSHOT_LINES.name


def make_rig(**changes: Any) -> Rig:
    return Rig(**({"snapshot_lines": 4, "pages": 200, "page_size": 48, "chunk_tokens": 128} | changes))


def tokens(count: int, first: int = 1) -> list[float]:
    return [float(i) for i in range(first, first + count)]


def named(*places: int, at_end: bool = False, **options: Any) -> dict[str, Any]:
    """A step whose first row leaves states at these places."""
    return {"waypoints": {0: RowWaypoints(places, at_end, **options)}}


def left(result: StepResult) -> list[tuple[int, str]]:
    """Position of each place of the first row, and why there is no snapshot."""
    assert all(row == 0 and bool(place.snapshot) != bool(place.skipped) for row, place in result.waypoints)
    return [(place.position, place.skipped) for _, place in result.waypoints]


def ids(result: StepResult) -> list[bytes]:
    return [place.snapshot for _, place in result.waypoints if place.snapshot]


async def decoded(rig: Rig, handle: int, position: int, step: int = 1, spans: int = 1) -> list[float]:
    """What a token gives behind a position, on every span."""
    made = []
    for span in range(spans):
        result = await rig.step((handle, DECODE, step, position, -1, [9.0]), span=span)
        assert reason(result) is None
        made += outputs(result)
    return made


def all_is_back(rig: Rig) -> bool:
    """Whether neither lines nor pages are held of anything but open sequences."""
    rig.scheduler.settle()
    rig.snapshots.check_integrity()
    rig.waypoints.check_integrity()
    return (rig.lines.num_used, rig.lines.num_frozen, rig.snapshots.num_held) == (rig.table.num_open, 0, 0)


@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.parametrize("chunk_tokens", [64, 128, 10_000])
async def test_a_place_is_gone_on_from_like_a_sequence_that_ended_there(first: int, chunk_tokens: int) -> None:
    rig = make_rig(chunk_tokens=chunk_tokens)
    (parent,) = rig.open()
    if first:
        await rig.step((parent, PREFILL, 1, 0, -1, tokens(first)))
    step = (parent, PREFILL, 1 + (first > 0), first, -1, tokens(200, 1 + first))
    result = await rig.step(step, **named(64, 128, 192, at_end=True, is_pinned=True, lease_s=30.0))
    assert left(result) == [(first + at, "") for at in (64, 128, 192, 200)]
    for one in rig.snapshots.describe(ANONYMOUS)[0]:
        assert (one.is_pinned, one.lease_s) == (True, 30.0)
    for place, id in zip((64, 128, 192, 200), ids(result), strict=True):
        (child,) = rig.restore(id)
        expected = checksum([*tokens(first + place), 9.0])
        assert await decoded(rig, child, first + place) == [expected]
        rig.close(child)
    assert await decoded(rig, parent, first + 200, step=2 + (first > 0)) == [checksum([*tokens(first + 200), 9.0])]
    rig.close(parent)
    rig.snapshots.release(ids(result), ANONYMOUS)
    assert all_is_back(rig) and rig.pages is not None and rig.pages.num_used == 0


async def test_of_several_rows_each_has_its_own() -> None:
    rig = make_rig(snapshot_lines=6)
    handles = rig.open(3)
    rows = [(handle, PREFILL, 1, 0, -1, tokens(70 + i, 1 + i)) for i, handle in enumerate(handles)]
    places = {2: RowWaypoints((64,), at_end=True), 0: RowWaypoints((64,))}
    result = await rig.step(*rows, waypoints=places)
    assert [(row, place.position) for row, place in result.waypoints] == [(0, 64), (2, 64), (2, 72)]
    for row, place in result.waypoints:
        (child,) = rig.restore(place.snapshot)
        assert await decoded(rig, child, place.position) == [checksum([*tokens(place.position, 1 + row), 9.0])]


async def test_a_row_that_is_refused_before_a_place_is_left_is_told_at_once() -> None:
    rig = make_rig()
    (parent,) = rig.open()
    kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    rig.scheduler.in_order(rig.slots(parent), lambda dropped: kept)
    step = (parent, PREFILL, 1, 0, -1, tokens(130))
    late = rig.submit(rig.request(step, **named(64, at_end=True), deadline_s=rig.now + 1))
    rig.now += 2
    assert reason(await asyncio.wait_for(late, 10)) is Reason.QUEUE_DEADLINE
    again = rig.submit(rig.request(step, **named(64, at_end=True)))
    await turns()
    assert not again.done()
    kept.set_result(None)
    assert left(await asyncio.wait_for(again, 10)) == [(64, ""), (130, "")]
    await rig.scheduler.drained()
    assert rig.scheduler.load().queued_rows == 0


async def test_a_repeat_is_told_the_same_and_others_conflict() -> None:
    rig = make_rig()
    (parent,) = rig.open()
    step = (parent, PREFILL, 1, 0, -1, tokens(130))
    result = await rig.step(step, **named(64, at_end=True))
    again = await rig.step(step, **named(64, at_end=True))
    assert again.outcome.tolist() == [RowOutcome.REPLAYED] and again.waypoints == result.waypoints
    for changes in ({}, named(64), named(128, at_end=True), named(64, at_end=True, is_pinned=True)):
        assert reason(await rig.step(step, **changes)) is Reason.STEP_CONFLICT
    await rig.step((parent, PREFILL, 2, 130, -1, tokens(70)))
    earlier = await rig.step(step, **named(64, at_end=True))  # of a streamed prefill
    assert earlier.outcome.tolist() == [RowOutcome.REPLAYED] and earlier.waypoints == result.waypoints
    assert rig.snapshots.num_held == 2


async def test_a_step_in_flight_is_joined_and_tells_the_same() -> None:
    rig = make_rig(eager=False)
    (parent,) = rig.open()
    request = rig.request((parent, PREFILL, 1, 0, -1, tokens(200)), **named(64, at_end=True))
    steps = [rig.submit(request)]
    await turns()
    steps.append(rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(200)), **named(64, at_end=True))))
    rig.engine.release()
    first, second = [await step for step in steps]
    assert second.outcome.tolist() == [RowOutcome.JOINED]
    assert first.waypoints == second.waypoints and left(first) == [(64, ""), (200, "")]


async def test_a_repeat_that_comes_before_the_end_is_reached_waits_for_it() -> None:
    rig = make_rig(spans=2, eager=False, pages=0, chunk_tokens=64)
    (parent,) = rig.open()
    other = rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(200)), span=1))
    request = rig.request((parent, PREFILL, 1, 0, -1, tokens(20)), **named(at_end=True))
    first = rig.submit(request)
    await turns()
    done = rig.table.ledger.done.step[:, rig.slots(parent)[0]]
    for _ in range(4):
        if not done[0]:
            rig.engine.run()
            await turns()
            rig.scheduler.settle()
    assert done.tolist() == [1, 0] and not first.done(), "the other span, which came first, is still at work"
    again = rig.submit(request)
    assert not again.done()
    rig.engine.release()
    told = [left(await asyncio.wait_for(step, 10)) for step in (first, again)]
    assert told == [[(20, "SPANS_UNEVEN")]] * 2 and (await other).waypoints == ()


async def test_a_repeat_is_never_told_of_a_later_step_that_has_its_entry() -> None:
    rig = make_rig(spans=2, eager=False, pages=0, chunk_tokens=64, snapshot_lines=9)
    (parent,) = rig.open()
    other = rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(1000)), span=1))
    steps = [rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(50)), **named(at_end=True)))]
    await turns()
    while not rig.table.ledger.done.step[0].any():  # the other span is still at work
        rig.engine.run()
        await turns(3)
        rig.scheduler.settle()
    for i in range(1, 9):
        steps.append(rig.submit(rig.request((parent, PREFILL, 1 + i, 50 * i, -1, tokens(50)), **named(at_end=True))))
    again = rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(50)), **named(at_end=True)))
    rig.engine.release()
    await other
    first, second = await steps[0], await again
    assert [reason(await step) for step in steps] == [None] * 9
    assert second.position.tolist() == first.position.tolist() == [50] and outputs(second) == outputs(first)
    assert left(second) == left(first) == [(50, "SPANS_UNEVEN")]


async def test_steps_behind_an_end_wait_for_it() -> None:
    rig = make_rig(eager=False)
    (parent,) = rig.open()
    first = rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(100)), **named(at_end=True)))
    behind = [
        rig.submit(rig.request((parent, PREFILL, 1 + i, 100 * i, -1, tokens(100)), **named(at_end=True)))
        for i in (1, 2)
    ]
    await turns()
    assert len(rig.engine.batches) == 1
    rig.engine.release()
    results = [await first, *[await step for step in behind]]
    assert [left(result) for result in results] == [[(100, "")], [(200, "")], [(300, "")]]
    (child,) = rig.restore(*ids(results[1]))
    assert await decoded(rig, child, 200) == [checksum([*tokens(100), *tokens(100), 9.0])]


async def test_a_streamed_prefill_runs_on_without_waiting() -> None:
    rig = make_rig(eager=False)
    (parent,) = rig.open()
    steps = [
        rig.submit(rig.request((parent, PREFILL, 1 + i, 128 * i, -1, tokens(128)), **named(128))) for i in range(3)
    ]
    await turns()
    assert len(rig.engine.batches) == 2
    rig.engine.release()
    assert [left(await step) for step in steps] == [[(128, "")], [(256, "")], [(384, "")]]


async def test_where_there_is_no_line_the_place_is_skipped_and_nothing_else_changes() -> None:
    rig = make_rig(snapshot_lines=2)
    (parent,) = rig.open()
    await rig.step((parent, PREFILL, 1, 0, -1, tokens(10)))
    (old,) = await rig.snapshot(parent)
    (pinned,) = await rig.snapshot(parent, is_pinned=True)  # the same line
    result = await rig.step((parent, PREFILL, 2, 10, -1, tokens(200)), **named(64, 128, at_end=True))
    assert left(result) == [(74, ""), (138, NO_LINES), (210, "")]  # the end takes the place of the first
    assert outputs(result)[-1] == checksum([*tokens(10), *tokens(200)])
    held = {one.id for one in rig.snapshots.describe(ANONYMOUS)[0]}
    assert held == {old.id, pinned.id, ids(result)[-1]} or held == {pinned.id, ids(result)[-1]}


async def test_unpinned_snapshots_give_way() -> None:
    rig = make_rig(snapshot_lines=1)
    first, second = rig.open(2)
    old = await rig.step((first, PREFILL, 1, 0, -1, tokens(100)), **named(64))
    new = await rig.step((second, PREFILL, 1, 0, -1, tokens(100)), **named(64))
    assert left(new) == [(64, "")]
    states = rig.snapshots.renew([*ids(old), *ids(new)], ANONYMOUS, None)
    assert states == [SnapshotState.EVICTED, SnapshotState.HELD]


async def test_for_all_places_of_a_chunk_snapshots_give_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(snapshot_lines=4, chunk_tokens=512)
    first, second = rig.open(2)
    places = named(64, 128, 192, 256)
    await rig.step((first, PREFILL, 1, 0, -1, tokens(300)), **places)
    room, gave_way = rig.snapshots.device.room, list[int]()
    victims = room.victims

    def counted(*arguments: Any) -> list[bytes]:
        found = victims(*arguments)
        gave_way.append(len(found))
        return found

    monkeypatch.setattr(room, "victims", counted)
    new = await rig.step((second, PREFILL, 1, 0, -1, tokens(300)), **places)
    assert left(new) == [(64, ""), (128, ""), (192, ""), (256, "")]
    assert [count for count in gave_way if count] == [4]


async def test_where_there_is_no_page_for_a_cut_one() -> None:
    rig = make_rig(pages=3, page_size=64, max_context=192)
    (parent,) = rig.open()
    await rig.step((parent, PREFILL, 1, 0, -1, tokens(10)))
    result = await rig.step((parent, PREFILL, 2, 10, -1, tokens(182)), **named(64, 128))
    assert left(result) == [(74, "PAGES_EXHAUSTED"), (138, "PAGES_EXHAUSTED")]
    again = rig.open()[0]
    rig.close(parent)
    result = await rig.step((again, PREFILL, 1, 0, -1, tokens(150)), **named(64, 128))
    assert left(result) == [(64, ""), (128, "")] and rig.pages is not None and rig.pages.num_free == 0


async def test_each_place_of_a_chunk_needs_a_page_of_its_own() -> None:
    rig = make_rig(pages=5)
    (parent,) = rig.open()
    step = rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(150)), **named(64, 128)))
    result = await asyncio.wait_for(step, 10)
    assert left(result) == [(64, ""), (128, "PAGES_EXHAUSTED")]


async def test_quotas_hold() -> None:
    rig = make_rig()
    principal = Principal(1, "tenant", quotas=Quotas(snapshots=2))
    (parent,) = [int(one) for one in rig.table.open(1, principal=principal).handles]
    step = (parent, PREFILL, 1, 0, -1, tokens(250))
    result = await rig.step(step, principal=principal, **named(64, 128, 192, at_end=True))
    assert left(result) == [(64, ""), (128, ""), (192, "QUOTA_EXCEEDED"), (250, "QUOTA_EXCEEDED")]
    assert rig.snapshots.describe(ANONYMOUS)[0] == [] and len(rig.snapshots.describe(principal)[0]) == 2


@pytest.mark.parametrize("spans", [1, 2])
async def test_states_under_way_leave_as_many_lines_to_other_principals(spans: int) -> None:
    """Nothing makes them give way, however long their prefill takes or their other spans don't come."""
    rig = make_rig(snapshot_lines=8, spans=spans, pages=0)
    first, other = Principal(1, "a"), Principal(2, "b")
    made: dict[int, int] = {}
    for principal, given in ((first, spans), (other, spans), (first, 1)):
        (handle,) = [int(one) for one in rig.table.open(1, principal=principal).handles]
        for span in range(given):
            step = (handle, PREFILL, 1, 0, -1, tokens(512))
            result = await rig.step(step, principal=principal, span=span, **named(*range(64, 513, 64)))
        made[principal.number] = len(rig.snapshots.describe(principal)[0])
        rig.snapshots.check_integrity()
        rig.waypoints.check_integrity()
    assert made[2] == 4 and len(rig.snapshots.describe(other)[0]) >= 2
    assert {place.skipped for _, place in result.waypoints} <= {"", NO_LINES}


@pytest.mark.parametrize("failure", ["fails", "not finite", "later chunk"])
async def test_a_step_that_fails_leaves_nothing(failure: str) -> None:
    rig = make_rig(chunk_tokens=64, snapshot_lines=1)  # so that a place is skipped as well
    parent, other = rig.open(2)
    row = tokens(200)
    if failure == "fails":
        rig.engine.fail_next = True
    else:
        rig.engine.poison_token = row[-1] if failure == "later chunk" else row[0]
    result = await rig.step((parent, PREFILL, 1, 0, -1, row), **named(64, 128, at_end=True))
    assert reason(result) is Reason.STATE_POISONED and result.waypoints == []
    rig.engine.poison_token = None
    assert all_is_back(rig) and not rig.waypoints.of_slot
    assert left(await rig.step((other, PREFILL, 1, 0, -1, row), **named(64))) == [(64, "")]
    rig.close(parent, other)


async def test_a_step_that_is_refused_makes_none() -> None:
    rig = make_rig(eager=False)
    (parent,) = rig.open()
    running = rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(100))))
    rig.engine.poison_token = 100.0
    behind = rig.submit(rig.request((parent, PREFILL, 2, 100, -1, tokens(100)), **named(64, at_end=True)))
    await turns()
    rig.engine.release()
    assert reason(await running) is Reason.STATE_POISONED and reason(await behind) is not None
    assert (await behind).waypoints == [] and all_is_back(rig)
    assert reason(await rig.step((parent, PREFILL, 7, 0, -1, tokens(70)), **named(64))) is not None


async def test_steps_that_wait_are_refused_when_the_server_stops() -> None:
    rig = make_rig(eager=False)
    (parent,) = rig.open()
    steps = [
        rig.submit(rig.request((parent, PREFILL, 1 + i, 100 * i, -1, tokens(100)), **named(64, at_end=True)))
        for i in range(3)
    ]
    await turns()
    rig.scheduler.stop()
    rig.engine.release()
    results = [await step for step in steps]
    assert left(results[0]) == [(64, ""), (100, "")]
    assert [reason(result) for result in results[1:]] == [Reason.STOPPING, Reason.PREDECESSOR_REFUSED]
    await rig.scheduler.drained()
    assert not rig.waypoints.of_slot


async def test_a_sequence_that_is_closed_meanwhile_leaves_its_places_but_no_end() -> None:
    rig = make_rig(eager=False)
    (parent,) = rig.open()
    step = rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(100)), **named(64, at_end=True)))
    await turns()
    rig.close(parent)
    rig.engine.release()
    result = await step
    assert left(result) == [(64, ""), (100, Reason.SEQUENCE_CLOSED.name)]
    (child,) = rig.restore(*ids(result))
    assert await decoded(rig, child, 64) == [checksum([*tokens(64), 9.0])]


async def test_other_sequences_are_told_nothing_of_states_under_way() -> None:
    rig = make_rig(eager=False)
    (parent,) = rig.open()
    step = rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(200)), **named(64)))
    await turns()
    assert rig.waypoints.of_slot and rig.snapshots.describe(ANONYMOUS)[0] == [] and rig.snapshots.num_held == 0
    rig.snapshots.check_integrity()
    rig.waypoints.check_integrity()
    rig.engine.release()
    assert len(ids(await step)) == 1 and not rig.waypoints.of_slot


# -- several spans ---------------------------------------------------------------------------------------------------


async def both(rig: Rig, handle: int, *rows: list[float], places: list[dict[str, Any]]) -> list[StepResult]:
    """A step of each span, one after the other; their waypoints."""
    results = []
    for span, changes in enumerate(places):
        results.append(await rig.step((handle, PREFILL, 1, 0, -1, rows[0]), span=span, **changes))
    return results


@pytest.mark.parametrize("paged_spans", [(0,), (1,), (0, 1)])
async def test_the_last_span_tells_of_a_state_of_all(paged_spans: tuple[int, ...]) -> None:
    rig = make_rig(spans=2, paged_spans=paged_spans, snapshot_lines=3)
    (parent,) = rig.open()
    first, last = await both(rig, parent, tokens(150), places=[named(64, 128, at_end=True)] * 2)
    assert left(first) == [] and left(last) == [(64, ""), (128, ""), (150, "")]
    assert rig.lines.num_frozen == 3 and not rig.waypoints.of_slot
    for place, id in zip((64, 128, 150), ids(last), strict=True):
        (child,) = rig.restore(id)
        assert await decoded(rig, child, place, spans=2) == [checksum([*tokens(place), 9.0])] * 2
        rig.close(child)


async def test_a_span_that_goes_by_gives_up_the_place() -> None:
    rig = make_rig(spans=2)
    (parent,) = rig.open()
    first, last = await both(rig, parent, tokens(150), places=[named(64, 128), named(128)])
    assert left(first) == [] and left(last) == [(128, "")]
    assert not rig.waypoints.of_slot and rig.lines.num_frozen == 1
    (other,) = rig.open()
    first, last = await both(rig, other, tokens(150), places=[{}, named(64, at_end=True)])
    assert left(last) == [(64, "SPANS_UNEVEN"), (150, "")]


async def test_an_end_that_another_span_is_beyond_is_skipped() -> None:
    rig = make_rig(spans=2)
    (parent,) = rig.open()
    for step in (1, 2):
        await rig.step((parent, PREFILL, step, 100 * (step - 1), -1, tokens(100)), **named(at_end=True))
    result = await rig.step((parent, PREFILL, 1, 0, -1, tokens(100)), span=1, **named(at_end=True))
    assert left(result) == [(100, "SPANS_UNEVEN")]


@pytest.mark.parametrize("how", ["close", "poison", "expire"])
async def test_what_is_under_way_ends_with_its_sequence(how: str) -> None:
    rig = make_rig(spans=2)
    (parent,) = rig.open()
    await rig.step((parent, PREFILL, 1, 0, -1, tokens(150)), **named(64, 128))
    assert rig.waypoints.of_slot and rig.lines.num_frozen == 2
    if how == "close":
        rig.close(parent)
    elif how == "expire":
        rig.now += 1
        rig.table.reap()
        rig.now += 61.5
        rig.table.reap()
        rig.now += 1
        rig.table.reap()
    else:
        rig.engine.fail_next = True
        await rig.step((parent, PREFILL, 1, 0, -1, tokens(150)), span=1, **named(64, 128))
    assert not rig.waypoints.of_slot and all_is_back(rig)


async def test_a_snapshot_between_the_spans_changes_nothing() -> None:
    """It takes the line that the sequence writes, and its pages go on with another."""
    rig = make_rig(spans=2, paged_spans=(0, 1))
    (parent,) = rig.open()
    for span in (0, 1):
        await rig.step((parent, PREFILL, 1, 0, -1, tokens(10)), span=span)
    await rig.snapshot(parent)
    row = tokens(150, 11)
    await rig.step((parent, PREFILL, 2, 10, -1, row), **named(64, 128))
    last = await rig.step((parent, PREFILL, 2, 10, -1, row), span=1, **named(64, 128))
    assert left(last) == [(74, ""), (138, "")]
    for place, id in zip((74, 138), ids(last), strict=True):
        (child,) = rig.restore(id)
        assert await decoded(rig, child, place, spans=2) == [checksum([*tokens(place), 9.0])] * 2
        rig.close(child)


def test_places_of_a_chunk_are_those_within_it() -> None:
    asked = RowWaypoints((64, 128, 192))
    assert [asked.within(begin, begin + 64) for begin in (0, 64, 128, 192)] == [(64,), (128,), (192,), ()]
    assert (asked.within(0, 63), asked.within(0, 200), asked.num_places) == ((), (64, 128, 192), 3)
    assert LeftWaypoint(3) == (3, b"", "") and np.all(np.diff(asked.tokens) > 0)


async def test_a_state_is_found_by_the_key_of_its_place() -> None:
    rig = make_rig()
    (parent,) = rig.open()
    await rig.step((parent, PREFILL, 1, 0, -1, tokens(10)))
    at = {74: b"a" * 16, 110: b"b" * 16}
    result = await rig.step((parent, PREFILL, 2, 10, -1, tokens(100)), **named(64, at_end=True, keys=at))
    for (position, key), id in zip(at.items(), ids(result), strict=True):
        found = rig.states.find(PrefixKeys.of([key], [position], 200), b"", ANONYMOUS, ReusePolicy.ALWAYS).prefix
        assert found is not None and (found.snapshot, found.position) == (id, position)


async def test_a_state_has_its_sequences_adapter_and_keeps_it() -> None:
    rig = make_rig(adapter_slots=2)
    rig.load("1")
    (parent,) = rig.open(adapter="1")
    step = rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(100)), **named(64)))
    await turns()
    rig.device.finish()
    result = await step
    rig.close(parent)
    rig.scheduler.settle()
    rig.snapshots.check_integrity()
    (child,) = rig.restore(*ids(result))
    assert await decoded(rig, child, 64) == [checksum([*tokens(64), 9.0], 1)]


async def test_what_is_kept_of_places_is_counted() -> None:
    rig = make_rig()
    (parent,) = rig.open()
    request = rig.request((parent, PREFILL, 1, 0, -1, tokens(200)), **named(64, 128, at_end=True))
    plain = rig.request((parent, PREFILL, 1, 0, -1, tokens(200)))
    assert request.form.total_kept_bytes == plain.form.total_kept_bytes + 3 * WAYPOINT_BYTES
    await rig.submit(request)
    assert rig.table.replies.used_bytes == request.form.total_kept_bytes
