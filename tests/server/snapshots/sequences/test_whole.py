"""Sequences that leave a server as they stand and go on at another: the same bits, the same retries, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.exchanged_states import exported, file_of, forged
from rigs.scheduler_rig import refuses
from rigs.state_rig import FINGERPRINT, PAGE_SIZE, StateRig
from rigs.stored_states import DECODE, MODELS, PREFILL, VERIFY, make_rig
from rigs.until import until
from rigs.whole_sequences import Cell, Traveller, imported, opened

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import ANONYMOUS, Principal, Quotas
from deltaline_server.snapshots.header import decode
from deltaline_server.snapshots.layout import Part, Section, state_bytes
from deltaline_server.step import RowOutcome, RowWaypoints, StepBatch


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[StateRig, StateRig]]:
    """A function that makes two rigs of one model."""

    def make(name: str = "hybrid", **changes: Any) -> tuple[StateRig, StateRig]:
        for folder in ("from", "to"):
            (tmp_path / folder).mkdir()
        return make_rig(tmp_path / "from", name, **changes), make_rig(tmp_path / "to", name, **changes)

    return make


def check_idle(*rigs: StateRig) -> None:
    """Nothing of what travelled is left but sequences."""
    for rig in rigs:
        assert rig.tiers.host is not None and rig.tiers.host.used_bytes == 0
        rig.tiers.host.check_integrity()
        rig.states.check_integrity()


async def prefilled(rig: StateRig) -> Traveller:
    one = opened(rig)
    for span in range(len(one.cells)):
        await one.step(span, PREFILL, 37)
    return one


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
@pytest.mark.parametrize("accepted", [None, 0, 2, 4])
async def test_a_pending_verify_comes_along_and_rides_on_the_next_step(
    pair: Any, name: str, accepted: int | None
) -> None:
    rig, to = pair(name)
    one = await prefilled(rig)
    if accepted is not None:
        for span in range(len(one.cells)):
            await one.step(span, VERIFY, 4)
    other = await one.moved_to(to)
    for span in range(len(one.cells)):
        await is_replayed(one, other, span)
        await goes_on(one, other, span, -1 if accepted is None else accepted)
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
    assert to.table.ledger.whole(0).fixed == rig.table.ledger.whole(0).fixed == {(37, 0): 2}
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
    one = Traveller(rig, int(children.handles[0]), cells=[Cell(0, 37), Cell(0, 37)])
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
    async with rig.states.stored(rig.table.server_epoch, one.handles, ANONYMOUS) as id:
        assert rig.states.describe(ANONYMOUS) == ([], False) and rig.snapshots.num_held == 0
        with refuses(Reason.SNAPSHOT_UNKNOWN):
            await exported(rig, id)
    await one.moved_to(to)
    assert to.states.describe(ANONYMOUS) == ([], False) and to.lines.num_frozen == 0
    check_idle(rig, to)


# -- all or nothing --------------------------------------------------------------------------------------------------


async def test_a_step_that_left_waypoints_comes_without_its_reply(pair: Any) -> None:
    """The snapshots that it tells of stay where they are."""
    rig, to = pair()
    one = opened(rig)
    await one.step(0, PREFILL, 70, waypoints=RowWaypoints((64,)))
    other = await one.moved_to(to)
    result = await other.again(0)
    assert [refusal.reason for refusal in result.refusals.values()] == [Reason.STEP_STALE]
    await goes_on(one, other, 0)


async def test_an_import_has_a_lease_from_when_it_is_there(pair: Any) -> None:
    rig, to = pair()
    one = await prefilled(rig)
    content = await one.exported()
    to.engine.eager = False
    importing = asyncio.ensure_future(imported(to, [content], lease_s=5.0))
    await until(lambda: to.table.num_open)
    to.now += 100.0
    assert to.table.reap() == 0, "it is yet to be written"
    while not importing.done():
        to.engine.run()
        await asyncio.sleep(0.001)
    to.engine.eager = True
    handles = np.array([await importing], dtype=np.uint64)
    [told] = to.table.describe(to.table.server_epoch, handles)
    assert told.lease_remaining_s == 5.0 and told.spans[0].step == 1 and told.spans[0].position == 37
    to.now += 6.0
    assert to.table.reap() == 1
    check_idle(to)


async def test_quotas_and_bounds_leave_nothing(pair: Any) -> None:
    rig, to = pair(pages=8)
    one = await prefilled(rig)
    content = await one.exported()
    dora = Principal(4, "dora", quotas=Quotas(sequences=1))
    await imported(to, [content], dora)
    with refuses(Reason.QUOTA_EXCEEDED):
        await imported(to, [content], dora)
    await imported(to, [content])
    with refuses(Reason.PAGES_EXHAUSTED):
        await imported(to, [content])
    replies = to.table.replies
    replies.limit_bytes = replies.used_bytes
    with refuses(Reason.REPLY_BYTES_EXHAUSTED):
        await imported(to, [content])
    assert to.table.num_open == 2 and replies.used_bytes == 2 * sum(
        section.num_bytes for section in sections_of(rig, content) if section.part is Part.REPLY
    )
    to.table.is_draining = True
    with refuses(Reason.DRAINING):
        await imported(to, [content])
    check_idle(to)


async def test_a_copy_that_fails_leaves_nothing(pair: Any) -> None:
    rig, to = pair()
    content = await (await prefilled(rig)).exported()
    assert to.moves is not None

    async def failing(_: Any) -> None:
        raise RuntimeError("the device is gone")

    to.moves.copy = failing
    with pytest.raises(RuntimeError):
        await imported(to, [content])
    assert to.table.num_open == 0 and to.table.replies.used_bytes == 0
    check_idle(to)


PROGRESS: dict[str, dict[str, Any]] = {
    "a pending verify without a step": {"step": 0},
    "a verify that waits and is to be replayed": {"pending": 2, "replay": 2},
    "drafts that are of no verify": {"records_0": 1},
    "a commit of the verify that waits": {"committed_step": 2},
    "a count without a commit": {"committed_accepted": 1},
}


@pytest.mark.parametrize("change", PROGRESS.values(), ids=PROGRESS)
async def test_a_progress_that_no_steps_lead_to_is_refused(pair: Any, change: dict[str, Any]) -> None:
    rig, to = pair()
    one = await prefilled(rig)
    await one.step(0, VERIFY, 4)
    content = await one.exported()
    length = int.from_bytes(content[12:16], "little")
    stored = decode(content[:length], rig.tiers.layout, FINGERPRINT)
    spans = (replace(stored.header.spans[0], **change),)
    sections = rig.tiers.layout.sections(spans)
    memory = np.zeros(state_bytes(sections), dtype=np.uint8)
    with refuses(Reason.INVALID_REQUEST) as caught:
        await imported(to, [file_of(replace(stored.header, spans=spans), sections, memory)])
    assert "spans[0]." in caught.value.refusal.message, caught.value.refusal.message
    assert to.table.num_open == 0
    check_idle(to)


@pytest.mark.parametrize(
    ("at", "content", "reason"),
    [
        (0, b"\x07", Reason.INVALID_REQUEST),
        (1, b"\x09", Reason.INVALID_REQUEST),
        (2, b"\x01", Reason.INVALID_REQUEST),
        (4, b"\xf0\xff\xff\xff", Reason.INVALID_REQUEST),
        (8, b"\xff\xff\xff\xff", Reason.INVALID_REQUEST),
        (12, b"\x01\x00\x00\x00", Reason.INVALID_REQUEST),
        (16, b"\xff" * 8, Reason.INVALID_REQUEST),
        (-4, b"\x00\x00\xc0\x7f", Reason.NON_FINITE_INPUT),
    ],
    ids=["kind", "rows asked", "zeros", "accepted", "request", "rows", "position", "value"],
)
async def test_a_reply_that_no_step_had_is_refused(pair: Any, at: int, content: bytes, reason: Reason) -> None:
    rig, to = pair()
    whole = await (await prefilled(rig)).exported()

    def change(sections: Any, memory: Any) -> None:
        section = sections[Part.REPLY, 0, 0]
        reply = memory[section.offset : section.offset + section.num_bytes]
        reply[at : at + len(content) or None] = np.frombuffer(content, dtype=np.uint8)

    with refuses(reason):
        await imported(to, [forged(rig.tiers.layout, whole, change)])
    assert to.table.num_open == 0 and to.table.replies.used_bytes == 0
    check_idle(to)
    await imported(to, [whole])


async def test_damaged_sequences_leave_nothing(pair: Any) -> None:
    rig, to = pair("hybrid, two spans")
    one = await prefilled(rig)
    await one.step(1, VERIFY, 3)
    whole, rng = await one.exported(), np.random.default_rng(0)
    for number in range(60):
        content = bytearray(whole)
        if number % 2:
            content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
        else:
            del content[int(rng.integers(len(content))) :]
        with pytest.raises(RequestError):
            await imported(to, [bytes(content)])
        assert to.table.num_open == 0 and to.table.replies.used_bytes == 0
        check_idle(to)
    await imported(to, [whole])


def sections_of(rig: StateRig, content: bytes) -> tuple[Section, ...]:
    length = int.from_bytes(content[12:16], "little")
    return decode(content[:length], rig.tiers.layout, FINGERPRINT).sections
