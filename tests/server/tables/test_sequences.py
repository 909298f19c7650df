"""The life of sequences: opened once by a token, with lines of their own, leased, and ended when nothing runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, Rig, outputs, reason, refuses, turns

from deltaline_server.errors import Reason
from deltaline_server.principal import Principal
from deltaline_server.tables.sequence import MAX_SLOTS, SequenceState, make_handles

TOKEN = b"0123456789abcdef"


def pass_time(rig: Rig, seconds: int) -> None:
    """Seconds of a server that reaps in each of them."""
    for _ in range(seconds):
        rig.now += 1.0
        rig.table.reap()


async def test_lines_are_zeroed_when_handed_out_and_capacity_is_told() -> None:
    rig = Rig(slots=2)
    a, _ = rig.open(2)
    with refuses(Reason.NO_FREE_LINES) as full:
        rig.open()
    assert full.value.refusal.retry_after_s
    rig.close(a)
    (c,) = rig.open()
    assert rig.zeroed == [1, 2, 1] and c != a and c % (1 << 24) == a % (1 << 24)
    for step, read_line in ((1, 0), (2, 1)):  # a fresh sequence reads the null line
        await rig.step((c, DECODE, step, step - 1, -1, [7]))
        assert rig.engine.batches[-1].control[1, 0] == read_line


def test_the_same_open_token_returns_the_same_handles() -> None:
    rig = Rig()
    first = rig.table.open(2, token=TOKEN).handles
    assert rig.table.open(2, token=TOKEN).handles.tolist() == first.tolist() and rig.table.num_open == 2
    with refuses(Reason.INVALID_REQUEST):
        rig.table.open(3, token=TOKEN)
    rig.now += 61
    assert rig.table.open(2, token=TOKEN).handles.tolist() != first.tolist()


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        pytest.param(lambda rig, handles: rig.close(*handles), Reason.SEQUENCE_CLOSED, id="closed"),
        pytest.param(lambda rig, handles: rig.close(handles[1]), Reason.SEQUENCE_CLOSED, id="one closed"),
        pytest.param(lambda rig, handles: pass_time(rig, 31), Reason.SEQUENCE_EXPIRED, id="expired"),
    ],
)
def test_an_open_token_whose_sequences_are_over_opens_no_others(
    ends: Callable[[Rig, list[int]], object], expected: Reason
) -> None:
    rig = Rig()
    handles = rig.table.open(2, 30.0, token=TOKEN).handles.tolist()
    ends(rig, handles)
    held = rig.table.num_open
    for is_draining in (False, True):
        rig.table.is_draining = is_draining
        with refuses(expected) as refused:
            rig.table.open(2, 30.0, token=TOKEN)
        assert "open_token" in str(refused.value) and refused.value.refusal.retry_after_s is None
    assert rig.table.num_open == held
    rig.table.is_draining = False
    rig.open(8 - held)  # other sequences in the same slots are not what the token opened
    rig.close(*handles)
    with refuses(expected):
        rig.table.open(2, 30.0, token=TOKEN)


async def test_an_open_token_is_refused_while_its_sequence_closes_and_answered_while_it_is_poisoned() -> None:
    rig = Rig(eager=False)
    first, second = (rig.table.open(1, token=token).handles.tolist() for token in (TOKEN, TOKEN[::-1]))
    rig.engine.poison_token = 13.0
    spoilt = rig.submit(rig.request((first[0], DECODE, 1, 0, -1, [13.0]), (second[0], DECODE, 1, 0, -1, [1.0])))
    await turns()
    rig.close(*second)
    with refuses(Reason.SEQUENCE_CLOSED):
        rig.table.open(1, token=TOKEN[::-1])
    rig.engine.release()
    assert reason(await spoilt) is Reason.STATE_POISONED
    assert rig.table.open(1, token=TOKEN).handles.tolist() == first  # still held: it is its owner's to close


def test_an_open_token_is_its_principals() -> None:
    rig = Rig()
    first, second = (rig.table.open(1, token=TOKEN, principal=Principal(i, str(i))).handles[0] for i in (1, 2))
    assert first != second
    assert rig.table.open(1, token=TOKEN, principal=Principal(1, "1")).handles[0] == first


def test_tokens_of_sequences_that_are_over_make_room_for_others_the_oldest_first() -> None:
    rig = Rig(slots=3)
    held = rig.table.open(1, token=TOKEN).handles.tolist()
    tokens = [bytes([number]) * 16 for number in range(6)]
    for token in tokens:  # the last one is the seventh, where six are remembered
        rig.close(*rig.table.open(1, token=token).handles.tolist())
    assert rig.table.open(1, token=TOKEN).handles.tolist() == held
    unknown = Reason.SEQUENCE_UNKNOWN  # of a slot's former sequences the last one alone is told apart
    for token, expected in zip(tokens[3:], (unknown, unknown, Reason.SEQUENCE_CLOSED), strict=True):
        with refuses(expected):
            rig.table.open(1, token=token)
    assert rig.table.num_open == 1
    rig.table.open(1, token=tokens[2])
    assert rig.table.num_open == 2


def test_who_floods_with_tokens_makes_the_server_forget_no_others() -> None:
    rig, alice, bob = Rig(slots=3), Principal(1, "alice"), Principal(2, "bob")
    rig.table.close(rig.table.server_epoch, rig.table.open(1, token=TOKEN, principal=alice).handles, alice)
    for number in range(20):
        handles = rig.table.open(1, token=bytes([number]) * 16, principal=bob).handles
        rig.table.close(rig.table.server_epoch, handles, bob)
    with refuses(Reason.SEQUENCE_UNKNOWN):
        rig.table.open(1, token=TOKEN, principal=alice)


async def test_close_while_steps_are_in_flight_frees_at_completion() -> None:
    rig = Rig(eager=False)
    (a,) = rig.open()
    running = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    assert rig.close(a) == [SequenceState.CLOSING]
    rig.now += 1000
    rig.table.reap()
    assert rig.lines.num_used == 1
    assert reason(await rig.submit(rig.request((a, DECODE, 2, 1, -1, [1])))) is Reason.SEQUENCE_CLOSED
    rig.engine.run()
    assert outputs(await running) == [1]
    await rig.scheduler.drained()
    assert rig.lines.num_used == 0
    assert rig.close(a) == [SequenceState.CLOSED]
    rig.table.check_integrity()


def test_handles_can_not_be_guessed() -> None:
    """Above the slot are 40 random bits: no bit has a preferred value, nor does any follow from the handle before."""
    count = 4096
    handles = make_handles(np.arange(count))
    assert (handles & np.uint64(MAX_SLOTS)).tolist() == list(range(count))
    random = handles >> np.uint64(24)
    assert len(np.unique(random)) == count
    for values in (random, random[1:] ^ random[:-1]):
        share = ((values[:, None] >> np.arange(40, dtype=np.uint64)) & np.uint64(1)).mean(axis=0)
        assert (np.abs(share - 0.5) < 0.1).all()  # 12 standard deviations


# -- leases ------------------------------------------------------------------------------------------------------------


async def test_a_sequence_with_a_step_queued_or_running_does_not_expire() -> None:
    rig = Rig(eager=False, spans=2)
    a, b, idle = rig.open(3)
    steps = [rig.submit(rig.request((handle, DECODE, 1, 0, -1, [1.0]), span=1)) for handle in (a, b)]
    await turns()
    assert len(rig.engine.waiting) == 2
    steps.append(rig.submit(rig.request((a, DECODE, 2, 1, -1, [2.0]), span=1)))  # behind the one that runs
    handles = np.array([a, b, idle], dtype=np.uint64)
    pass_time(rig, 200)
    states = [told.state for told in rig.table.describe(rig.table.server_epoch, handles)]
    assert states == [SequenceState.OPEN, SequenceState.OPEN, SequenceState.EXPIRED] and rig.table.num_expired == 1
    rig.engine.release()
    assert [outputs(await step) for step in steps] == [[1], [1], [5]]
    rig.scheduler.settle()
    pass_time(rig, 61)
    assert rig.table.num_open == 0 and rig.table.num_expired == 3


async def test_leases_expire_renew_and_survive_a_stall() -> None:
    rig = Rig()
    a, b = rig.open(2)
    epoch, table, handles = rig.table.server_epoch, rig.table, np.array([a, b], dtype=np.uint64)
    pass_time(rig, 40)
    await rig.step((a, DECODE, 1, 0, -1, [1]))
    pass_time(rig, 30)
    assert table.describe(epoch, handles)[1].state is SequenceState.EXPIRED
    assert reason(await rig.step((b, DECODE, 1, 0, -1, [1]))) is Reason.SEQUENCE_EXPIRED
    assert table.renew(epoch, handles, 100.0) == [SequenceState.OPEN, SequenceState.EXPIRED]
    rig.now += 500.0  # the whole process stood still
    assert table.reap() == 0
    assert table.renew(epoch, handles[:1]) == [SequenceState.OPEN]
    rig.now += 1.0
    assert table.reap() == 0 and table.num_expired == 1
    with refuses(Reason.INVALID_REQUEST):
        table.renew(epoch, handles, 1e9)


async def test_renewal_moves_only_the_deadline_and_completion_renews() -> None:
    rig = Rig(eager=False)
    (a,) = rig.open()
    handles, epoch = np.array([a], dtype=np.uint64), rig.table.server_epoch

    def left() -> float:
        return rig.table.describe(epoch, handles)[0].lease_remaining_s

    rig.table.renew(epoch, handles, 5.0)
    assert left() == 5.0
    rig.table.renew(epoch, handles)
    assert left() == 60.0
    rig.now += 50.0
    begun = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))
    assert left() == 60.0  # a step that is taken renews, before it is done
    rig.engine.run()
    await begun
    rig.table.renew(epoch, handles, 600.0)
    running = rig.submit(rig.request((a, DECODE, 2, 1, -1, [1])))
    assert left() == 600.0
    await asyncio.sleep(0)
    rig.now += 590.0
    rig.engine.run()
    await running
    rig.scheduler.settle()
    assert left() == 60.0


def test_a_lease_has_at_most_the_longest() -> None:
    rig = Rig()
    assert rig.table.open(1, rig.table.max_lease_s).lease_s == rig.table.max_lease_s
    with refuses(Reason.INVALID_REQUEST):
        rig.table.open(1, rig.table.max_lease_s + 0.001)


def test_a_handle_of_a_sequence_that_is_over_renews_no_lease_of_who_has_its_place() -> None:
    rig = Rig(slots=1)
    (former,) = rig.open()
    rig.close(former)
    (present,) = rig.open()
    epoch = rig.table.server_epoch
    for over in ((epoch, former, SequenceState.CLOSED), (epoch + 1, present, SequenceState.LOST)):
        assert rig.table.renew(over[0], np.array([over[1]], np.uint64), 600.0) == [over[2]]
    assert rig.table.describe(epoch, np.array([present], np.uint64))[0].lease_remaining_s == 60.0


async def test_the_lease_of_a_poisoned_sequence_can_be_renewed_until_it_is_closed() -> None:
    rig = Rig()
    (a,) = rig.open()
    handles, epoch = np.array([a], dtype=np.uint64), rig.table.server_epoch
    rig.engine.poison_token = 13.0
    assert reason(await rig.step((a, DECODE, 1, 0, -1, [13.0]))) is Reason.STATE_POISONED
    assert rig.table.renew(epoch, handles, 500.0) == [SequenceState.POISONED]
    pass_time(rig, 400)
    assert rig.table.describe(epoch, handles)[0].lease_remaining_s == 100.0
    pass_time(rig, 101)
    assert rig.table.describe(epoch, handles)[0].state is SequenceState.EXPIRED


async def test_a_step_that_is_refused_after_it_was_taken_has_renewed_the_lease() -> None:
    """Else a sequence could expire behind a refusal that asks for the same step again."""
    rig = Rig(eager=False)
    a, b = rig.open(2)
    futures = []
    for step in (1, 2):  # as many batches as the engine takes
        futures.append(rig.submit(rig.request((b, DECODE, step, step - 1, -1, [1]))))
        await turns(3)
    rig.now += 59.0
    late = rig.submit(rig.request((a, DECODE, 1, 0, -1, [2]), deadline_s=rig.now + 0.5))
    rig.table.reap()
    pass_time(rig, 1)
    rig.engine.release()
    assert reason(await late) is Reason.QUEUE_DEADLINE
    pass_time(rig, 1)
    again = await rig.step((a, DECODE, 1, 0, -1, [2]))
    assert reason(again) is None and outputs(again) == [2]
    await asyncio.gather(*futures)
