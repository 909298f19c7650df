"""Snapshots and forks: in the order of steps, all or none, their owner's alone, and what gives way for what."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, PREFILL, VERIFY, Rig, checksum, outputs, reason, refuses, turns

from deltaline_server.errors import Reason
from deltaline_server.principal import ANONYMOUS, Principal, Quotas
from deltaline_server.tables.captured import snapshots
from deltaline_server.tables.captured.snapshot import SnapshotState
from deltaline_server.tables.prefixes.cost import Tier
from deltaline_server.tables.prefixes.eviction import Eviction

OTHER = Principal(2, "other")


def tokens(count: int, first: int = 1) -> list[float]:
    return [float(i) for i in range(first, first + count)]


def make_rig(**changes: Any) -> Rig:
    return Rig(**({"snapshot_lines": 3, "pages": 60} | changes))


async def prefilled(rig: Rig, count: int = 1, length: int = 6) -> list[int]:
    handles = rig.open(count)
    for i, handle in enumerate(handles):
        await rig.step((handle, PREFILL, 1, 0, -1, tokens(length, 1 + i)))
    return handles


async def decoded(rig: Rig, handle: int, step: int, position: int, token: float = 9.0) -> float:
    result = await rig.step((handle, DECODE, step, position, -1, [token]))
    assert reason(result) is None
    return outputs(result)[0]


async def test_a_snapshot_outlives_its_sequence_and_is_begun_from_again_and_again() -> None:
    rig = make_rig()
    (parent,) = await prefilled(rig)
    (made,) = await rig.snapshot(parent, lease_s=30.0, is_pinned=True)
    assert (len(made.id), made.position, made.is_pinned, made.lease_s) == (16, 6, True, 30.0)
    assert (made.num_bytes, made.tier, made.created) == (100 + 2 * 10, Tier.DEVICE, 1e9 + 100)
    assert rig.snapshots.describe(ANONYMOUS) == ([made], False)
    rig.close(parent)
    for child in rig.restore(made.id, made.id):
        assert await decoded(rig, child, 1, 6) == checksum([*tokens(6), 9.0])
    for _ in range(2):
        assert rig.snapshots.release([made.id], ANONYMOUS) == [SnapshotState.RELEASED]
    with refuses(Reason.SNAPSHOT_UNKNOWN) as caught:
        rig.restore(made.id)
    assert caught.value.refusal.metadata == {"state": "RELEASED"}


async def test_a_fork_has_its_place_among_steps_in_flight() -> None:
    rig = make_rig(eager=False)
    (parent,) = rig.open()
    steps = [rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(6))))]
    forked = asyncio.ensure_future(rig.fork(parent, count=3))
    await turns()
    steps.append(rig.submit(rig.request((parent, DECODE, 2, 6, -1, [7.0]))))
    await turns()
    assert not forked.done() and len(rig.engine.batches) == 1
    rig.engine.release()
    children = await asyncio.wait_for(forked, 10)
    assert outputs(await steps[1]) == [checksum(tokens(7))]
    for token, child in enumerate(children):
        assert await decoded(rig, child, 1, 6, token) == checksum([*tokens(6), token])
    rig.close(parent, *children)
    rig.snapshots.check_integrity()
    assert (rig.lines.num_used, rig.snapshots.num_held) == (0, 0)


async def test_children_of_several_sequences_come_in_their_order_and_inherit() -> None:
    rig = make_rig()
    first, second = await prefilled(rig, 2)
    await rig.step((second, VERIFY, 2, 6, -1, [3.0, 4.0]))
    handles, numbers = np.array([second], dtype=np.uint64), np.array([2])
    rig.table.commit(rig.table.server_epoch, 0, handles, numbers, np.array([1], dtype=np.int32))
    children = await rig.fork(first, second, count=2)
    expected = [checksum([*tokens(6), 9.0])] * 2 + [checksum([*tokens(6, 2), 3.0, 9.0])] * 2
    assert [await decoded(rig, child, 1, 6 + i // 2) for i, child in enumerate(children)] == expected
    (described,) = rig.table.describe(rig.table.server_epoch, np.array(children[3:], dtype=np.uint64))
    assert (described.spans[0].step, described.spans[0].position) == (1, 8)


async def test_all_or_none() -> None:
    rig = make_rig()
    first, second = await prefilled(rig, 2)
    await rig.step((second, VERIFY, 2, 6, -1, [3.0]))
    for refused in (rig.snapshot(first, second), rig.fork(first, second)):
        with refuses(Reason.VERIFY_PENDING):
            await refused
    with refuses(Reason.DUPLICATE_SEQUENCE):
        await rig.snapshot(first, first)
    with refuses(Reason.SEQUENCE_UNKNOWN):
        await rig.fork(first, 77)
    with refuses(Reason.SEQUENCE_UNKNOWN):
        await rig.snapshot(first, principal=OTHER)
    with refuses(Reason.NO_FREE_LINES):
        await rig.fork(first, count=7)
    with refuses(Reason.INVALID_REQUEST):
        await rig.fork(first, count=0)
    with refuses(Reason.INVALID_REQUEST):
        await rig.snapshot(first, lease_s=1e9)
    (made,) = await rig.snapshot(first)
    with refuses(Reason.SNAPSHOT_UNKNOWN):
        rig.restore(made.id, b"x" * 16)
    rig.table.is_draining = True
    with refuses(Reason.DRAINING):
        await rig.fork(first)
    with refuses(Reason.DRAINING):
        rig.restore(made.id)
    assert (rig.lines.num_frozen, rig.table.num_open, rig.snapshots.num_held) == (1, 2, 1)


async def test_a_state_that_is_not_finite_is_never_captured() -> None:
    rig = make_rig(eager=False)
    (parent,) = rig.open()
    rig.engine.poison_token = 3.0
    step = rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(6))))
    made = asyncio.ensure_future(rig.snapshot(parent))
    await turns()
    rig.engine.release()
    with refuses(Reason.STATE_NOT_FINITE):
        await asyncio.wait_for(made, 10)
    assert reason(await step) is Reason.STATE_POISONED
    with refuses(Reason.STATE_NOT_FINITE):
        await rig.fork(parent)


async def test_a_step_before_it_that_is_refused_refuses_it() -> None:
    rig = make_rig(eager=False)
    (parent,) = rig.open()
    running = [rig.submit(rig.request((parent, DECODE, step, step - 1, -1, [1.0]))) for step in (1, 2)]
    await turns()
    running.append(rig.submit(rig.request((parent, DECODE, 3, 2, -1, [1.0]), deadline_s=rig.now + 1)))
    made = asyncio.ensure_future(rig.fork(parent))
    await turns()
    rig.now += 2
    rig.engine.release()
    assert [reason(await one) for one in running] == [None, None, Reason.QUEUE_DEADLINE]
    with refuses(Reason.PREDECESSOR_REFUSED):
        await asyncio.wait_for(made, 10)
    assert rig.lines.num_frozen == 0


async def test_nothing_is_done_for_who_has_gone() -> None:
    rig = make_rig(eager=False)
    (parent,) = rig.open()
    running = rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(6))))
    made = asyncio.ensure_future(rig.snapshot(parent))
    await turns()
    made.cancel()
    rig.engine.release()
    await running
    assert await decoded(rig, parent, 2, 6) == checksum([*tokens(6), 9.0])
    assert rig.snapshots.num_held == 0


async def test_another_s_snapshot_is_as_one_that_never_was() -> None:
    rig = make_rig()
    (parent,) = await prefilled(rig)
    (made,) = await rig.snapshot(parent)
    for id in (made.id, b"x" * 16):
        with refuses(Reason.SNAPSHOT_UNKNOWN) as caught:
            rig.restore(id, principal=OTHER)
        assert (str(caught.value), caught.value.refusal.metadata) == ("no snapshot has this id", {"state": "UNKNOWN"})
        assert rig.snapshots.release([id], OTHER) == [SnapshotState.UNKNOWN]
        assert rig.snapshots.renew([id], OTHER, lease_s=None) == [SnapshotState.UNKNOWN]
    assert rig.snapshots.describe(OTHER) == ([], False) and len(rig.snapshots.describe(ANONYMOUS)[0]) == 1


async def test_another_s_call_does_not_keep_a_snapshot() -> None:
    """Who has learned an id can't let its owner's snapshot stay for as long as a call of theirs takes."""
    rig = make_rig(snapshot_lines=1)
    first, second = await prefilled(rig, 2)
    (made,) = await rig.snapshot(first)
    await decoded(rig, first, 2, 6)
    async with rig.states.near([made.id], OTHER):
        await rig.snapshot(second)
    assert rig.snapshots.renew([made.id], ANONYMOUS, None) == [SnapshotState.EVICTED]


async def test_a_lease_runs_out_unless_it_is_renewed_and_a_stall_is_waited_for() -> None:
    rig = make_rig()
    first, second = await prefilled(rig, 2)
    made = await rig.snapshot(first, second, lease_s=10.0)
    ids = [one.id for one in made]
    rig.snapshots.reap()
    rig.now += 9
    assert rig.snapshots.renew(ids[:1], ANONYMOUS, lease_s=None) == [SnapshotState.HELD]
    rig.now += 2
    rig.snapshots.reap()  # this one comes late
    assert rig.snapshots.num_held == 2
    rig.now += 1
    rig.snapshots.reap()
    assert rig.snapshots.renew(ids, ANONYMOUS, lease_s=5.0) == [SnapshotState.HELD, SnapshotState.EXPIRED]
    rig.snapshots.check_integrity()


async def test_leases_that_run_out_together_end_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of all states that a restart has found: steps need not wait for the end of thousands."""
    monkeypatch.setattr(snapshots, "REAPED_AT_ONCE", 2)
    rig = make_rig()
    for handle in await prefilled(rig, 3):
        await rig.snapshot(handle, lease_s=1.5)
    for _ in range(2):
        rig.now += 1
        ended = rig.snapshots.reap()
    assert (ended, rig.snapshots.num_held) == (2, 1)
    assert (rig.snapshots.reap(), rig.snapshots.num_held) == (1, 0)
    rig.snapshots.check_integrity()


async def test_unpinned_snapshots_give_way_to_captures_the_least_recently_used_first() -> None:
    rig = make_rig(slots=5)
    handles = await prefilled(rig, 5)
    ids = []
    for i, handle in enumerate(handles[:3]):
        (made,) = await rig.snapshot(handle, is_pinned=i == 0)
        ids.append(made.id)
        await decoded(rig, handle, 2, 6)  # lets go of the line
    rig.close(handles[4])
    rig.close(rig.restore(ids[1])[0])
    (made,) = await rig.snapshot(handles[3])
    assert rig.snapshots.renew(ids, ANONYMOUS, lease_s=None) == [
        SnapshotState.HELD,
        SnapshotState.HELD,
        SnapshotState.EVICTED,
    ]
    await rig.fork(handles[0])
    held = {one.id for one in rig.snapshots.describe(ANONYMOUS)[0]}
    assert held == {ids[0], made.id} and rig.snapshots.num_evicted == 2


async def test_lines_that_are_pinned_or_read_by_several_do_not_give_way() -> None:
    rig = make_rig(snapshot_lines=2)
    first, second, third = await prefilled(rig, 3)
    await rig.snapshot(first, is_pinned=True)
    (unpinned,) = await rig.snapshot(second)
    (child,) = await rig.fork(second)
    with refuses(Reason.NO_SNAPSHOT_LINES) as caught:
        await rig.snapshot(third)
    assert "1 lines asked for, 0 of 2" in str(caught.value) and caught.value.refusal.retry_after_s
    assert rig.snapshots.renew([unpinned.id], ANONYMOUS, lease_s=None) == [SnapshotState.HELD]  # not in vain
    await decoded(rig, child, 1, 6)
    await rig.snapshot(third)
    assert rig.snapshots.renew([unpinned.id], ANONYMOUS, lease_s=None) == [SnapshotState.EVICTED]


@pytest.mark.parametrize("spans", [1, 2])
async def test_an_idle_sequence_is_given_its_line_back_to_write(spans: int) -> None:
    rig = make_rig(snapshot_lines=1, spans=spans, paged_spans=(0,))
    first, second = rig.open(2)
    for span in range(spans):
        for handle in (first, second):
            await rig.step((handle, PREFILL, 1, 0, -1, tokens(6)), span=span)
    line = rig.table.write_line[rig.slots(first)].tolist()
    for _ in range(2):
        (given_up,) = await rig.snapshot(first)
        (made,) = await rig.snapshot(second)  # neither has stepped since
        assert rig.snapshots.renew([given_up.id], ANONYMOUS, lease_s=None) == [SnapshotState.EVICTED]
        assert rig.table.write_line[rig.slots(first)].tolist() == line and rig.lines.num_frozen == 1
        assert (rig.lines.num_used, rig.table.num_frozen_reads) == (3, spans)
    for span in range(spans):
        result = await rig.step((first, DECODE, 2, 6, -1, [9.0]), (second, DECODE, 2, 6, -1, [8.0]), span=span)
        assert [outputs(result, row) for row in (0, 1)] == [[checksum([*tokens(6), token])] for token in (9.0, 8.0)]
    (child,) = rig.restore(made.id)
    assert await decoded(rig, child, 1, 6) == checksum([*tokens(6), 9.0])


async def test_a_line_that_is_to_be_captured_is_not_given_back() -> None:
    rig = make_rig(snapshot_lines=1)
    first, second = await prefilled(rig, 2)
    (made,) = await rig.snapshot(second)
    rig.snapshots.release([made.id], ANONYMOUS)
    with refuses(Reason.NO_SNAPSHOT_LINES):
        await rig.snapshot(first, second)
    await rig.snapshot(second)
    await rig.snapshot(first)
    assert (rig.snapshots.num_held, rig.snapshots.num_evicted) == (1, 1)


async def test_two_snapshots_of_one_line_give_way_together() -> None:
    rig = make_rig(snapshot_lines=1)
    first, second = await prefilled(rig, 2)
    made = [*await rig.snapshot(first), *await rig.snapshot(first)]
    await decoded(rig, first, 2, 6)
    await rig.snapshot(second)
    states = rig.snapshots.renew([one.id for one in made], ANONYMOUS, lease_s=None)
    assert states == [SnapshotState.EVICTED] * 2


async def test_unpinned_snapshots_give_way_to_steps_that_lack_pages() -> None:
    rig = make_rig(pages=8)
    (first,) = await prefilled(rig, 1, 14)
    (pinned,) = await rig.snapshot(first, is_pinned=True)
    (unpinned,) = await rig.snapshot(first)
    assert rig.pages is not None and rig.pages.num_used == 6
    rig.close(first)
    assert rig.pages.num_used == 5
    (second,) = rig.open()
    result = await rig.step((second, PREFILL, 1, 0, -1, tokens(17)))
    assert reason(result) is Reason.PAGES_EXHAUSTED
    ids = [pinned.id, unpinned.id]
    assert rig.snapshots.renew(ids, ANONYMOUS, lease_s=None) == [SnapshotState.HELD] * 2  # not in vain
    assert reason(await rig.step((second, PREFILL, 1, 0, -1, tokens(16)))) is None
    states = rig.snapshots.renew(ids, ANONYMOUS, lease_s=None)
    assert states == [SnapshotState.HELD, SnapshotState.EVICTED]
    with refuses(Reason.PAGES_EXHAUSTED):
        rig.restore(pinned.id)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"queue_rows": 1}, Reason.QUEUE_FULL),
        ({"queue_bytes": 100}, Reason.QUEUE_FULL),
        ({"reply_bytes": 100}, Reason.REPLY_BYTES_EXHAUSTED),
    ],
)
async def test_nothing_gives_way_to_a_step_that_is_refused_for_another_reason(
    limits: dict[str, int], why: Reason
) -> None:
    rig = make_rig(pages=8, **limits)
    (first,) = await prefilled(rig, 1, 6)
    (made,) = await rig.snapshot(first)
    rig.close(first)
    second, third = rig.open(2)
    rows = [(handle, PREFILL, 1, 0, -1, tokens(13)) for handle in (second, third)]
    with refuses(why):
        await rig.step(*rows)
    assert rig.snapshots.renew([made.id], ANONYMOUS, lease_s=None) == [SnapshotState.HELD]


async def test_the_number_of_snapshots_is_bounded_and_a_quota_is_told_with_its_numbers() -> None:
    rig = make_rig(slots=2, snapshot_lines=1, pages=0)
    principal = Principal(1, "one", quotas=Quotas(snapshots=2))
    handle = int(rig.table.open(1, principal=principal).handles[0])
    for _ in range(2):
        await rig.snapshot(handle, principal=principal)
    with refuses(Reason.QUOTA_EXCEEDED) as caught:
        await rig.snapshot(handle, principal=principal)
    assert caught.value.refusal.metadata == {"quota": "snapshots", "limit": "2", "used": "2", "asked": "1"}
    (other,) = rig.open()
    for _ in range(20):
        await rig.snapshot(other)
    assert rig.snapshots.num_held == 4 * (2 + 1 + 1)
    with refuses(Reason.NO_SNAPSHOT_LINES):
        for _ in range(20):
            await rig.snapshot(other, is_pinned=True)


@pytest.mark.parametrize("field", ["line", "pin"])
async def test_wrong_counts_are_noticed(field: str) -> None:
    rig = make_rig()
    (parent,) = await prefilled(rig)
    (made,) = await rig.snapshot(parent)
    if field == "line":
        rig.captured(parent)  # held by no snapshot
    else:
        rig.snapshots.device.room.remove(made.id)
    with pytest.raises(ValueError, match=r"snapshot table|room"):
        rig.snapshots.check_integrity()


async def test_a_principal_leaves_others_lines_for_pinned_snapshots() -> None:
    rig = make_rig(slots=10, snapshot_lines=4, pages=0)
    greedy, other, alone = Principal(1, "greedy"), Principal(2, "other"), Principal(3, "alone", is_alone=True)
    for principal, count in ((greedy, 2), (other, 1)):
        handles = [int(one) for one in rig.table.open(4, principal=principal).handles]
        for handle in handles[:count]:
            await rig.snapshot(handle, is_pinned=True, principal=principal)
        with refuses(Reason.NO_SNAPSHOT_LINES) as caught:
            await rig.snapshot(handles[count], is_pinned=True, principal=principal)
        assert f"this principal has {count} pinned snapshots" in str(caught.value)
        await rig.snapshot(handles[count], principal=principal)
    (handle,) = rig.table.open(1, principal=alone).handles.tolist()
    for _ in range(5):
        await rig.snapshot(handle, is_pinned=True, principal=alone)


async def test_what_others_are_told_is_not_forgotten_for_one_who_ends_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "ENDED", 16)
    rig = make_rig(pages=0)
    (parent,) = await prefilled(rig)
    (made,) = await rig.snapshot(parent)
    rig.snapshots.release([made.id], ANONYMOUS)
    handle = int(rig.table.open(1, principal=OTHER).handles[0])
    for _ in range(40):
        (one,) = await rig.states.create(
            rig.table.server_epoch, np.array([handle], dtype=np.uint64), OTHER, lease_s=None, is_pinned=False
        )
        rig.snapshots.release([one.id], OTHER)
    assert rig.snapshots.release([made.id], ANONYMOUS) == [SnapshotState.RELEASED]
    assert rig.snapshots.release([one.id], OTHER) == [SnapshotState.RELEASED]


async def test_snapshots_are_told_page_by_page() -> None:
    rig = make_rig(pages=0)
    (parent,) = await prefilled(rig)
    ids = sorted([(await rig.snapshot(parent))[0].id for _ in range(7)])
    first, has_more = rig.snapshots.describe(ANONYMOUS, limit=3)
    assert ([one.id for one in first], has_more) == (ids[:3], True)
    rig.snapshots.release(ids[2:3], ANONYMOUS)
    last, has_more = rig.snapshots.describe(ANONYMOUS, after=ids[2], limit=4)
    assert ([one.id for one in last], has_more) == (ids[3:], False)
    assert rig.snapshots.describe(ANONYMOUS, after=ids[-1], limit=4) == ([], False)


async def test_what_a_conversation_has_passed_gives_way_before_its_end() -> None:
    rig = make_rig(slots=4, snapshot_lines=3)
    (handle,) = await prefilled(rig)
    made = []
    for turn in range(3):
        made += await rig.snapshot(handle)
        await decoded(rig, handle, 2 + turn, 6 + turn)
    rig.close(handle)
    (child,) = rig.restore(made[2].id)
    await decoded(rig, child, 1, 8)
    await rig.snapshot(child)
    held = rig.snapshots.renew([one.id for one in made], ANONYMOUS, lease_s=None)
    assert held == [SnapshotState.HELD, SnapshotState.EVICTED, SnapshotState.HELD]


async def test_what_each_snapshot_continues_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, told = Eviction.stored, dict[bytes, bytes | None]()

    def watched(self: Eviction, snapshot: bytes, position: int, continues: bytes | None, **others: Any) -> None:
        told[snapshot] = continues
        stored(self, snapshot, position, continues, **others)

    monkeypatch.setattr(Eviction, "stored", watched)
    rig = make_rig(snapshot_lines=8)
    (parent,) = await prefilled(rig)
    (first,) = await rig.snapshot(parent)
    (second,) = await rig.snapshot(parent)
    (restored,), (forked,) = rig.restore(first.id), await rig.fork(parent)
    (third,), (fourth,) = await rig.snapshot(restored), await rig.snapshot(forked)
    rig.close(parent, restored, forked)
    (fifth,) = await rig.snapshot(*rig.open())  # in a slot that another had
    expected = {first: None, second: first, third: first, fourth: second, fifth: None}
    assert told == {one.id: continues and continues.id for one, continues in expected.items()}


@pytest.mark.parametrize("way", ["fork", "fork again", "restore"])
async def test_a_principal_leaves_others_lines_that_its_idle_sequences_wait_on(way: str) -> None:
    """Two that have yet to step on from a line keep it from everybody; one alone is given it to write."""
    rig = make_rig(slots=16, snapshot_lines=4, pages=0)
    greedy, other = Principal(1, "greedy"), Principal(2, "other")
    parents = [int(one) for one in rig.table.open(5, principal=greedy).handles]
    for handle in parents:
        await rig.step((handle, PREFILL, 1, 0, -1, [1.0]), principal=greedy)

    async def branch(parent: int) -> list[int]:
        if way == "fork":
            return await rig.fork(parent, principal=greedy)
        [made] = await rig.snapshot(parent, principal=greedy)
        return (
            await rig.fork(parent, principal=greedy) if way == "fork again" else rig.restore(made.id, principal=greedy)
        )

    children = [await branch(parent) for parent in parents[:2]]
    with refuses(Reason.NO_SNAPSHOT_LINES) as caught:
        await branch(parents[2])
    assert "this principal has 2 " in str(caught.value)
    (handle,) = rig.table.open(1, principal=other).handles.tolist()
    await rig.step((handle, PREFILL, 1, 0, -1, [1.0]), principal=other)
    await rig.snapshot(handle, principal=other)
    assert len(await rig.fork(handle, principal=other)) == 1
    for parent in parents[:2]:  # who steps on waits no more
        await rig.step((parent, DECODE, 2, 1, -1, [2.0]), principal=greedy)
    assert len(await branch(parents[2])) == len(children[0]) == 1
    rig.snapshots.check_integrity()


@pytest.mark.parametrize("pins", [True, False], ids=["pinned snapshots", "forks"])
async def test_a_principal_leaves_others_lines_in_one_call_too(pins: bool) -> None:
    rig = make_rig(slots=16, snapshot_lines=4, pages=0)
    greedy = Principal(1, "greedy")
    handles = [int(one) for one in rig.table.open(3, principal=greedy).handles]
    for handle in handles:
        await rig.step((handle, PREFILL, 1, 0, -1, [1.0]), principal=greedy)

    async def take(*handles: int) -> None:
        if pins:
            await rig.snapshot(*handles, is_pinned=True, principal=greedy)
        else:
            await rig.fork(*handles, principal=greedy)

    with refuses(Reason.NO_SNAPSHOT_LINES):
        await take(*handles)
    assert rig.lines.num_frozen == 0
    await take(*handles[:2])
    assert rig.lines.num_frozen == 2
