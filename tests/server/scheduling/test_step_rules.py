"""The rules of steps: what is executed, replayed, joined or refused, and what commits fix."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, MAX_DRAFT, PREFILL, VERIFY, Rig, checksum, outputs, reason, refuses, turns
from rigs.seeds import seeds

from deltaline_server.errors import Reason
from deltaline_server.step import OutputRows, RowKind, RowOutcome
from deltaline_server.tables import ledger


async def test_a_step_has_all_tokens_so_far_and_sent_again_the_same_bytes() -> None:
    rig = Rig()
    (a,) = rig.open()
    prefill = await rig.step((a, PREFILL, 1, 0, -1, [1, 2, 3]))
    first = await rig.step((a, DECODE, 2, 3, -1, [4]))
    assert (outputs(prefill), prefill.position.tolist()) == ([1, 5, 14], [3])
    assert (outputs(first), first.position.tolist(), first.outcome.tolist()) == ([30], [4], [RowOutcome.EXECUTED])
    again = await rig.step((a, DECODE, 2, 3, -1, [4]))
    assert again.outcome.tolist() == [RowOutcome.REPLAYED] and np.shares_memory(again.hidden, first.hidden)
    assert again.hidden.tobytes() == first.hidden.tobytes() and again.position.tolist() == [4]
    assert again.timing is None and len(rig.engine.batches) == 2


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"hidden": np.array([[9.0, 9.0]], dtype=np.float32)}, id="hidden"),
        pytest.param({"output": OutputRows.NONE}, id="output"),
        pytest.param({"position": np.array([7])}, id="position"),
        pytest.param({"kind": np.array([PREFILL], dtype=np.uint8)}, id="kind"),
        pytest.param({"accepted": np.array([0], dtype=np.int32)}, id="accepted"),
    ],
)
async def test_a_step_sent_again_with_other_content_is_a_conflict(change: dict[str, Any]) -> None:
    rig = Rig()
    (a,) = rig.open()
    await rig.step((a, DECODE, 1, 0, -1, [4]))
    result = await rig.step((a, DECODE, 1, 0, -1, [4]), **change)
    assert reason(result) is Reason.STEP_CONFLICT
    assert result.refusals[0].metadata == {"step": "1", "position": "1", "pending_tokens": "0"}


async def test_large_requests_are_recognised_by_checksum() -> None:
    rig = Rig()
    (a,) = rig.open()
    tokens = [float(i % 7) for i in range(1500)]
    first = await rig.step((a, PREFILL, 1, 0, -1, tokens), output=OutputRows.LAST)
    again = await rig.step((a, PREFILL, 1, 0, -1, tokens), output=OutputRows.LAST)
    other = await rig.step((a, PREFILL, 1, 0, -1, [*tokens[:-1], 8.0]), output=OutputRows.LAST)
    assert again.hidden.tobytes() == first.hidden.tobytes()
    assert reason(other) is Reason.STEP_CONFLICT


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param((DECODE, 1, 1, -1, [1.0]), Reason.STEP_STALE, id="stale"),
        pytest.param((DECODE, 0, 1, -1, [1.0]), Reason.STEP_STALE, id="step-zero"),
        pytest.param((DECODE, 4, 2, -1, [1.0]), Reason.STEP_GAP, id="gap"),
        pytest.param((DECODE, 3, 3, -1, [1.0]), Reason.POSITION_MISMATCH, id="position-ahead"),
        pytest.param((DECODE, 3, 1, -1, [1.0]), Reason.POSITION_MISMATCH, id="position-behind"),
        pytest.param((DECODE, 3, 2, 0, [1.0]), Reason.NOTHING_TO_COMMIT, id="nothing-to-commit"),
        pytest.param((DECODE, 3, 2, -2, [1.0]), Reason.ACCEPTED_OUT_OF_RANGE, id="accepted-negative"),
        pytest.param((DECODE, 3, 2, -1, [np.nan]), Reason.NON_FINITE_INPUT, id="nan"),
    ],
)
async def test_a_wrong_row_is_refused_and_its_neighbour_runs(row: tuple[Any, ...], expected: Reason) -> None:
    rig = Rig()
    a, b = rig.open(2)
    await rig.step((a, DECODE, 1, 0, -1, [5]))
    await rig.step((a, DECODE, 2, 1, -1, [6]))
    result = await rig.step((a, *row), (b, DECODE, 1, 0, -1, [7]))
    assert reason(result, 0) is expected and reason(result, 1) is None
    assert outputs(result, 0) == [] and outputs(result, 1) == [7]
    assert outputs(await rig.step((a, DECODE, 3, 2, -1, [8]))) == [5 + 12 + 24]


async def test_handles_that_name_nothing_are_refused_alike() -> None:
    rig = Rig()
    a, b = rig.open(2)
    rig.close(b)
    rows = [(handle, DECODE, 1, 0, -1, [1.0]) for handle in (a ^ (1 << 30), b, 2**64 - 1)]
    result = await rig.step(*rows)
    unknown = Reason.SEQUENCE_UNKNOWN
    assert [reason(result, row) for row in range(3)] == [unknown, Reason.SEQUENCE_CLOSED, unknown]
    assert reason(await rig.step((a, DECODE, 1, 0, -1, [1]), server_epoch=1)) is Reason.STATE_LOST


async def test_eight_steps_may_be_in_flight() -> None:
    rig = Rig(eager=False)
    (a,) = rig.open()
    futures = [rig.submit(rig.request((a, DECODE, s + 1, s, -1, [1]))) for s in range(9)]
    assert reason(await futures[8]) is Reason.TOO_MANY_IN_FLIGHT
    await asyncio.sleep(0)
    rig.engine.release()
    assert [outputs(await f) for f in futures[:8]] == [[checksum([1] * n)] for n in range(1, 9)]


async def test_a_step_in_flight_is_joined_by_its_retry() -> None:
    """In a request of other rows, between one that is replayed and one that is new; whoever waits hears of its own."""
    rig = Rig(eager=False)
    a, b, c, d = rig.open(4)
    rig.engine.eager = True
    old = await rig.step((c, PREFILL, 1, 0, -1, [7.0, 8.0]))
    rig.engine.eager = False
    row = (a, DECODE, 1, 0, -1, [4.0])
    first = rig.submit(rig.request((d, PREFILL, 1, 0, -1, [3.0] * 3), row))
    await asyncio.sleep(0)
    again = rig.submit(
        rig.request(row, (c, PREFILL, 1, 0, -1, [7.0, 8.0]), (b, DECODE, 1, 0, -1, [5.0]), (d, DECODE, 1, 0, -1, [3.0]))
    )
    rig.engine.release()
    result = await again
    assert outputs(await first, 1) == outputs(result, 0) == [4]
    assert (outputs(result, 1), outputs(result, 2)) == (outputs(old), [5])
    expected = RowOutcome.JOINED, RowOutcome.REPLAYED, RowOutcome.EXECUTED, RowOutcome.REFUSED
    assert tuple(result.outcome) == expected and result.position.tolist() == [1, 2, 1, 0]
    assert reason(result, 3) is Reason.STEP_CONFLICT
    assert rig.counts.total["joined"] == 1


# -- commits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", range(MAX_DRAFT + 1))
async def test_as_many_drafts_as_are_accepted_join_the_sequence(accepted: int) -> None:
    rig = Rig(spans=2, chunk_tokens=64)
    (a,) = rig.open()
    tokens = [1.0, 2, 3, 4, 5]
    for span in (0, 1):
        await rig.step((a, DECODE, 1, 0, -1, [1]), span=span)
        verify = await rig.step((a, VERIFY, 2, 1, -1, tokens[1:]), span=span)
        assert outputs(verify) == [checksum(tokens[:n]) for n in range(2, 6)]
        assert verify.position.tolist() == [1]
    # By a step, cut into chunks of which the first one alone folds the drafts in; or before it, by a call of its own.
    state, long = tokens[: 1 + accepted], [9.0] * 100
    result = await rig.step((a, PREFILL, 3, 1 + accepted, accepted, long), span=0, output=OutputRows.LAST)
    assert outputs(result) == [checksum(state + long)]
    handles = np.array([a], dtype=np.uint64)
    rig.table.commit(rig.table.server_epoch, 1, handles, np.array([2]), np.array([accepted], np.int32))
    assert outputs(await rig.step((a, DECODE, 3, 1 + accepted, -1, [9]), span=1)) == [checksum([*state, 9])]
    assert (rig.counts.total["drafts"], rig.counts.total.get("accepted", 0)) == (8, 2 * accepted)


async def test_commit_rules() -> None:
    rig = Rig()
    (a,) = rig.open()
    table, handles = rig.table, np.array([a], dtype=np.uint64)

    def commit(step: int, accepted: int) -> Reason | None:
        _, refusals = table.commit(
            table.server_epoch, 0, handles, np.array([step]), np.array([accepted], dtype=np.int32)
        )
        return refusals[0].reason if refusals else None

    assert commit(0, 0) is Reason.NOTHING_TO_COMMIT
    await rig.step((a, VERIFY, 1, 0, -1, [2, 3]))
    assert reason(await rig.step((a, DECODE, 2, 0, -1, [9]))) is Reason.VERIFY_PENDING
    assert reason(await rig.step((a, DECODE, 2, 3, 3, [9]))) is Reason.ACCEPTED_OUT_OF_RANGE
    assert reason(await rig.step((a, DECODE, 2, 0, 1, [9]))) is Reason.POSITION_MISMATCH
    assert commit(1, 3) is Reason.ACCEPTED_OUT_OF_RANGE and commit(2, 1) is Reason.NOTHING_TO_COMMIT
    assert commit(1, 1) is None and commit(1, 1) is None
    assert commit(1, 2) is Reason.COMMIT_CONFLICT
    assert reason(await rig.step((a, DECODE, 2, 2, 2, [9]))) is Reason.COMMIT_CONFLICT
    assert outputs(await rig.step((a, VERIFY, 2, 1, 1, [9]))) == [checksum([2, 9])]
    assert commit(1, 0) is Reason.COMMIT_CONFLICT and commit(1, 1) is None
    assert commit(2, 0) is None and commit(2, 1) is Reason.COMMIT_CONFLICT
    assert outputs(await rig.step((a, VERIFY, 3, 1, -1, [7]))) == [checksum([2, 7])]
    assert outputs(await rig.step((a, DECODE, 4, 2, 1, [8]))) == [checksum([2, 7, 8])]


async def test_a_commit_fixed_on_one_span_binds_the_others() -> None:
    rig = Rig(spans=2)
    (a,) = rig.open()
    for span in (0, 1):
        await rig.step((a, VERIFY, 1, 0, -1, [2, 3]), span=span)
    assert reason(await rig.step((a, DECODE, 2, 1, 1, [9]), span=0)) is None
    assert reason(await rig.step((a, DECODE, 2, 2, 2, [9]), span=1)) is Reason.COMMIT_CONFLICT
    assert reason(await rig.step((a, DECODE, 2, 1, 1, [9]), span=1)) is None
    # Nothing accepted: the next verify at the same position is another one.
    for span in (0, 1):
        await rig.step((a, VERIFY, 3, 2, -1, [4, 5]), span=span)
    for span in (0, 1):
        await rig.step((a, VERIFY, 4, 2, 0, [6, 7]), span=span)
    assert reason(await rig.step((a, DECODE, 5, 4, 2, [8]), span=1)) is None
    assert reason(await rig.step((a, DECODE, 5, 2, 0, [8]), span=0)) is Reason.COMMIT_CONFLICT
    result = await rig.step((a, DECODE, 5, 4, 2, [8]), span=0)
    assert outputs(result) == [checksum([2, 9, 6, 7, 8])]


@pytest.mark.parametrize("is_own_call", [False, True], ids=["with the next step", "by CommitSequences"])
async def test_a_verify_behind_one_of_which_nothing_was_accepted_is_another(is_own_call: bool) -> None:
    """At the same position, however the commit of nothing came: its count binds no later verify on any span."""
    rig = Rig(spans=2)
    (a,) = rig.open()
    handles = np.array([a], dtype=np.uint64)
    for span in (0, 1):
        await rig.step((a, VERIFY, 1, 0, -1, [2, 3]), span=span)
        if is_own_call:
            _, refusals = rig.table.commit(
                rig.table.server_epoch, span, handles, np.array([1]), np.zeros(1, dtype=np.int32)
            )
            assert refusals == {}
        await rig.step((a, VERIFY, 2, 0, -1 if is_own_call else 0, [4, 5]), span=span)
    for span in (0, 1):
        assert outputs(await rig.step((a, DECODE, 3, 2, 2, [6]), span=span)) == [checksum([4, 5, 6])]


async def test_spans_may_be_a_bounded_number_of_commits_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_FIXED_COMMITS", 70)
    rig = Rig(spans=2)
    (a,) = rig.open()

    async def verify(span: int, step: int) -> Reason | None:
        return reason(await rig.step((a, VERIFY, step, 0, -1 if step == 1 else 0, [2]), span=span))

    for step in range(1, 150):  # abreast they may go on for ever, though nothing is ever accepted
        assert await verify(0, step) is await verify(1, step) is None
    ahead = 150
    while await verify(0, ahead) is None:
        ahead += 1
    assert await verify(0, ahead) is Reason.SPAN_TOO_FAR_AHEAD and 60 <= ahead - 150 <= 71
    for step in range(150, 160):
        assert await verify(1, step) is None
    assert await verify(0, ahead) is None


async def test_a_refused_step_commits_nothing() -> None:
    rig = Rig(spans=2)
    (a,) = rig.open()
    for span in (0, 1):
        await rig.step((a, VERIFY, 1, 0, -1, [2, 3]), span=span)
    rig.engine.eager = False
    blocker = rig.submit(rig.request((rig.open()[0], DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    late = rig.submit(rig.request((a, DECODE, 2, 2, 2, [9]), deadline_s=rig.now + 1))
    rig.now += 2
    rig.engine.release()
    await blocker
    assert reason(await late) is Reason.QUEUE_DEADLINE
    assert reason(await rig.step((a, DECODE, 2, 1, 1, [9]), span=1)) is None
    assert outputs(await rig.step((a, DECODE, 2, 1, 1, [9]), span=0)) == [checksum([2, 9])]


async def test_rows_that_lose_their_commit_to_another_span_do_not_stall_the_others() -> None:
    rig = Rig(spans=2, chunk_tokens=64)
    a, b = rig.open(2)
    for span in (0, 1):
        await rig.step((a, VERIFY, 1, 0, -1, [2, 3]), span=span)
    rig.engine.eager = False
    blocker = rig.submit(rig.request((b, DECODE, 1, 0, -1, [1]), span=1))
    await asyncio.sleep(0)
    winner = rig.submit(rig.request((a, DECODE, 2, 1, 1, [9]), span=0))
    loser = rig.submit(rig.request((a, PREFILL, 2, 2, 2, [9.0] * 64), span=1))
    behind_loser = rig.submit(rig.request((a, DECODE, 3, 66, -1, [9.0]), span=1))
    neighbour = rig.submit(rig.request((b, PREFILL, 2, 1, -1, [1.0] * 64), span=1))
    rig.engine.release()
    await asyncio.wait_for(asyncio.gather(blocker, winner, loser, neighbour), 60)
    assert outputs(await winner) == [checksum([2, 9])]
    assert (reason(await loser), reason(await behind_loser)) == (Reason.COMMIT_CONFLICT, Reason.PREDECESSOR_REFUSED)
    assert reason(await neighbour) is None


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"queue_rows": 3}, Reason.QUEUE_FULL),
        ({"queue_bytes": 3 * 16}, Reason.QUEUE_FULL),
        ({"reply_bytes": 3 * 32}, Reason.REPLY_BYTES_EXHAUSTED),
    ],
    ids=["rows", "bytes", "reply bytes"],
)
async def test_there_is_room_for_three_rows(limit: dict[str, Any], expected: Reason) -> None:
    """A retry waits in the queue like any other row, but needs no reply of its own."""
    rig = Rig(eager=False, **limit)
    handles = rig.open(4)
    rows = [(handle, PREFILL, 1, 0, -1, [1.0, 2.0]) for handle in handles]
    with refuses(expected) as refused:
        rig.submit(rig.request(*rows))
    assert refused.value.refusal.retry_after_s
    third = rows[0] if expected is Reason.QUEUE_FULL else rows[2]
    futures = [rig.submit(rig.request(*rows[:2])), rig.submit(rig.request(third))]
    with refuses(expected):
        rig.submit(rig.request(rows[3]))
    rig.engine.release()
    assert [outputs(await future) for future in futures] == [[1, 5]] * 2
    await turns()
    load = rig.scheduler.load()
    assert (load.queued_rows, load.queued_bytes) == (0, 0)
    assert load.reply_bytes == 32 * (2 if expected is Reason.QUEUE_FULL else 3)
    rig.close(*handles)
    assert rig.scheduler.load().reply_bytes == 0


# -- all of it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(4))
async def test_random_histories_agree_with_the_tokens_committed(seed: int) -> None:
    """Sequences of random life, random kinds, retries and commits, rows of nobody's among theirs; every output is
    checked against its own tokens."""
    rng = np.random.default_rng(seed)
    rig = Rig(slots=6, chunk_tokens=64)
    live: dict[int, dict[str, Any]] = {}
    for _ in range(150):
        while len(live) < 6:
            live[rig.open()[0]] = {"tokens": [], "step": 0, "draft": None}
        chosen = [h for h in live if rng.random() < 0.6] or [next(iter(live))]
        rows, expected = [], []
        for handle in chosen:
            sequence = live[handle]
            accepted = -1
            if sequence["draft"] is not None:
                accepted = int(rng.integers(0, len(sequence["draft"]) + 1))
                sequence["tokens"] += sequence["draft"][:accepted]
                sequence["draft"] = None
            kind = RowKind(int(rng.integers(1, 4)))
            lengths = {PREFILL: [1, 3, 63, 64, 65, 150], DECODE: [1], VERIFY: range(1, MAX_DRAFT + 1)}
            count = int(rng.choice(lengths[kind]))
            new = [float(x) for x in rng.integers(1, 100, count)]
            sequence["step"] += 1
            rows.append((handle, kind, sequence["step"], len(sequence["tokens"]), accepted, new))
            expected.append([checksum(sequence["tokens"] + new[: n + 1]) for n in range(count)])
            if kind is VERIFY:
                sequence["draft"] = new
            else:
                sequence["tokens"] += new
        if rng.random() < 0.5:
            place, count = int(rng.integers(len(rows) + 1)), int(rng.choice([1, 4, 150]))
            rows.insert(place, (0, PREFILL, 1, 0, -1, [float("nan")] * count))
            expected.insert(place, [])
        result = await rig.step(*rows)
        assert [outputs(result, i) for i in range(len(rows))] == expected, result.refusals
        if rng.random() < 0.3:
            again = await rig.step(*rows)
            assert again.hidden.tobytes() == result.hidden.tobytes()
        for handle in list(live):
            if rng.random() < 0.1:
                rig.close(handle)
                del live[handle]
    assert rig.counts.total["replayed"] > 0
    await turns()  # the last books are settled then
    assert rig.scheduler.load().queued_rows == rig.scheduler.load().queued_bytes == 0
