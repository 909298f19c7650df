"""The device's share is fair among principals, then among their clients, whatever priority a request claims."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, PREFILL, Rig, refuses, turns

from deltaline_server.batch import StepBatch
from deltaline_server.errors import Reason
from deltaline_server.principal import Principal
from deltaline_server.step import StepResult

ALICE, BOB = Principal(1, "alice"), Principal(2, "bob")


class Flood:
    """Sends steps whose tokens say whom they are from, and tells what is in the batches."""

    def __init__(self, **options: Any) -> None:
        self.rig = Rig(slots=64, eager=False, queue_rows=256, queue_bytes=1 << 24, **options)
        self.sent: list[asyncio.Future[StepResult]] = []

    def send(
        self, principal: Principal, rows: int, tag: float, *, tokens: int = 1, client: str = "", priority: int = 0
    ) -> None:
        handles = self.rig.table.open(rows, principal=principal).handles.tolist()
        kind = DECODE if tokens == 1 else PREFILL
        request = self.rig.request(
            *((handle, kind, 1, 0, -1, [tag] * tokens) for handle in handles),
            principal=principal,
            client=client or principal.name,
            priority=priority,
        )
        self.sent.append(self.rig.submit(request))

    async def batches(self) -> list[dict[float, int]]:
        """The tokens of each batch by tag, when all is computed."""
        while not all(one.done() for one in self.sent):
            await turns()
            if self.rig.engine.waiting:
                self.rig.engine.run()
        return [_by_tag(batch) for batch in self.rig.engine.batches]


def _by_tag(batch: StepBatch) -> dict[float, int]:
    tags = [tag for hidden in batch.hidden for tag in hidden[:, 0].tolist()]
    return {tag: tags.count(tag) for tag in sorted(set(tags))}


@pytest.mark.parametrize("priority", [0, 7])
async def test_a_flood_of_decodes_leaves_another_its_half(priority: int) -> None:
    flood = Flood(batch_rows=8)
    for _ in range(10):
        flood.send(ALICE, 4, 1.0, priority=priority)
    for _ in range(3):
        flood.send(BOB, 4, 2.0)
    batches = await flood.batches()
    assert batches[0] == {1.0: 4}, "it began before there was anything else"
    mixed = [batch for batch in batches if 2.0 in batch]
    assert mixed == batches[1:4] == [{1.0: 4, 2.0: 4}] * 3
    assert sum(batch.get(1.0, 0) for batch in batches) == 40


async def test_within_a_principal_its_clients_are_equal_and_its_priorities_are_not() -> None:
    flood = Flood(batch_rows=4)
    flood.send(ALICE, 4, 1.0, client="a")
    for _ in range(4):
        flood.send(ALICE, 2, 1.0, client="a")
    flood.send(ALICE, 2, 2.0, client="b")
    flood.send(ALICE, 4, 3.0, client="a", priority=1)
    assert (await flood.batches())[1:3] == [{3.0: 4}, {1.0: 2, 2.0: 2}]


async def test_what_fits_a_batch_goes_at_once() -> None:
    flood = Flood(batch_rows=16)
    flood.send(ALICE, 1, 1.0)
    for tag in (1.0, 2.0):
        flood.send(ALICE if tag == 1.0 else BOB, 8, tag)
    assert (await flood.batches())[1] == {1.0: 8, 2.0: 8}


@pytest.mark.parametrize("priority", [0, 7])
async def test_prefills_take_turns_by_principal_before_client(priority: int) -> None:
    flood = Flood(chunk_tokens=128, long_rows=4)
    flood.send(ALICE, 1, 1.0, tokens=128)
    for number in range(6):
        flood.send(ALICE, 1, 1.0, tokens=256, client=f"alice {number}", priority=priority)
    flood.send(BOB, 1, 2.0, tokens=512)
    batches = await flood.batches()
    until = next(i for i in range(len(batches)) if sum(batch.get(2.0, 0) for batch in batches[: i + 1]) == 512)
    among = batches[1 : until + 1]
    alice, bob = (sum(batch.get(tag, 0) for batch in among) for tag in (1.0, 2.0))
    assert bob == 512 and 256 <= alice <= 640, among
    assert sum(batch.get(1.0, 0) for batch in batches) == 128 + 6 * 256


async def test_who_was_alone_for_long_owes_no_turns() -> None:
    flood = Flood(chunk_tokens=128)
    flood.send(ALICE, 1, 1.0, tokens=1024)
    for _ in range(3):  # more than a turn of hers, while nobody else waits
        await turns()
        flood.rig.engine.run()
    flood.send(BOB, 1, 2.0, tokens=256)
    batches = await flood.batches()
    assert batches[4:9] == [{1.0: 128}, {2.0: 128}, {1.0: 128}, {2.0: 128}, {1.0: 128}]
    assert sum(batch.get(1.0, 0) for batch in batches) == 1024


async def test_a_claimed_priority_does_not_keep_anothers_span_waiting() -> None:
    flood = Flood(batch_rows=4, spans=2)
    flood.send(ALICE, 4, 1.0)
    for _ in range(5):
        flood.send(ALICE, 4, 1.0, priority=7)
    handles = flood.rig.table.open(1, principal=BOB).handles.tolist()
    request = flood.rig.request((handles[0], DECODE, 1, 0, -1, [2.0]), principal=BOB, span=1)
    flood.sent.append(flood.rig.submit(request))
    assert {2.0: 1} in (await flood.batches())[1:3]


@pytest.mark.parametrize("eager", [True, False], ids=["kept", "to come"])
async def test_replies_to_one_leave_room_for_those_to_others(eager: bool) -> None:
    rig = Rig(slots=64, eager=eager, reply_bytes=8 << 10)
    sent: list[asyncio.Future[StepResult]] = []

    def prefill(handle: int, principal: Principal, step: int = 1) -> None:
        row = (handle, PREFILL, step, 64 * (step - 1), -1, [1.0] * 64)
        sent.append(rig.submit(rig.request(row, principal=principal)))

    first, *others = rig.table.open(40, principal=ALICE).handles.tolist()
    prefill(first, ALICE)
    with refuses(Reason.REPLY_BYTES_EXHAUSTED):
        for handle in others:
            prefill(handle, ALICE)
            await turns()
            rig.scheduler.settle()
    assert len(sent) == 4, "half of what there is"
    for handle in rig.table.open(2, principal=BOB).handles.tolist():
        prefill(handle, BOB)
    rig.engine.release()
    await asyncio.gather(*sent)
    rig.scheduler.settle()
    prefill(first, ALICE, step=2)  # in place of the reply that she has
    await sent[-1]
    rig.scheduler.settle()
    await turns()
    rig.table.close(rig.table.server_epoch, np.array(others, np.uint64), ALICE)
    for handle in rig.table.open(2, principal=ALICE).handles.tolist():
        prefill(handle, ALICE)
    await asyncio.gather(*sent)
    rig.scheduler.settle()
    await turns()
    assert {use.reply_bytes for use in rig.scheduler.use.values()} == {0}


async def test_replies_to_who_is_alone_may_take_all_there_is() -> None:
    rig, lone = Rig(slots=64, reply_bytes=8 << 10), Principal(1, "lone", is_alone=True)
    num_sent = 0
    with refuses(Reason.REPLY_BYTES_EXHAUSTED):
        for handle in rig.table.open(40, principal=lone).handles.tolist():
            await rig.submit(rig.request((handle, PREFILL, 1, 0, -1, [1.0] * 64), principal=lone))
            rig.scheduler.settle()
            num_sent += 1
    assert num_sent > 4, "more than half of what there is"


async def test_clients_have_their_turns_in_the_order_in_which_they_came() -> None:
    flood = Flood(chunk_tokens=64)
    for tag in (0, 1, 2, 3):  # the first is in flight when the others come
        flood.send(ALICE, 1, tag, tokens=128, client=str(tag))
    assert await flood.batches() == [{tag: 64} for tag in (0, 0, 1, 2, 3, 1, 2, 3)]
