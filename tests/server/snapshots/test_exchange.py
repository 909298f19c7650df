"""States that leave a server and come to another: they go on bitwise there, whole or not at all, the caller's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.exchanged_states import exported, forged, imported, imported_by
from rigs.scheduler_rig import refuses
from rigs.state_rig import STORED_LIMIT, StateRig
from rigs.stored_states import (
    DECODE,
    KEY,
    MODELS,
    captured,
    described,
    leave_host,
    make_rig,
    opened,
    prefilled,
    pushed_out,
    restored,
    settled,
)
from rigs.until import until

from deltaline_server.errors import Reason
from deltaline_server.principal import ANONYMOUS, Principal, Quotas
from deltaline_server.snapshots import exchange, stream
from deltaline_server.snapshots.header import Flaw, StateFileError, StateHeader
from deltaline_server.snapshots.host import Copy
from deltaline_server.snapshots.layout import Bytes, Part
from deltaline_server.tables.captured.snapshot import SnapshotState
from deltaline_server.tables.prefixes.cost import ReusePolicy, Tier
from deltaline_server.tables.prefixes.keys import PrefixKeys

ALICE = Principal(1, "alice")
BOB = Principal(2, "bob")


async def check_empty(rig: StateRig, num_held: int = 0) -> None:
    """Nothing is left of what came to a rig."""
    await settled(rig)
    assert rig.tiers.host is not None and rig.tiers.host.used_bytes == 0
    assert rig.snapshots.num_held == num_held
    rig.tiers.host.check_integrity()
    rig.snapshots.check_integrity()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("accepted", [None, 0, 2], ids=["prefilled", "nothing accepted", "two accepted"])
async def test_an_imported_state_goes_on_bitwise(pair: Any, name: str, accepted: int | None) -> None:
    rig, other = pair(name)
    sequence = await prefilled(rig)
    if accepted is not None:
        await sequence.verified(accepted)
    made = await captured(sequence, keys=[KEY])
    whole = b"".join(await exported(rig, made.id))
    came = await imported(other, [whole[at : at + 777] for at in range(0, len(whole), 777)])
    assert (came.position, came.tier, came.is_pinned) == (made.position, Tier.HOST, False) and came.id != made.id
    keys = PrefixKeys.of([KEY], [came.position], came.position + 1)
    match = other.states.find(keys, b"", ANONYMOUS, ReusePolicy.ALWAYS)
    assert match.prefix is not None and match.prefix.snapshot == came.id
    expected = await sequence.goes_on()
    for child in await restored(other, came, 2):
        for one, two in zip(await child.goes_on(), expected, strict=True):
            np.testing.assert_array_equal(one, two)
    assert described(other, came).tier is Tier.DEVICE


async def test_a_state_without_a_step_is_exported_too(pair: Any) -> None:
    rig, other = pair()
    made = await captured(opened(rig))
    [child] = await restored(other, await imported(other, await exported(rig, made.id)))
    assert child.position == 0
    for one, two in zip(await child.step(DECODE, 1), await opened(rig).step(DECODE, 1), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("where", ["device", "host", "file"])
async def test_a_state_is_the_same_from_every_tier(tmp_path: Path, where: str) -> None:
    rig = make_rig(tmp_path, files=True)
    made = await captured(await prefilled(rig))
    first = b"".join(await exported(rig, made.id))
    await settled(rig)
    if where != "device":
        await pushed_out(rig)
    if where != "host":
        await leave_host(rig, made.id)
    tier = {"device": Tier.DEVICE, "host": Tier.HOST, "file": Tier.FILE}[where]
    assert described(rig, made).tier is tier and rig.tiers.files is not None
    assert (
        b"".join(await exported(rig, made.id)) == first == (tmp_path / "states" / f"{made.id.hex()}.state").read_bytes()
    )
    assert rig.tiers.host is not None and rig.tiers.host.find(made.id) is not None
    rig.snapshots.check_integrity()
    await rig.close()


async def test_an_export_joins_the_copy_under_way_and_goes_ahead_of_those_that_wait(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, snapshot_lines=4)
    rig.engine.eager = False
    made = [await captured(opened(rig)) for _ in range(4)]
    host, order = rig.tiers.host, list[int]()
    assert host is not None
    store, ids = host.store, [one.id for one in made]

    async def noted(header: StateHeader, copy_in: Copy) -> bool:
        order.append(ids.index(header.id))
        return await store(header, copy_in)

    host.store = noted  # type: ignore[method-assign]
    exports = [asyncio.ensure_future(exported(rig, made[i].id)) for i in (0, 3)]
    while not all(one.done() for one in exports) or len(order) < 4:
        await asyncio.sleep(0)
        rig.engine.run()
    assert order == [0, 3, 1, 2]


async def test_the_device_finishes_the_copy_of_an_export_that_is_cancelled(tmp_path: Path) -> None:
    """Else it would write into the place of another state."""
    rig = make_rig(tmp_path)
    made = await captured(await prefilled(rig))
    await settled(rig)
    await leave_host(rig, made.id)
    rig.engine.eager = False
    export, host = asyncio.ensure_future(exported(rig, made.id)), rig.tiers.host
    assert host is not None
    await until(lambda: host.used_bytes)
    export.cancel()
    with suppress(asyncio.CancelledError):
        await export
    assert host.used_bytes and host.find(made.id) is None, "the device has yet to write"
    rig.engine.run()
    await until(lambda: host.find(made.id))
    rig.engine.eager = True
    host.check_integrity()


async def test_a_snapshot_that_is_released_meanwhile_is_exported_to_its_end(pair: Any) -> None:
    rig, other = pair()
    sequence = await prefilled(rig)
    made = await captured(sequence)
    assert rig.exchange is not None and rig.tiers.host is not None
    pieces = rig.exchange.export(made.id, ANONYMOUS, pause_s=60.0, whole_s=600.0)
    first = await anext(pieces)
    rig.snapshots.release([made.id], ANONYMOUS)
    assert rig.tiers.host.used_bytes > 0, "its place is kept"
    came = await imported(other, [first, *[piece async for piece in pieces]])
    await check_empty(rig)
    [child] = await restored(other, came)
    for one, two in zip(await child.goes_on(), await sequence.goes_on(), strict=True):
        np.testing.assert_array_equal(one, two)


async def test_another_principal_s_snapshot_is_one_that_never_was(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    made = await captured(await prefilled(rig))
    said = []
    for id, owner in ((made.id, ALICE), (bytes(16), ALICE), (bytes(16), ANONYMOUS)):
        with refuses(Reason.SNAPSHOT_UNKNOWN) as caught:
            await exported(rig, id, owner)
        said.append(caught.value.refusal)
    assert said[0] == said[1] == said[2]
    came = await imported(rig, await exported(rig, made.id), BOB)
    with refuses(Reason.SNAPSHOT_UNKNOWN):
        await exported(rig, came.id)
    assert [one.id for one in rig.snapshots.describe(BOB)[0]] == [came.id]
    header = b"".join(await exported(rig, came.id, BOB))[:4096]
    assert b"bob" in header and b"anonymous" not in header, "an import is of whom it came from"


async def test_host_memory_without_room_refuses_both_ways(pair: Any, tmp_path: Path) -> None:
    rig, other = pair(host_bytes=1 << 20)
    made = await captured(await prefilled(rig))
    pieces = await exported(rig, made.id)
    (tmp_path / "small").mkdir()
    small = make_rig(tmp_path / "small", host_bytes=4096)
    with refuses(Reason.NO_SNAPSHOT_LINES) as caught:
        await imported(small, pieces)
    assert caught.value.refusal.retry_after_s is None, "it never fits"
    await check_empty(small)
    own = await captured(await prefilled(small))
    with refuses(Reason.NO_SNAPSHOT_LINES):
        await exported(small, own.id)
    host = other.tiers.host
    assert host is not None
    held = [await imported(other, pieces, is_pinned=True)]
    while host.used_bytes + host.used_bytes // len(held) <= host.limit_bytes:
        held.append(await imported(other, pieces, is_pinned=True))
    with refuses(Reason.NO_SNAPSHOT_LINES) as caught:
        await imported(other, pieces)
    assert caught.value.refusal.retry_after_s is not None
    other.snapshots.release([held[0].id], ANONYMOUS)
    unpinned = await imported(other, pieces)
    await imported(other, pieces)
    assert other.snapshots.release([unpinned.id], ANONYMOUS) == [SnapshotState.EVICTED], "it made way for the other"
    assert {one.id for one in held[1:]} <= {one.id for one in other.snapshots.describe(ANONYMOUS)[0]}


async def test_no_more_are_stored_than_may_be(pair: Any) -> None:
    rig, other = pair()
    pieces = await exported(rig, (await captured(await prefilled(rig))).id)
    held = [await imported(other, pieces) for _ in range(STORED_LIMIT)]
    with refuses(Reason.NO_SNAPSHOT_LINES):
        await imported(other, pieces)
    other.snapshots.release([one.id for one in held], ANONYMOUS)
    await check_empty(other)


async def test_an_import_is_written_to_a_file_and_outlives_its_server(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, files=True)
    made = await captured(await prefilled(rig), keys=[KEY])
    came = await imported(rig, await exported(rig, made.id), is_pinned=True)
    await settled(rig)
    assert rig.tiers.host is not None and not rig.tiers.host.pinned_bytes.total(), "the file is what stays"
    await leave_host(rig, came.id)
    assert described(rig, came).tier is Tier.FILE
    await rig.close()
    rig = make_rig(tmp_path, files=True)
    await rig.states.find_stored(lambda name: 0)
    again = described(rig, came)
    assert (again.position, again.is_pinned) == (came.position, True)
    await restored(rig, again)
    await rig.close()


# -- all or nothing --------------------------------------------------------------------------------------------------


async def test_an_import_that_is_cut_short_or_cancelled_leaves_nothing(pair: Any) -> None:
    rig, other = pair()
    made = await captured(await prefilled(rig))
    whole = b"".join(await exported(rig, made.id))
    pieces = [whole[at : at + 5000] for at in range(0, len(whole), 5000)]
    with refuses(Reason.STATE_DAMAGED):
        await imported(other, pieces[:-1])
    await check_empty(other)
    with refuses(Reason.INVALID_REQUEST):
        await imported(other, [*pieces, b"more"])
    await check_empty(other)
    stalls = asyncio.Event()

    async def stalling() -> AsyncIterator[bytes]:
        for piece in pieces[:-1]:
            yield piece
        stalls.set()
        await asyncio.Event().wait()

    assert other.exchange is not None and other.tiers.host is not None
    importing = asyncio.ensure_future(imported_by(other.exchange, stalling()))
    await stalls.wait()
    assert other.tiers.host.used_bytes > 0 and other.snapshots.num_held == 0
    importing.cancel()
    with suppress(asyncio.CancelledError):
        await importing
    await check_empty(other)
    await imported(other, pieces)


async def test_nobody_sees_an_import_that_is_under_way(pair: Any) -> None:
    rig, other = pair()
    made = await captured(await prefilled(rig), keys=[KEY])
    pieces = await exported(rig, made.id)
    goes_on = asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
        await goes_on.wait()

    assert other.exchange is not None and other.tiers.host is not None
    importing = asyncio.ensure_future(imported_by(other.exchange, waiting()))
    await until(lambda: other.tiers.host is not None and other.tiers.host.used_bytes)
    keys = PrefixKeys.of([KEY], [made.position], made.position + 1)
    assert other.states.find(keys, b"", ANONYMOUS, ReusePolicy.ALWAYS).prefix is None
    assert other.snapshots.describe(ANONYMOUS)[0] == []
    goes_on.set()
    came = await importing
    assert [one.id for one in other.snapshots.describe(ANONYMOUS)[0]] == [came.id]


# -- shares ----------------------------------------------------------------------------------------------------------


async def test_an_import_counts_in_its_principal_s_quota(pair: Any) -> None:
    rig, other = pair()
    pieces = await exported(rig, (await captured(await prefilled(rig))).id)
    carol = Principal(3, "carol", quotas=Quotas(snapshots=2))
    async with AsyncExitStack() as under_way:
        goes_on = asyncio.Event()

        async def waiting() -> AsyncIterator[bytes]:
            yield pieces[0]
            await goes_on.wait()
            for piece in pieces[1:]:
                yield piece

        assert other.exchange is not None
        first = asyncio.ensure_future(imported_by(other.exchange, waiting(), carol))
        under_way.callback(first.cancel)
        await until(lambda: other.tiers.host is not None and other.tiers.host.used_bytes)
        await imported(other, pieces, carol)
        with refuses(Reason.QUOTA_EXCEEDED):
            await imported(other, pieces, carol)
        handles, epoch = other.table.open(1, 1e3, principal=carol).handles, other.table.server_epoch
        [made] = await other.states.create(epoch, handles, carol, lease_s=1e3, is_pinned=False)
        goes_on.set()
        with refuses(Reason.QUOTA_EXCEEDED):
            await first
    assert len(other.snapshots.describe(carol)[0]) == 2
    other.snapshots.release([made.id], carol)
    await imported(other, pieces, carol)
    await imported(other, pieces, BOB)


async def test_a_principal_leaves_others_as_much_host_memory_as_it_holds(pair: Any) -> None:
    rig, other = pair(host_bytes=1 << 20)
    pieces = await exported(rig, (await captured(await prefilled(rig))).id)
    host = other.tiers.host
    assert host is not None
    with refuses(Reason.NO_SNAPSHOT_LINES):
        for _ in range(100):
            await imported(other, pieces, ALICE, is_pinned=True)
    pinned = host.pinned_bytes
    assert pinned.keys() == {"alice"} and host.limit_bytes / 3 < pinned["alice"] <= host.limit_bytes / 2
    for _ in range(3):
        await imported(other, pieces, BOB, is_pinned=True)


async def test_a_principal_leaves_others_as_many_streams_as_it_has(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _ = pair()
    monkeypatch.setattr(exchange, "MOST_ON_THEIR_WAY", 4)
    given = rig.exchange
    assert given is not None
    async with AsyncExitStack() as held:
        for _ in range(2):
            held.enter_context(given.on_its_way(ALICE))
        with refuses(Reason.TOO_MANY_CALLS):
            held.enter_context(given.on_its_way(ALICE))
        for _ in range(2):
            held.enter_context(given.on_its_way(ANONYMOUS))
        with refuses(Reason.TOO_MANY_CALLS) as caught:
            held.enter_context(given.on_its_way(ANONYMOUS))
        assert caught.value.refusal.retry_after_s is not None
    with given.on_its_way(ALICE):
        pass


async def test_pinned_imports_take_no_more_of_the_device_than_pinned_captures(pair: Any) -> None:
    rig, other = pair(snapshot_lines=3)
    pieces = await exported(rig, (await captured(await prefilled(rig))).id)
    one, two = [await imported(other, pieces, ALICE, is_pinned=True) for _ in range(2)]
    async with other.states.near([one.id], ALICE):
        other.states.restore([one.id], ALICE, lease_s=None)
    with refuses(Reason.NO_SNAPSHOT_LINES):
        async with other.states.near([two.id], ALICE):
            pass
    assert other.snapshots.num_pinned == 1 and other.tiers.host is not None
    assert other.tiers.host.pinned_bytes["alice"] == other.tiers.host.size_of(two.id), "on the device it is the other"
    other.snapshots.check_integrity()


# -- values ----------------------------------------------------------------------------------------------------------


def put(part: Part, values: Any, half: int = 0) -> Callable[[Any, Bytes], object]:
    """A change of the first section of a part: its first bytes."""

    def change(sections: dict[tuple[int, int, int], Any], memory: Bytes) -> None:
        section = next(each for key, each in sections.items() if key[0] == part and key[2] == half)
        content = np.frombuffer(np.asarray(values).tobytes(), np.uint8)
        memory[section.offset : section.offset + len(content)] = content

    return change


NAN, INFINITE = np.float32(np.nan), np.float32(-np.inf)
PARTS = [Part.RECURRENT, Part.CONV_Q, Part.CONV_V, Part.KEYS, Part.VALUES]


@pytest.mark.parametrize("part", [*PARTS, Part.DRAFT_KEYS, Part.DRAFT_UPDATES, Part.DRAFT_GATES])
@pytest.mark.parametrize("value", [NAN, INFINITE])
async def test_a_value_that_is_not_finite_is_refused_by_its_section(pair: Any, part: Part, value: Any) -> None:
    rig, other = pair()
    sequence = await prefilled(rig)
    await sequence.verified(2)
    made = await captured(sequence)
    whole = b"".join(await exported(rig, made.id))
    half = int(rig.tiers.host.find(made.id).spans[0].draft_half) if part.name.startswith("DRAFT") else 0
    with refuses(Reason.NON_FINITE_INPUT) as caught:
        await imported(other, [forged(rig.tiers.layout, whole, put(part, value, half))])
    assert part.name.lower() in caught.value.refusal.message and caught.value.refusal.field == "chunk"
    await check_empty(other)
    await imported(other, [forged(rig.tiers.layout, whole, put(part, np.float32(3e38), half))])


async def test_a_refused_state_is_looked_at_no_further(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits would read a place that is another's by then."""
    monkeypatch.setattr(stream, "THREADS", 1)
    rig, other = pair()
    whole = b"".join(await exported(rig, (await captured(await prefilled(rig))).id))
    num_judged, goes_on, begun = 0, threading.Event(), threading.Semaphore(0)

    def judge(*_: object) -> None:
        nonlocal num_judged
        num_judged += 1
        if num_judged == 1:
            begun.acquire()  # all others wait behind it
            raise StateFileError(Flaw.DIGEST, "another")
        goes_on.wait()

    monkeypatch.setattr(exchange, "check_sections", judge)
    monkeypatch.setattr(stream, "PART_BYTES", 1)
    importing = asyncio.ensure_future(imported(other, [whole]))
    await until(lambda: num_judged)
    await asyncio.sleep(0.05)
    begun.release()
    with refuses(Reason.STATE_DAMAGED):
        await importing
    goes_on.set()
    await other.close()
    assert num_judged <= 2, "what a thread was at by then, and no more"
