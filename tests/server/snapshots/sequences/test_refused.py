"""Sequences that come and can't be opened, or not yet: each is refused by name, and nothing of it is left."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rigs.exchanged_states import file_of, forged
from rigs.scheduler_rig import refuses
from rigs.state_rig import FINGERPRINT, StateRig
from rigs.stored_states import VERIFY
from rigs.until import until
from rigs.whole_sequences import check_idle, imported, prefilled

from deltaline_server.errors import Reason
from deltaline_server.principal import Principal, Quotas
from deltaline_server.snapshots.header import decode
from deltaline_server.snapshots.layout import Part, Section, state_bytes


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
    assert told.lease_remaining_s == 5.0 and told.spans[0].step == 1 and told.spans[0].position == 46
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


def sections_of(rig: StateRig, content: bytes) -> tuple[Section, ...]:
    length = int.from_bytes(content[12:16], "little")
    return decode(content[:length], rig.tiers.layout, FINGERPRINT).sections
