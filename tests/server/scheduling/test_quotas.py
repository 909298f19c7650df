"""What a principal may have: beyond it the error tells the numbers, and others are not concerned."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable
from typing import Any

import pytest
from rigs.scheduler_rig import DECODE, PREFILL, Rig, refuses, turns

from deltaline_server.errors import Reason, Refusal
from deltaline_server.memory.regions import Regions
from deltaline_server.principal import ANONYMOUS, Principal, Quotas
from deltaline_server.step import RowOutcome, StepRequest, StepResult

OTHER = Principal(2, "other one")


def held(**quotas: int) -> Principal:
    return Principal(1, "held", quotas=Quotas(**quotas))


def exceeded(call: Callable[[], Any]) -> Refusal:
    with refuses(Reason.QUOTA_EXCEEDED) as caught:
        call()
    return caught.value.refusal


def numbers(refusal: Refusal) -> tuple[str, int, int, int]:
    told = refusal.metadata
    return told["quota"], int(told["limit"]), int(told["used"]), int(told["asked"])


def test_sequences_are_counted_until_they_end() -> None:
    rig, principal = Rig(slots=8), held(sequences=3)
    first = rig.table.open(2, principal=principal).handles
    refusal = exceeded(lambda: rig.table.open(2, principal=principal))
    assert numbers(refusal) == ("sequences", 3, 2, 2) and refusal.retry_after_s
    assert refusal.message == "sequences: 2 of this principal's 3 are used, 2 more were asked for"
    assert exceeded(lambda: rig.table.open(4, principal=principal)).retry_after_s is None
    rig.table.open(4, principal=OTHER)
    rig.table.close(rig.table.server_epoch, first[:1], principal)
    rig.table.open(2, principal=principal)
    rig.table.check_integrity()
    rig.now += 3600
    rig.table.reap()
    rig.now += 1
    assert rig.table.reap() == 7
    rig.table.open(3, principal=principal)
    rig.table.check_integrity()


def decode(rig: Rig, principal: Principal, rows: int) -> Callable[[], asyncio.Future[StepResult]]:
    handles = rig.table.open(rows, principal=principal).handles.tolist()
    return lambda: rig.submit(rig.request(*((h, DECODE, 1, 0, -1, [1.0]) for h in handles), principal=principal))


@pytest.mark.parametrize(("quota", "of_a_row"), [("queued_rows", 1), ("queued_bytes", 8)])
async def test_rows_that_wait_are_counted_until_they_are_done(quota: str, of_a_row: int) -> None:
    rig, principal = Rig(eager=False), held(**{quota: 3 * of_a_row})
    two, one, more = (decode(rig, principal, rows) for rows in (2, 1, 2))
    done = [two()]
    assert numbers(exceeded(more)) == (quota, 3 * of_a_row, 2 * of_a_row, 2 * of_a_row)
    done += [one(), decode(rig, OTHER, 2)()]
    await asyncio.sleep(0)
    rig.engine.release()
    await asyncio.gather(*done)
    rig.scheduler.settle()
    rig.engine.eager = True
    await more()
    rig.scheduler.settle()
    await turns()
    assert {(use.rows, use.num_bytes) for use in rig.scheduler.use.values()} == {(0, 0)}


async def test_rows_that_are_refused_are_given_back() -> None:
    rig, principal = Rig(eager=False), held(queued_rows=4)
    running, waiting = decode(rig, principal, 2), decode(rig, principal, 2)
    results = [running(), waiting()]
    rig.scheduler.stop()
    rig.engine.release()
    await asyncio.gather(*results)
    rig.scheduler.settle()
    assert rig.scheduler.use[1].rows == rig.scheduler.use[1].num_bytes == 0


async def test_prefill_tokens_have_a_rate() -> None:
    rig, principal = Rig(slots=16, chunk_tokens=256), held(prefill_tokens_per_s=100)

    async def prefill(tokens: int, principal: Principal = principal) -> None:
        (handle,) = rig.table.open(1, principal=principal).handles.tolist()
        await rig.submit(rig.request((handle, PREFILL, 1, 0, -1, [1.0] * tokens), principal=principal))

    await prefill(250)  # larger than a second's: it has its turn
    with refuses(Reason.QUOTA_EXCEEDED) as caught:
        await prefill(10)
    assert numbers(caught.value.refusal) == ("prefill_tokens_per_s", 100, 250, 10)
    assert caught.value.refusal.retry_after_s == pytest.approx(1.5, abs=0.01)
    await prefill(250, OTHER)
    await decode(rig, principal, 2)()
    rig.now += 1.4
    with refuses(Reason.QUOTA_EXCEEDED):
        await prefill(10)
    rig.now += 0.11
    await prefill(10)


async def test_a_rate_that_is_new_counts_from_then_on() -> None:
    rig = Rig(slots=16, chunk_tokens=256)
    for principal in (held(queued_rows=9), held(prefill_tokens_per_s=1)):  # the file changed between them
        (handle,) = rig.table.open(1, principal=principal).handles.tolist()
        result = await rig.submit(rig.request((handle, PREFILL, 1, 0, -1, [1.0] * 250), principal=principal))
        assert result.outcome.tolist() == [1]


async def test_a_replay_takes_no_quota() -> None:
    rig, principal = Rig(), held(prefill_tokens_per_s=1, queued_rows=1)
    (handle,) = rig.table.open(1, principal=principal).handles.tolist()
    request = rig.request((handle, PREFILL, 1, 0, -1, [1.0, 2.0]), principal=principal)
    first = await rig.submit(request)
    rig.scheduler.settle()
    again = await rig.submit(request)
    assert again.outcome.tolist() == [2] and again.hidden.tolist() == first.hidden.tolist()


async def test_a_refused_prefill_that_is_padding_beside_a_decode_counts() -> None:
    """It is computed like any other."""
    rig, principal = Rig(slots=4), held(prefill_tokens_per_s=10)
    decoded, refused = rig.table.open(2, principal=principal).handles.tolist()

    def request(step: int) -> StepRequest:
        rows = (decoded, DECODE, step, step - 1, -1, [1.0]), (refused, PREFILL, 9, 0, -1, [1.0] * 20)
        return rig.request(*rows, principal=principal)

    result = await rig.submit(request(1))
    rig.scheduler.settle()
    assert result.outcome.tolist() == [RowOutcome.EXECUTED, RowOutcome.REFUSED]
    assert numbers(exceeded(lambda: rig.submit(request(2)))) == ("prefill_tokens_per_s", 10, 20, 20)


async def test_regions_are_counted_until_they_are_unmapped() -> None:
    regions = Regions(limit_bytes=1 << 20, default_lease_s=1.0, max_lease_s=1.0, clock=lambda: 0.0)
    quotas = Quotas(regions=2, region_bytes=3 * mmap.PAGESIZE)

    async def exceeds(size: int) -> tuple[str, int, int, int]:
        with refuses(Reason.QUOTA_EXCEEDED) as caught:
            await regions.create(size, None, 1, quotas)
        return numbers(caught.value.refusal)

    first = await regions.create(2 * mmap.PAGESIZE, None, 1, quotas)
    assert await exceeds(mmap.PAGESIZE + 1) == ("region_bytes", 3 * mmap.PAGESIZE, 2 * mmap.PAGESIZE, 2 * mmap.PAGESIZE)
    await regions.create(1, None, 1, quotas)
    assert await exceeds(1) == ("regions", 2, 2, 1)
    await regions.create(1 << 16, None, 2, quotas=None)
    regions.release(first.id)
    assert await exceeds(1) == ("regions", 2, 2, 1), "somebody still has its memory"
    del first
    await regions.create(1, None, 1, quotas)
    await regions.close()


@pytest.mark.parametrize(("unit", "limits"), [("rows", {"queue_rows": 16}), ("bytes", {"queue_bytes": 16 * 8})])
async def test_a_flood_without_quotas_leaves_others_a_part_of_the_queue(unit: str, limits: dict[str, int]) -> None:
    rig, flood = Rig(slots=32, eager=False, **limits), Principal(1, "flood")  # type: ignore[arg-type]
    sent = [decode(rig, flood, 2)() for _ in range(4)]
    with refuses(Reason.QUEUE_FULL) as full:
        decode(rig, flood, 2)()
    told = {
        "rows": "this principal has 8 rows that wait, 2 more would leave others 6",
        "bytes": "this principal has 64 bytes that wait",
    }
    assert told[unit] in full.value.refusal.message and full.value.refusal.retry_after_s
    sent.append(decode(rig, OTHER, 4)())
    third = Principal(3, "third")
    sent.append(decode(rig, third, 4)())
    with refuses(Reason.QUEUE_FULL):
        decode(rig, OTHER, 1)()
    await asyncio.sleep(0)
    rig.engine.release()
    await asyncio.gather(*sent)


@pytest.mark.parametrize("principal", [ANONYMOUS, Principal(1, "lone", is_alone=True)], ids=["everybody", "lone"])
async def test_who_has_no_other_beside_may_fill_the_queue(principal: Principal) -> None:
    rig = Rig(slots=32, eager=False, queue_rows=16, queue_bytes=16 * 8)
    sent = [decode(rig, principal, 8)() for _ in range(2)]
    with refuses(Reason.QUEUE_FULL):
        decode(rig, principal, 1)()
    await asyncio.sleep(0)
    rig.engine.release()
    assert [result.refusals for result in await asyncio.gather(*sent)] == [{}, {}]


async def test_rows_and_tokens_that_ran_are_counted_for_their_principal() -> None:
    rig, principal = Rig(), Principal(1, "one")
    a, b = rig.table.open(2, principal=principal).handles.tolist()
    await rig.step((a, PREFILL, 1, 0, -1, [1.0] * 9), (b, DECODE, 1, 0, -1, [1.0]), principal=principal)
    use = rig.scheduler.use[1]
    assert (use.rows_run, use.tokens_run) == (2, 10)
