"""Sequences that were let go of: their steps, their handles, and for how long who asks is told where they live."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, Rig, outputs, reason, refuses, turns

from deltaline_server.errors import Reason
from deltaline_server.principal import ANONYMOUS, Principal
from deltaline_server.step import StepResult
from deltaline_server.tables.moved import MovedSequences, Owner
from deltaline_server.tables.sequence import SequenceState
from deltaline_server.tables.sequences import SequenceTable

OWNER = Owner("there:50051", 77, 99)
TOLD = {"server": "there:50051", "server_epoch": "77", "sequence": "99"}
ALICE, BOB = Principal(1, "alice"), Principal(2, "bob")
NOWHERE = SequenceState.UNKNOWN, None


def found(table: SequenceTable, handle: int, principal: Principal = ANONYMOUS) -> tuple[SequenceState, Owner | None]:
    named = np.array([handle], dtype=np.uint64)
    _, states = table.lookup(table.server_epoch, named, principal)
    return SequenceState(int(states[0])), table.owners(table.server_epoch, named, states, principal).get(0)


def decode(rig: Rig, step: int, *handles: int, span: int = 0) -> asyncio.Future[StepResult]:
    rows = [(handle, DECODE, step, step - 1, -1, [float(step)]) for handle in handles]
    return rig.submit(rig.request(*rows, span=span))


def held(rig: Rig, handle: int) -> asyncio.Future[None]:
    """A sequence's place in the order of its steps is held until the future is done."""
    kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    rig.scheduler.in_order(rig.slots(handle), lambda dropped: kept)
    return kept


async def test_steps_that_wait_are_told_of_the_owner_and_their_neighbours_run() -> None:
    rig = Rig(spans=2)
    other, gone = rig.open(2)
    slot = int(rig.slots(gone)[0])
    await decode(rig, 1, gone)
    kept = held(rig, gone)
    waiting = [decode(rig, 2, gone), decode(rig, 3, gone), decode(rig, 1, gone, span=1)]
    joined, beside = decode(rig, 2, gone), decode(rig, 1, other, gone, span=1)
    await turns()
    assert not any(one.done() for one in [*waiting, joined])
    rig.table.let_go(slot, OWNER)
    kept.set_result(None)
    results = await asyncio.wait_for(asyncio.gather(*waiting, joined, beside), 10)
    for result, row in zip(results, (0, 0, 0, 0, 1), strict=True):
        assert reason(result, row) is Reason.STATE_ELSEWHERE and result.refusals[row].metadata == TOLD
    assert outputs(results[-1]) == [1.0]
    await turns()
    assert rig.scheduler.load().queued_rows == 0 and not rig.scheduler.has_failed
    assert rig.table.num_open == 1
    assert rig.table.replies.used_bytes == rig.table.kept_bytes(ANONYMOUS) > 0, "nothing is set aside for them"
    rig.table.check_integrity()


async def test_the_next_sequence_in_the_slot_is_another() -> None:
    rig = Rig(slots=1)
    (gone,) = rig.open()
    kept = held(rig, gone)
    waiting = decode(rig, 1, gone)
    rig.table.let_go(int(rig.slots(gone)[0]), OWNER)
    (after,) = rig.open()
    step = decode(rig, 1, after)
    kept.set_result(None)
    assert reason(await waiting) is Reason.STATE_ELSEWHERE
    assert outputs(await step) == [1.0]
    assert found(rig.table, gone) == (SequenceState.ELSEWHERE, OWNER)
    rig.scheduler.settle()
    rig.close(after)
    assert found(rig.table, gone) == (SequenceState.ELSEWHERE, OWNER), "whoever had the slot since"
    assert found(rig.table, after) == (SequenceState.CLOSED, None)


async def test_all_calls_about_it_are_told_where_it_lives() -> None:
    rig = Rig(snapshot_lines=4)
    stays, gone = rig.open(2)
    kept = held(rig, gone)
    forked = asyncio.ensure_future(rig.fork(gone))
    await turns()
    rig.table.let_go(int(rig.slots(gone)[0]), OWNER)
    kept.set_result(None)
    with refuses(Reason.STATE_ELSEWHERE) as waited:
        await forked
    assert waited.value.refusal.metadata == TOLD | {"row": "0"}
    with refuses(Reason.STATE_ELSEWHERE) as late:
        await rig.snapshot(stays, gone)
    assert late.value.refusal.metadata == TOLD | {"row": "1"}
    table, named = rig.table, np.array([stays, gone], dtype=np.uint64)
    ones = np.ones(2, dtype=np.int64)
    _, refusals = table.commit(table.server_epoch, 0, named, ones, ones.astype(np.int32))
    assert refusals[1].reason is Reason.STATE_ELSEWHERE and refusals[1].metadata == TOLD
    assert refusals[0].reason is Reason.NOTHING_TO_COMMIT
    result = await rig.step((stays, DECODE, 1, 0, -1, [1.0]), (gone, DECODE, 1, 0, -1, [1.0]))
    assert (reason(result, 0), result.refusals[1].metadata) == (None, TOLD)
    expected = [SequenceState.OPEN, SequenceState.ELSEWHERE]
    assert table.renew(table.server_epoch, named) == expected
    assert [told.state for told in table.describe(table.server_epoch, named)] == expected
    assert rig.close(stays, gone) == [SequenceState.CLOSED, SequenceState.ELSEWHERE]


def test_its_principal_alone_is_told() -> None:
    rig = Rig()
    handle = int(rig.table.open(1, principal=ALICE).handles[0])
    rig.table.let_go(int(rig.slots(handle)[0]), OWNER)
    assert found(rig.table, handle, ALICE) == (SequenceState.ELSEWHERE, OWNER)
    assert found(rig.table, handle, BOB) == found(rig.table, handle) == NOWHERE
    assert rig.table.num_open_of[ALICE.number] == 0


def test_it_is_told_for_as_long_as_its_lease_was() -> None:
    rig = Rig()
    short, long = (int(rig.table.open(1, lease_s).handles[0]) for lease_s in (10.0, 20.0))
    for handle in (short, long):
        rig.table.let_go(int(rig.slots(handle)[0]), OWNER)
    rig.now += 9.9
    assert found(rig.table, short) == found(rig.table, long) == (SequenceState.ELSEWHERE, OWNER)
    rig.now += 0.2
    assert (found(rig.table, short), found(rig.table, long)[1]) == (NOWHERE, OWNER)
    rig.now += 10
    assert found(rig.table, long) == NOWHERE and len(rig.table.moved) == 0


def test_time_that_was_added_to_a_lease_counts() -> None:
    rig = Rig()
    handle = int(rig.table.open(1, 10.0).handles[0])
    slot = int(rig.slots(handle)[0])
    rig.table.renew(rig.table.server_epoch, np.array([handle], dtype=np.uint64), lease_s=50.0)
    rig.now += 20
    assert rig.table.lease_s(slot) == 30.0
    rig.table.let_go(slot, OWNER)
    rig.now += 29
    assert found(rig.table, handle) == (SequenceState.ELSEWHERE, OWNER)
    rig.now += 2
    assert found(rig.table, handle) == NOWHERE


@pytest.mark.parametrize("later_s", [5.0, 10.0, 30.0])
def test_what_is_told_anew_counts(later_s: float) -> None:
    now, later = [0.0], Owner("later:1", 78, 100)
    moved = MovedSequences(lambda: now[0])
    moved.add(5, 1, "a", OWNER, 10.0)
    moved.add(5, 1, "a", later, later_s)
    now[0] = later_s - 1
    assert moved.find(5, 1, "a") == later and moved.count_untold() == 1
    now[0] = 40.0
    assert moved.find(5, 1, "a") is None and moved.count_untold() == len(moved) == 0


def test_of_too_many_those_that_end_first_are_forgotten() -> None:
    moved = MovedSequences(lambda: 0.0, limit=2)
    for handle, remaining_s in ((1, 30.0), (2, 10.0), (3, 20.0)):
        moved.add(5, handle, "a", OWNER, remaining_s)
    assert [moved.find(5, handle, "a") for handle in (1, 2, 3)] == [OWNER, None, OWNER]
    assert moved.find(6, 1, "a") is None and moved.find(5, 1, "b") is None and moved.find(5, 1, "") is None


@pytest.mark.parametrize("principal", [ALICE, BOB])
def test_a_predecessors_sequence_is_found_by_its_epoch(principal: Principal) -> None:
    rig = Rig()
    table = rig.table
    table.moved.add(5, 7, "alice", OWNER, 60.0)
    named = np.array([7, 8], dtype=np.uint64)
    _, states = table.lookup(5, named, principal)
    own = SequenceState.ELSEWHERE if principal is ALICE else SequenceState.LOST
    assert states.tolist() == [own, SequenceState.LOST]
    assert table.owners(5, named, states, principal) == ({0: OWNER} if principal is ALICE else {})
    assert table.lookup(6, named, principal)[1].tolist() == [SequenceState.LOST] * 2
