"""The step rules, batches and leases, with an engine that computes checksums instead of layers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, MAX_DRAFT, PREFILL, VERIFY, Rig, checksum, outputs, reason

from deltaline_server.errors import Reason, RequestError
from deltaline_server.step import OutputRows, RowKind, RowOutcome
from deltaline_server.tables.sequence import SequenceState


async def test_steps_run_in_order_and_answer_with_all_tokens_so_far() -> None:
    rig = Rig()
    (a,) = rig.open()
    first = await rig.step((a, PREFILL, 1, 0, -1, [1, 2, 3]))
    second = await rig.step((a, DECODE, 2, 3, -1, [4]))
    assert outputs(first) == [1, 5, 14] and outputs(second) == [30]
    assert first.position.tolist() == [3] and second.position.tolist() == [4]
    assert first.outcome.tolist() == [RowOutcome.EXECUTED]


async def test_a_step_sent_again_gets_the_same_bytes_and_runs_once() -> None:
    rig = Rig()
    (a,) = rig.open()
    await rig.step((a, PREFILL, 1, 0, -1, [1, 2, 3]))
    first = await rig.step((a, DECODE, 2, 3, -1, [4]))
    again = await rig.step((a, DECODE, 2, 3, -1, [4]))
    assert again.outcome.tolist() == [RowOutcome.REPLAYED]
    assert again.hidden.tobytes() == first.hidden.tobytes() and again.position.tolist() == first.position.tolist()
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
    first = await rig.step((a, PREFILL, 1, 0, -1, tokens))
    again = await rig.step((a, PREFILL, 1, 0, -1, tokens))
    other = await rig.step((a, PREFILL, 1, 0, -1, [*tokens[:-1], 8.0]))
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
    after = await rig.step((a, DECODE, 3, 2, -1, [8]))
    assert outputs(after) == [5 + 12 + 24]


async def test_handles_of_others_are_refused_alike() -> None:
    rig = Rig()
    a, b = rig.open(2)
    rig.table.close(rig.table.server_epoch, np.array([b], dtype=np.uint64))
    forged = await rig.step((a ^ (1 << 30), DECODE, 1, 0, -1, [1]))
    closed = await rig.step((b, DECODE, 1, 0, -1, [1]))
    lost = await rig.step((a, DECODE, 1, 0, -1, [1]), server_epoch=1)
    out_of_range = await rig.step((2**64 - 1, DECODE, 1, 0, -1, [1]))
    assert reason(forged) is Reason.SEQUENCE_UNKNOWN and reason(out_of_range) is Reason.SEQUENCE_UNKNOWN
    assert reason(closed) is Reason.SEQUENCE_CLOSED and reason(lost) is Reason.STATE_LOST


async def test_verify_then_any_accepted_count_then_a_plain_step() -> None:
    for accepted in range(MAX_DRAFT + 1):
        rig = Rig()
        (a,) = rig.open()
        await rig.step((a, DECODE, 1, 0, -1, [1]))
        verify = await rig.step((a, VERIFY, 2, 1, -1, [2, 3, 4, 5]))
        assert outputs(verify) == [checksum([1, 2, 3, 4, 5][:n]) for n in range(2, 6)]
        assert verify.position.tolist() == [1]
        plain = await rig.step((a, DECODE, 3, 1 + accepted, accepted, [9]))
        assert outputs(plain) == [checksum([*[1, 2, 3, 4, 5][: 1 + accepted], 9])]
        assert rig.counts.total["drafts"] == 4 and rig.counts.total.get("accepted", 0) == accepted


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


async def test_steps_in_flight_run_in_order_and_a_refused_one_takes_those_behind_it() -> None:
    rig = Rig(eager=False)
    a, b = rig.open(2)
    blocker = rig.submit(rig.request((b, DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    first = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))
    doomed = rig.submit(rig.request((a, DECODE, 2, 1, -1, [2]), deadline_s=rig.now + 1))
    behind = rig.submit(rig.request((a, DECODE, 3, 2, -1, [3])))
    rig.now += 2
    rig.engine.release()
    await blocker
    assert outputs(await first) == [1]
    assert reason(await doomed) is Reason.QUEUE_DEADLINE
    assert reason(await behind) is Reason.PREDECESSOR_REFUSED
    rig.table.check_integrity()
    assert outputs(await rig.step((a, DECODE, 2, 1, -1, [7]))) == [15]


async def test_eight_steps_may_be_in_flight() -> None:
    rig = Rig(eager=False)
    (a,) = rig.open()
    futures = [rig.submit(rig.request((a, DECODE, s + 1, s, -1, [1]))) for s in range(9)]
    assert reason(await futures[8]) is Reason.TOO_MANY_IN_FLIGHT
    await asyncio.sleep(0)
    rig.engine.release()
    assert [outputs(await f) for f in futures[:8]] == [[checksum([1] * n)] for n in range(1, 9)]


async def test_a_step_in_flight_is_joined_by_its_retry() -> None:
    rig = Rig(eager=False)
    a, b = rig.open(2)
    row = (a, DECODE, 1, 0, -1, [4.0])
    first = rig.submit(rig.request(row))
    await asyncio.sleep(0)
    again = rig.submit(rig.request(row, (b, DECODE, 1, 0, -1, [5.0])))
    conflict = rig.submit(rig.request((a, DECODE, 1, 0, -1, [6.0])))
    rig.engine.release()
    assert outputs(await first) == outputs(await again, 0) == [4]
    assert outputs(await again, 1) == [5]
    assert (await again).outcome.tolist() == [RowOutcome.JOINED, RowOutcome.EXECUTED]
    assert reason(await conflict) is Reason.STEP_CONFLICT
    assert rig.counts.total["joined"] == 1


async def test_work_goes_on_when_its_caller_is_cancelled() -> None:
    rig = Rig(eager=False)
    (a,) = rig.open()
    row = (a, DECODE, 1, 0, -1, [4.0])
    task = asyncio.create_task(asyncio.wait_for(asyncio.shield(rig.submit(rig.request(row))), 10))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    rig.engine.release()
    await rig.scheduler.drained()
    again = await rig.step(row)
    assert again.outcome.tolist() == [RowOutcome.REPLAYED] and outputs(again) == [4]


async def test_prefills_are_cut_and_decodes_run_between_the_chunks() -> None:
    rig = Rig(eager=False, chunk_tokens=128)
    a, b = rig.open(2)
    tokens = [float(i % 11) for i in range(300)]
    long = rig.submit(rig.request((a, PREFILL, 1, 0, -1, tokens), output=OutputRows.LAST))
    await asyncio.sleep(0)
    assert len(rig.engine.waiting) == 2  # the second chunk does not wait for the first one's end
    decode = rig.submit(rig.request((b, DECODE, 1, 0, -1, [3])))
    for _ in range(3):
        rig.engine.run()
        for _ in range(3):
            await asyncio.sleep(0)
    assert outputs(await decode) == [3] and long.done()
    assert outputs(await long) == [checksum(tokens)]
    assert [int(batch.control[0, -1]) for batch in rig.engine.batches] == [128, 128, 45]
    assert rig.engine.batches[2].num_short == 1


async def test_a_batch_s_times_count_once_for_a_request_with_several_rows_in_it() -> None:
    rig = Rig(chunk_tokens=64)
    short, *long = rig.open(3)
    rows = [(handle, PREFILL, 1, 0, -1, [1.0] * 32) for handle in long]
    # Both long rows, each a piece of its own, and the short one are one batch.
    result = await rig.step((short, DECODE, 1, 0, -1, [1.0]), *rows)
    assert len(rig.engine.batches) == 1 and result.timing is not None
    stages = result.timing.copy_in_s, result.timing.compute_s, result.timing.copy_out_s
    assert stages == (1e-6, 2e-6, 3e-6)
    assert (result.timing.batch_rows, result.timing.batch_tokens) == (3, 65)


async def test_a_cut_row_is_not_dropped_after_its_first_chunk() -> None:
    rig = Rig(eager=False, chunk_tokens=64)
    (a,) = rig.open()
    long = rig.submit(rig.request((a, PREFILL, 1, 0, -1, [1.0] * 200), deadline_s=rig.now + 1))
    await asyncio.sleep(0)
    rig.now += 100
    rig.engine.release()
    assert outputs(await long) == [checksum([1.0] * n) for n in range(1, 201)]


async def test_rows_of_waiting_requests_run_in_one_batch_by_priority() -> None:
    rig = Rig(eager=False)
    a, b, c, d = rig.open(4)
    blocker = rig.submit(rig.request((d, DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    waiting = [
        rig.submit(rig.request((handle, DECODE, 1, 0, -1, [token]), priority=priority))
        for handle, token, priority in ((a, 1, 0), (b, 2, 1), (c, 3, -1))
    ]
    rig.engine.release()
    await asyncio.gather(blocker, *waiting)
    assert np.concatenate(rig.engine.batches[1].hidden)[:, 0].tolist() == [2, 1, 3]


@pytest.mark.parametrize("output", list(OutputRows))
async def test_mixed_rows_get_the_outputs_they_want(output: OutputRows) -> None:
    rig = Rig()
    a, b, c = rig.open(3)
    tokens = [float(i) for i in range(1, 101)]
    result = await rig.step(
        (a, PREFILL, 1, 0, -1, tokens), (b, DECODE, 1, 0, -1, [5]), (c, VERIFY, 1, 0, -1, [6, 7]), output=output
    )
    full: list[list[float]] = [[checksum(tokens[:n]) for n in range(1, 101)], [5], [6, 20]]
    wanted = {OutputRows.ALL: slice(None), OutputRows.LAST: slice(-1, None), OutputRows.NONE: slice(0, 0)}[output]
    expected = [row[wanted] for row in full]
    assert [outputs(result, row) for row in range(3)] == expected


async def test_the_queue_is_bounded_in_rows_bytes_and_reply_bytes() -> None:
    rig = Rig(eager=False, queue_rows=2)
    handles = rig.open(3)
    rows = [(handle, DECODE, 1, 0, -1, [1.0]) for handle in handles]
    with pytest.raises(RequestError) as full:
        rig.submit(rig.request(*rows))
    assert full.value.refusal.reason is Reason.QUEUE_FULL and full.value.refusal.retry_after_s
    rig = Rig(queue_bytes=32)
    with pytest.raises(RequestError) as full:
        rig.submit(rig.request((rig.open()[0], PREFILL, 1, 0, -1, [1.0] * 5)))
    assert full.value.refusal.reason is Reason.QUEUE_FULL
    rig = Rig(reply_bytes=32)
    (a,) = rig.open()
    with pytest.raises(RequestError) as full:
        rig.submit(rig.request((a, PREFILL, 1, 0, -1, [1.0] * 3)))
    assert full.value.refusal.reason is Reason.REPLY_BYTES_EXHAUSTED
    assert outputs(await rig.step((a, PREFILL, 1, 0, -1, [1.0] * 2))) == [1, 3]
    assert rig.scheduler.load().reply_bytes == 32 and rig.scheduler.load().queued_rows == 0
    rig.table.close(rig.table.server_epoch, np.array([a], dtype=np.uint64))
    assert rig.scheduler.load().reply_bytes == 0


async def test_a_failed_batch_poisons_its_rows_for_good() -> None:
    rig = Rig()
    a, b = rig.open(2)
    await rig.step((b, DECODE, 1, 0, -1, [1]))
    rig.engine.fail_next = True
    failed = await rig.step((a, DECODE, 1, 0, -1, [1]))
    assert reason(failed) is Reason.STATE_POISONED
    assert reason(await rig.step((a, DECODE, 1, 0, -1, [1]))) is Reason.STATE_POISONED
    assert outputs(await rig.step((b, DECODE, 2, 1, -1, [2]))) == [5]
    assert rig.table.close(rig.table.server_epoch, np.array([a], dtype=np.uint64)) == [SequenceState.CLOSED]
    assert rig.lines.num_used == 1


async def test_a_row_that_is_not_finite_poisons_itself_and_what_waits_behind_it() -> None:
    rig = Rig(eager=False)
    a, b = rig.open(2)
    rig.engine.poison_token = 13
    both = rig.submit(rig.request((a, DECODE, 1, 0, -1, [13]), (b, DECODE, 1, 0, -1, [2])))
    behind = rig.submit(rig.request((a, DECODE, 2, 1, -1, [3])))
    await asyncio.sleep(0)
    rig.engine.release()
    assert reason(await both, 0) is Reason.STATE_POISONED and outputs(await both, 1) == [2]
    assert reason(await behind) in (Reason.PREDECESSOR_REFUSED, Reason.STATE_POISONED)
    rig.table.check_integrity()


async def test_close_while_steps_are_in_flight_frees_at_completion() -> None:
    rig = Rig(eager=False)
    (a,) = rig.open()
    handles = np.array([a], dtype=np.uint64)
    running = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    assert rig.table.close(rig.table.server_epoch, handles) == [SequenceState.CLOSING]
    rig.now += 1000
    rig.table.reap()
    assert rig.lines.num_used == 1
    assert reason(await rig.submit(rig.request((a, DECODE, 2, 1, -1, [1])))) is Reason.SEQUENCE_CLOSED
    rig.engine.run()
    assert outputs(await running) == [1]
    await rig.scheduler.drained()
    assert rig.lines.num_used == 0
    assert rig.table.close(rig.table.server_epoch, handles) == [SequenceState.CLOSED]
    rig.table.check_integrity()


async def test_leases_expire_renew_and_survive_a_stall() -> None:
    rig = Rig()
    a, b = rig.open(2)
    epoch, table = rig.table.server_epoch, rig.table
    handles = np.array([a, b], dtype=np.uint64)

    def pass_time(seconds: int) -> None:
        for _ in range(seconds):
            rig.now += 1.0
            table.reap()

    pass_time(40)
    await rig.step((a, DECODE, 1, 0, -1, [1]))
    pass_time(30)
    assert table.describe(epoch, handles)[1].state is SequenceState.EXPIRED
    assert reason(await rig.step((b, DECODE, 1, 0, -1, [1]))) is Reason.SEQUENCE_EXPIRED
    assert table.renew(epoch, handles, 100.0) == [SequenceState.OPEN, SequenceState.EXPIRED]
    rig.now += 500.0  # the whole process stood still
    assert table.reap() == 0
    assert table.renew(epoch, handles[:1]) == [SequenceState.OPEN]
    rig.now += 1.0
    assert table.reap() == 0 and table.num_expired == 1
    with pytest.raises(RequestError):
        table.renew(epoch, handles, 1e9)


async def test_lines_are_zeroed_when_handed_out_and_capacity_is_told() -> None:
    rig = Rig(slots=2)
    a, _ = rig.open(2)
    with pytest.raises(RequestError) as full:
        rig.open()
    assert full.value.refusal.reason is Reason.NO_FREE_LINES and full.value.refusal.retry_after_s
    rig.table.close(rig.table.server_epoch, np.array([a], dtype=np.uint64))
    (c,) = rig.open()
    assert rig.zeroed == [1, 2, 1] and c != a and c % (1 << 24) == a % (1 << 24)
    await rig.step((c, DECODE, 1, 0, -1, [7]))
    assert rig.engine.batches[-1].control[1, 0] == 0  # a fresh sequence reads the null line
    await rig.step((c, DECODE, 2, 1, -1, [7]))
    assert rig.engine.batches[-1].control[1, 0] == 1


async def test_the_same_open_token_returns_the_same_handles() -> None:
    rig = Rig()
    first = rig.table.open(2, token=b"0123456789abcdef").handles
    again = rig.table.open(2, token=b"0123456789abcdef").handles
    assert first.tolist() == again.tolist() and rig.table.num_open == 2
    with pytest.raises(RequestError):
        rig.table.open(3, token=b"0123456789abcdef")
    rig.now += 61
    assert rig.table.open(2, token=b"0123456789abcdef").handles.tolist() != first.tolist()


@pytest.mark.parametrize("seed", range(4))
async def test_random_histories_agree_with_the_tokens_committed(seed: int) -> None:
    """Sequences of random life, random kinds, retries and commits; every output is checked against its own tokens."""
    rng = np.random.default_rng(seed)
    rig = Rig(slots=6, chunk_tokens=64)
    live: dict[int, dict[str, Any]] = {}
    for _ in range(400):
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
            count = {PREFILL: int(rng.choice([1, 3, 63, 64, 65, 150])), DECODE: 1, VERIFY: int(rng.integers(1, 5))}[
                kind
            ]
            new = [float(x) for x in rng.integers(1, 100, count)]
            sequence["step"] += 1
            rows.append((handle, kind, sequence["step"], len(sequence["tokens"]), accepted, new))
            expected.append([checksum(sequence["tokens"] + new[: n + 1]) for n in range(count)])
            if kind is VERIFY:
                sequence["draft"] = new
            else:
                sequence["tokens"] += new
        result = await rig.step(*rows)
        assert [outputs(result, i) for i in range(len(rows))] == expected, result.refusals
        if rng.random() < 0.3:
            again = await rig.step(*rows)
            assert again.hidden.tobytes() == result.hidden.tobytes()
        for handle in list(live):
            if rng.random() < 0.1:
                rig.table.close(rig.table.server_epoch, np.array([handle], dtype=np.uint64))
                del live[handle]
    assert rig.counts.total["replayed"] > 0
    await asyncio.sleep(0)  # the last books were settled in this turn
    assert rig.scheduler.load().queued_rows == rig.scheduler.load().queued_bytes == 0


async def test_new_replayed_and_joined_rows_in_any_order_share_a_reply() -> None:
    rig = Rig()
    a, b, c = rig.open(3)
    await rig.step((b, DECODE, 1, 0, -1, [5]))
    result = await rig.step((a, DECODE, 1, 0, -1, [4]), (b, DECODE, 1, 0, -1, [5]), (c, DECODE, 1, 0, -1, [6]))
    assert [outputs(result, row) for row in range(3)] == [[4], [5], [6]]
    assert result.outcome.tolist() == [RowOutcome.EXECUTED, RowOutcome.REPLAYED, RowOutcome.EXECUTED]


async def test_rows_that_lose_their_commit_to_another_span_do_not_stall_the_others() -> None:
    rig = Rig(spans=2, eager=False, chunk_tokens=64)
    a, b = rig.open(2)
    rig.engine.eager = True
    for span in (0, 1):
        await rig.step((a, VERIFY, 1, 0, -1, [2, 3]), span=span)
    rig.engine.eager = False
    blocker = rig.submit(rig.request((b, DECODE, 1, 0, -1, [1]), span=1))
    await asyncio.sleep(0)
    winner = rig.submit(rig.request((a, DECODE, 2, 1, 1, [9]), span=0))
    loser = rig.submit(rig.request((a, PREFILL, 2, 2, 2, [9.0] * 64), span=1))
    behind = rig.submit(rig.request((b, PREFILL, 2, 1, -1, [1.0] * 64), span=1))
    rig.engine.release()
    await asyncio.wait_for(asyncio.gather(blocker, winner, loser, behind), 5)
    assert outputs(await winner) == [checksum([2, 9])]
    assert reason(await loser) is Reason.COMMIT_CONFLICT
    assert reason(await behind) is None


async def test_spans_take_turns() -> None:
    rig = Rig(spans=2, eager=False, chunk_tokens=64)
    a, b = rig.open(2)
    long = rig.submit(rig.request((a, PREFILL, 1, 0, -1, [1.0] * 640), span=0))
    await asyncio.sleep(0)
    decode = rig.submit(rig.request((b, DECODE, 1, 0, -1, [3]), span=1))
    for _ in range(3):
        rig.engine.run()
        for _ in range(3):
            await asyncio.sleep(0)
    assert decode.done() and not long.done()
    rig.engine.release()
    await long


async def test_a_sequence_whose_kept_reply_fills_the_budget_can_still_step() -> None:
    rig = Rig(reply_bytes=32)  # one row of two tokens, its request and its outputs
    (a,) = rig.open()
    await rig.step((a, PREFILL, 1, 0, -1, [1, 2]))
    assert outputs(await rig.step((a, PREFILL, 2, 2, -1, [3, 4]))) == [14, 30]
    assert outputs(await rig.step((a, PREFILL, 3, 4, -1, [5, 6]))) == [55, 91]
    assert rig.scheduler.load().reply_bytes == 32


async def test_a_reply_that_its_client_may_lack_is_not_given_up() -> None:
    rig = Rig(eager=False, reply_bytes=48)  # three replies to a decode
    (a,) = rig.open()
    first = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    second = rig.submit(rig.request((a, DECODE, 2, 1, -1, [2])))
    rig.engine.run()
    await first
    await asyncio.sleep(0)
    third = rig.request((a, DECODE, 3, 2, -1, [3]))
    rig.table.replies.limit_bytes = 32
    with pytest.raises(RequestError) as short:
        rig.submit(third)
    assert short.value.refusal.reason is Reason.REPLY_BYTES_EXHAUSTED
    again = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))
    assert outputs(await again) == [1]
    rig.engine.run()
    assert outputs(await second) == [5]


async def test_retries_in_flight_count_against_the_queue() -> None:
    rig = Rig(eager=False, queue_rows=3)
    (a,) = rig.open()
    row = (a, DECODE, 1, 0, -1, [4.0])
    futures = [rig.submit(rig.request(row)) for _ in range(3)]
    with pytest.raises(RequestError) as full:
        rig.submit(rig.request(row))
    assert full.value.refusal.reason is Reason.QUEUE_FULL
    await asyncio.sleep(0)
    rig.engine.release()
    assert [outputs(await future) for future in futures] == [[4]] * 3
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the last books were settled in this turn
    assert rig.scheduler.load().queued_rows == rig.scheduler.load().queued_bytes == 0


async def test_a_thousand_verifies_of_which_nothing_is_accepted() -> None:
    rig = Rig(spans=2)
    (a,) = rig.open()
    for step in range(1, 1200):
        for span in (0, 1):
            result = await rig.step((a, VERIFY, step, 0, -1 if step == 1 else 0, [2]), span=span)
            assert reason(result) is None


async def test_many_overdue_rows_are_refused_in_little_time() -> None:
    rig = Rig(slots=2049, eager=False, queue_rows=4096, queue_bytes=1 << 24, reply_bytes=1 << 24)
    first, *others = rig.open(2049)
    blocker = rig.submit(rig.request((first, DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    late = [rig.submit(rig.request((h, DECODE, 1, 0, -1, [1]), deadline_s=rig.now + 1)) for h in others]
    rig.now += 2
    begin = asyncio.get_running_loop().time()
    rig.engine.release()
    await asyncio.gather(blocker, *late)
    assert {reason(future.result()) for future in late} == {Reason.QUEUE_DEADLINE}
    assert asyncio.get_running_loop().time() - begin < 2.0


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


async def test_a_step_that_is_refused_after_it_was_taken_has_renewed_the_lease() -> None:
    """Else a sequence could expire behind a refusal that asks for the same step again."""
    rig = Rig(eager=False)
    a, b = rig.open(2)
    futures = []
    for step in (1, 2):  # as many batches as the engine takes
        futures.append(rig.submit(rig.request((b, DECODE, step, step - 1, -1, [1]))))
        for _ in range(3):
            await asyncio.sleep(0)
    rig.now += 59.0
    late = rig.submit(rig.request((a, DECODE, 1, 0, -1, [2]), deadline_s=rig.now + 0.5))
    rig.table.reap()
    rig.now += 1.0
    rig.table.reap()
    rig.engine.release()
    assert reason(await late) is Reason.QUEUE_DEADLINE
    rig.now += 1.0
    rig.table.reap()
    again = await rig.step((a, DECODE, 1, 0, -1, [2]))
    assert reason(again) is None and outputs(again) == [2]
    await asyncio.gather(*futures)


async def test_stop_refuses_what_waits_and_finishes_what_runs() -> None:
    rig = Rig(eager=False)
    a, b = rig.open(2)
    running = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    behind = rig.submit(rig.request((a, DECODE, 2, 1, -1, [2])))
    waiting = rig.submit(rig.request((b, DECODE, 1, 0, -1, [3])))
    rig.scheduler.stop()
    assert reason(await behind) is Reason.STOPPING and reason(await waiting) is Reason.STOPPING
    with pytest.raises(RequestError) as stopping:
        rig.submit(rig.request((b, DECODE, 1, 0, -1, [3])))
    assert stopping.value.refusal.reason is Reason.STOPPING
    rig.engine.run()
    assert outputs(await running) == [1]
    await rig.scheduler.drained()
    rig.table.check_integrity()


async def test_a_bug_while_a_batch_completes_ends_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(eager=False)
    (a,) = rig.open()
    rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    monkeypatch.setattr(rig.table.ledger, "finish", None)
    rig.engine.run()
    await asyncio.sleep(0.01)
    assert rig.scheduler.has_failed


async def test_a_bug_while_a_request_settles_the_books_ends_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    a, b = rig.open(2)
    monkeypatch.setattr(rig.table.ledger, "finish", None)
    assert outputs(await rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))) == [1]
    assert not rig.scheduler.has_failed  # answered, and not in the books yet
    with pytest.raises(RequestError) as stopping:
        rig.submit(rig.request((b, DECODE, 1, 0, -1, [1])))
    assert stopping.value.refusal.reason is Reason.STOPPING and rig.scheduler.has_failed


async def test_a_batch_has_no_more_rows_than_it_may() -> None:
    rig = Rig(eager=False, batch_rows=3, long_rows=2, chunk_tokens=256)
    handles = rig.open(8)
    decodes = [rig.submit(rig.request(*((h, DECODE, 1, 0, -1, [1.0]) for h in handles[:5])))]
    prefills = [rig.submit(rig.request((h, PREFILL, 1, 0, -1, [1.0] * 64))) for h in handles[5:]]
    while rig.scheduler.load().queued_rows:
        await asyncio.sleep(0)
        if rig.engine.waiting:
            rig.engine.run()
    for done in await asyncio.gather(*decodes, *prefills):
        assert (done.outcome == RowOutcome.EXECUTED).all()
    sizes = [(batch.num_short, batch.control.shape[1] - 1 - batch.num_short) for batch in rig.engine.batches]
    assert max(short for short, _ in sizes) == 3 and sum(short for short, _ in sizes) == 5
    assert max(long for _, long in sizes) == 2 and sum(long for _, long in sizes) == 3
