"""The same call sent again does nothing twice: it joins what is under way, or gets what was done."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.tables import request_ids
from deltaline_server.tables.request_ids import ENTRY_BYTES, LIFE_S, RequestIds

ALICE, BOB = Principal(1, "alice"), Principal(2, "bob")


class Work:
    """Work that is counted, waits until it may end, and then replies or raises."""

    def __init__(self, reply: bytes = b"done", is_held: bool = False) -> None:
        self.reply, self.error, self.count = reply, None if reply else RequestError(Reason.NO_FREE_LINES, "none"), 0
        self.may_end, self.has_begun = asyncio.Event(), asyncio.Event()
        if not is_held:
            self.may_end.set()

    async def __call__(self) -> bytes:
        self.count += 1
        self.has_begun.set()
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return self.reply


class Ids:
    """Ids with a clock that a test moves."""

    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        self.now_s = 0.0
        self.table = RequestIds(lambda: self.now_s, limit_bytes)

    def once(
        self,
        work: Callable[[], Coroutine[Any, Any, bytes]],
        request_id: bytes = b"a",
        content: bytes = b"",
        *,
        who: Principal = ALICE,
        method: str = "Fork",
    ) -> Coroutine[Any, Any, bytes]:
        return self.table.once(who, method, request_id, content, work)


async def test_a_call_that_is_done_is_not_done_again_for_a_minute() -> None:
    ids, work = Ids(), Work()
    assert await ids.once(work) == b"done"
    work.reply = b"something else"
    ids.now_s = LIFE_S - 0.1
    assert await ids.once(work) == b"done" and (work.count, ids.table.num_repeated) == (1, 1)
    ids.now_s = LIFE_S
    assert await ids.once(work) == b"something else" and work.count == 2


async def test_a_call_joins_the_one_that_is_under_way() -> None:
    ids, work = Ids(), Work(is_held=True)
    calls = [asyncio.create_task(ids.once(work)) for _ in range(3)]
    await work.has_begun.wait()
    ids.now_s = 10 * LIFE_S  # however long it takes
    calls.append(asyncio.create_task(ids.once(work)))
    work.may_end.set()
    assert await asyncio.gather(*calls) == [b"done"] * 4 and (work.count, ids.table.num_repeated) == (1, 3)


async def test_work_goes_on_without_the_calls_that_wait_for_it() -> None:
    ids, work = Ids(), Work(is_held=True)
    calls = [asyncio.create_task(ids.once(work)) for _ in range(2)]
    await work.has_begun.wait()
    for call in calls:
        call.cancel()
    assert all(isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*calls, return_exceptions=True))
    later = asyncio.create_task(ids.once(work))
    work.may_end.set()
    assert await later == b"done" and work.count == 1


async def test_work_may_fail_when_all_who_waited_for_it_have_gone() -> None:
    ids, work, complaints = Ids(), Work(b"", is_held=True), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    call = asyncio.create_task(ids.once(work))
    await work.has_begun.wait()
    call.cancel()
    await asyncio.wait([call])
    del call  # which has what it waited for
    work.may_end.set()
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("is_held", [False, True], ids=["done", "under way"])
async def test_an_id_is_of_one_content_principal_and_method(is_held: bool) -> None:
    ids, work, other = Ids(), Work(is_held=is_held), Work(b"other")
    first = asyncio.create_task(ids.once(work, content=b"x"))
    await work.has_begun.wait()
    if not is_held:
        await first
    with pytest.raises(RequestError) as refused:
        await ids.once(other, content=b"y")
    assert (refused.value.refusal.reason, refused.value.refusal.field) == (Reason.INVALID_REQUEST, "request_id")
    assert other.count == 0
    for changes in ({"who": BOB}, {"method": "Create"}, {"request_id": b"b"}):
        assert await ids.once(other, content=b"y", **changes) == b"other"
    assert other.count == 3
    work.may_end.set()
    assert await first == b"done"


async def test_an_id_that_is_under_way_is_not_another_content_s_where_nothing_is_waited_for() -> None:
    ids, work = Ids(), Work(is_held=True)
    call = asyncio.create_task(ids.once(work, content=b"a sequence"))
    await work.has_begun.wait()
    with pytest.raises(RequestError, match="it came with another request before"):
        ids.table.find(ALICE, "Fork", b"a", b"a snapshot")
    assert ids.table.find(ALICE, "Fork", b"a", b"a sequence") is None and ids.table.num_repeated == 0
    work.may_end.set()
    assert await call == b"done" == ids.table.find(ALICE, "Fork", b"a", b"a sequence")


async def test_an_outcome_in_place_of_another_is_counted_alone() -> None:
    ids = Ids(limit_bytes=4 * (ENTRY_BYTES + 4))
    for _ in range(100):
        ids.table.add(ALICE, "Import", b"a", b"", b"long" * 99)
        ids.table.add(ALICE, "Import", b"a", b"", b"done")
    assert ids.table.used_bytes == ENTRY_BYTES + 4
    ids.table.add(ALICE, "Import", b"b", b"", b"done")
    ids.now_s = LIFE_S - 1
    ids.table.add(ALICE, "Import", b"a", b"", b"done")  # lives on from here, behind the other
    ids.now_s = LIFE_S
    assert ids.table.find(ALICE, "Import", b"b", b"") is None
    assert ids.table.find(ALICE, "Import", b"a", b"") == b"done"
    ids.now_s += LIFE_S
    assert ids.table.find(ALICE, "Import", b"a", b"") is None and ids.table.used_bytes == 0


async def test_of_what_was_refused_nothing_is_remembered() -> None:
    ids, work = Ids(), Work(b"", is_held=True)
    calls = [asyncio.create_task(ids.once(work)) for _ in range(2)]
    await work.has_begun.wait()
    work.may_end.set()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [error.refusal.reason for error in errors] == [Reason.NO_FREE_LINES] * 2  # type: ignore[union-attr]
    assert await ids.once(Work(), content=b"another") == b"done", "even the id is free"
    assert ids.table.used_bytes == ENTRY_BYTES + len(b"done")


async def test_who_has_most_loses_its_oldest_when_memory_is_short() -> None:
    ids = Ids(limit_bytes=4 * (ENTRY_BYTES + 4))
    await ids.once(Work(), b"bob", who=BOB)
    for number in range(3):
        await ids.once(Work(), b"alice %d" % number)
    await ids.once(Work(), b"alice 3")
    again = Work()
    for request_id, who in ((b"alice 1", ALICE), (b"alice 2", ALICE), (b"alice 3", ALICE), (b"bob", BOB)):
        await ids.once(again, request_id, who=who)
    assert again.count == 0
    await ids.once(again, b"alice 0")
    assert again.count == 1
    ids.now_s = LIFE_S
    with pytest.raises(RequestError):
        await ids.once(Work(b""), who=ALICE)
    with pytest.raises(RequestError):
        await ids.once(Work(b""), who=BOB)
    assert ids.table.used_bytes == 0


async def test_a_reply_that_is_larger_than_all_memory_is_given_once() -> None:
    ids = Ids(limit_bytes=ENTRY_BYTES + 8)
    assert await ids.once(Work(bytes(100))) == bytes(100)
    assert ids.table.used_bytes == 0


async def test_a_principal_that_leaves_its_calls_leaves_as_many_works_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_ids, "MAX_RUNNING", 4)
    ids, work = Ids(), Work(is_held=True)
    calls = [asyncio.create_task(ids.once(work, bytes([i]))) for i in range(2)]
    await work.has_begun.wait()
    with pytest.raises(RequestError) as refused:
        await ids.once(work, b"third")
    assert refused.value.refusal.reason is Reason.TOO_MANY_CALLS and refused.value.refusal.retry_after_s
    joined = asyncio.create_task(ids.once(work, bytes([0])))  # which begins no work
    calls.append(asyncio.create_task(ids.once(work, who=BOB)))
    calls.append(joined)
    await asyncio.sleep(0)
    work.may_end.set()
    assert await asyncio.gather(*calls) == [b"done"] * 4
    again = [ids.once(work, bytes([i, i])) for i in range(2)]
    assert await asyncio.gather(*again) == [b"done"] * 2, "what is done makes room"


async def test_close_ends_what_is_under_way() -> None:
    ids, work = Ids(), Work(is_held=True)
    call = asyncio.create_task(ids.once(work))
    await work.has_begun.wait()
    await ids.table.close()
    with pytest.raises(asyncio.CancelledError):
        await call
