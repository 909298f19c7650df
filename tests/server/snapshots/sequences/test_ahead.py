"""Pages that go ahead of a sequence that is stepped meanwhile: the same bits, one slot, or nothing at all."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from rigs.exchanged_states import exported, forged
from rigs.exchanged_states import imported as imported_snapshot
from rigs.scheduler_rig import refuses
from rigs.small_models import HYBRID
from rigs.state_rig import PAGE_SIZE, StateRig
from rigs.stored_states import DECODE, HOST_BYTES, PAGED, PREFILL, VERIFY, ignored
from rigs.until import until
from rigs.whole_sequences import Traveller, check_idle, imported, imported_by, opened

from deltaline_server.errors import Reason
from deltaline_server.principal import ANONYMOUS, Principal
from deltaline_server.snapshots.header import PREAMBLE, Flaw, StateFileError, StateHeader
from deltaline_server.snapshots.layout import SpanProgress
from deltaline_server.snapshots.sequences import passage
from deltaline_server.snapshots.sequences.coming import Coming

DAMAGED, MISMATCH, INVALID = Reason.STATE_DAMAGED, Reason.STATE_MISMATCH, Reason.INVALID_REQUEST
TOKENS = 5 * PAGE_SIZE + 5


async def prefilled(rig: StateRig, count: int = TOKENS) -> Traveller:
    one = opened(rig)
    for span in range(len(one.cells)):
        await one.step(span, PREFILL, count)
    return one


def num_settled(one: Traveller) -> int:
    return one.rig.passage.num_settled(one.rig.table.server_epoch, one.handles, one.owner)


@pytest.mark.parametrize("name", PAGED)
async def test_what_comes_behind_its_pages_goes_on_bit_by_bit(pair: Any, name: str) -> None:
    rig, to = pair(name)
    one = await prefilled(rig, 3 * PAGE_SIZE + 5)
    spans = range(len(one.cells))
    files = [await one.pages(0, 2 * PAGE_SIZE)]
    for span in spans:
        await one.step(span, PREFILL, 2 * PAGE_SIZE)
    files.append(await one.pages(2 * PAGE_SIZE, 5 * PAGE_SIZE))
    await one.step(0, DECODE, 1)
    await one.step(spans[-1], VERIFY, 3)
    whole, rest = await one.exported(), await one.exported(5 * PAGE_SIZE)
    assert len(rest) < len(whole) - 5 * PAGE_SIZE * 64
    other = one.at(to, await imported(to, [*files, rest]))
    assert to.table.num_open == 1
    for span in spans:
        results = [await each.again(span) for each in (one, other)]
        assert results[0].hidden.tobytes() == results[1].hidden.tobytes() != b""
        steps = (DECODE, 1, 2 if span == spans[-1] else -1), (PREFILL, PAGE_SIZE + 3, -1), (VERIFY, 3, -1)
        for step in steps:
            np.testing.assert_array_equal(await other.step(span, *step), await one.step(span, *step))
    check_idle(rig, to)


def make_paged(folder: Path) -> StateRig:
    """A rig whose two spans both have pages."""
    folder.mkdir()
    config = HYBRID | {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]}
    sizes: dict[str, Any] = {"slots": 6, "snapshot_lines": 2, "pages": 60, "references": 1, "host_bytes": HOST_BYTES}
    return StateRig(config, folder, ignored, spans=[range(1), range(1, 3)], **sizes)


async def test_what_a_step_may_still_write_is_not_settled(tmp_path: Path) -> None:
    rig = make_paged(tmp_path / "rig")
    one = opened(rig)
    assert num_settled(one) == 0
    await one.step(1, PREFILL, 40)
    assert num_settled(one) == 0, "the other span has written nothing"
    await one.step(0, PREFILL, 18)
    await one.step(0, VERIFY, 4)
    assert num_settled(one) == 18, "drafts may be taken back"
    rig.scheduler.settle()
    one.commit(0, 3)
    assert num_settled(one) == 21
    rig.engine.eager = False
    begun = one.begin(0, PREFILL, 30)
    await asyncio.sleep(0.01)
    assert num_settled(one) == 21, "it is in flight"
    rig.engine.run()
    await begun
    rig.scheduler.settle()
    assert num_settled(one) == 40


async def test_spans_that_are_uneven_go_on_behind_the_pages_that_both_have(tmp_path: Path) -> None:
    rig, to = (make_paged(tmp_path / name) for name in ("from", "to"))
    one = opened(rig)
    await one.step(0, PREFILL, 40)
    await one.step(1, PREFILL, 90)
    other = one.at(to, await imported(to, [await one.pages(0, 32), await one.exported(32)]))
    for span in (0, 1):
        for step in ((DECODE, 1), (PREFILL, 37)):
            np.testing.assert_array_equal(await other.step(span, *step), await one.step(span, *step))
    check_idle(rig, to)


async def test_without_pages_nothing_is_settled(pair: Any) -> None:
    rig, _ = pair("mamba2")
    assert num_settled(await prefilled(rig)) == 0


class Files:
    """What comes of a sequence: two files of pages, and the rest."""

    def __init__(self, rig: StateRig, pages: tuple[bytes, bytes], rest: bytes, whole: bytes) -> None:
        self.layout, self.pages, self.rest, self.whole = rig.tiers.layout, pages, rest, whole

    @classmethod
    async def of(cls, rig: StateRig, owner: Principal = ANONYMOUS) -> Files:
        one = opened(rig, owner)
        await one.step(0, PREFILL, TOKENS)
        begin, between, end = 0, 2 * PAGE_SIZE, 5 * PAGE_SIZE
        pages = await one.pages(begin, between), await one.pages(between, end)
        return cls(rig, pages, await one.exported(end), await one.exported())

    def forged(self, content: bytes, **changes: Any) -> bytes:
        """A file with another header, and a digest that fits."""
        return forged(self.layout.pages if content in self.pages else self.layout, content, lambda *_: None, **changes)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def flagged(content: bytes, flags: int) -> bytes:
    """A file that says to be of another kind, with a digest of its header that fits."""
    length, at = int.from_bytes(content[12:16], "little"), PREAMBLE.size + 32 + 16 + 32 + 8
    content = content[:24] + bytes(16) + content[40:at] + flags.to_bytes(4, "little") + content[at + 4 :]
    return content[:24] + xxhash.xxh3_128_digest(content[:length]) + content[40:]


def not_finite(files: Files) -> list[bytes]:
    def change(sections: Any, memory: Any) -> None:
        memory[:8] = 0xFF

    return [files.pages[0], forged(files.layout.pages, files.pages[1], change), files.rest]


OTHER = {"adapter": "other", "adapter_hash": bytes(range(32))}
BAD: dict[str, tuple[Callable[[Files], list[bytes]], Reason]] = {
    "out of order": (lambda f: [f.pages[1], f.pages[0], f.rest], INVALID),
    "twice": (lambda f: [f.pages[0], f.pages[0], f.pages[1], f.rest], INVALID),
    "one is missing": (lambda f: [f.pages[0], f.rest], INVALID),
    "the rest alone": (lambda f: [f.rest], INVALID),
    "a whole sequence behind pages": (lambda f: [*f.pages, f.whole], INVALID),
    "no rest": (lambda f: [*f.pages], DAMAGED),
    "cut in the second": (lambda f: [f.pages[0], f.pages[1][:-1]], DAMAGED),
    "cut in the rest": (lambda f: [*f.pages, f.rest[:-1]], DAMAGED),
    "more behind the rest": (lambda f: [*f.pages, f.rest, b"x"], INVALID),
    "a bit of the first header": (lambda f: [flipped(f.pages[0], 100)], DAMAGED),
    "a bit of a page": (lambda f: [f.pages[0], flipped(f.pages[1], -9), f.rest], DAMAGED),
    "a bit of the rest": (lambda f: [*f.pages, flipped(f.rest, -9)], DAMAGED),
    "a value that is not finite": (not_finite, Reason.NON_FINITE_INPUT),
    "another owner's": (lambda f: [*f.pages, f.forged(f.rest, owner="dora")], INVALID),
    "another adapter's": (lambda f: [f.pages[0], f.forged(f.pages[1], **OTHER)], INVALID),
    "a snapshot behind pages": (lambda f: [*f.pages, flagged(f.rest, 0)], DAMAGED),
    "pages of a snapshot": (lambda f: [flagged(f.pages[0], 4)], DAMAGED),
    "of another model": (lambda f: [f.forged(f.pages[0], fingerprint=bytes(32))], MISMATCH),
}


@pytest.mark.parametrize(("make", "reason"), BAD.values(), ids=BAD)
async def test_a_damaged_stream_leaves_nothing(pair: Any, make: Callable[[Files], list[bytes]], reason: Reason) -> None:
    rig, to = pair()
    files = await Files.of(rig)
    with refuses(reason) as caught:
        await imported(to, make(files))
    assert ": expected " in caught.value.refusal.message, caught.value.refusal.message
    await until(lambda: not to.table.num_open)  # pages that came before may be written yet
    assert to.pages is not None and to.pages.num_used == 0
    check_idle(to)
    await imported(to, [*files.pages, files.rest])


async def test_pages_that_are_not_whole_here_are_refused(pair: Any) -> None:
    """A server of smaller pages might send them, if it did not ask."""
    rig, to = pair()
    one = await prefilled(rig)
    content = await one.pages(0, 2 * PAGE_SIZE)
    assert to.pages is not None
    to.pages.page_size *= 4
    with refuses(MISMATCH):
        await imported(to, [content])
    assert to.table.num_open == 0
    check_idle(to)


async def test_pages_that_have_no_room_leave_nothing(pair: Any) -> None:
    rig, to = pair(pages=8)
    files = await Files.of(rig)
    other = opened(to)
    await other.step(0, PREFILL, 3 * PAGE_SIZE)
    with refuses(Reason.PAGES_EXHAUSTED):
        await imported(to, [*files.pages, files.rest])
    assert to.table.num_open == 1 and to.pages is not None and to.pages.num_used == 3
    check_idle(to)


async def held(pieces: list[bytes], go: asyncio.Event) -> AsyncIterator[bytes]:
    """Pieces, the last of which waits."""
    for piece in pieces[:-1]:
        yield piece
    await go.wait()
    yield pieces[-1]


async def test_nobody_ends_it_nor_moves_it_on_before_it_is_there(pair: Any) -> None:
    """Neither the reaper, nor a drain, which refuses the rest."""
    rig, to = pair()
    files, go = await Files.of(rig), asyncio.Event()
    importing = asyncio.ensure_future(imported_by(to, held([*files.pages, files.rest], go)))
    await until(lambda: to.table.num_open)
    to.now += 1e4
    assert to.table.reap() == 0 and to.table.open_by_principal() == []
    to.table.is_draining = True
    go.set()
    with refuses(Reason.DRAINING):
        await importing
    assert to.table.num_open == 0
    check_idle(to)


async def test_a_call_that_ends_while_pages_are_written_leaves_nothing_once_they_are(pair: Any) -> None:
    """What is written then must be nobody else's."""
    rig, to = pair()
    files = await Files.of(rig)
    to.engine.eager = False
    importing = asyncio.ensure_future(imported(to, [*files.pages, files.rest]))
    await until(lambda: to.table.num_open and to.engine.num_tasks)
    importing.cancel()
    with suppress(asyncio.CancelledError):
        await importing
    assert to.table.num_open == 1
    to.engine.run()
    await until(lambda: not to.table.num_open)
    to.engine.eager = True
    assert to.pages is not None and to.pages.num_used == 0
    check_idle(to)


async def test_pages_that_fail_behind_a_call_that_ended_are_nobody_s_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[int] = []

    async def fail(*_: object) -> None:
        raise ValueError

    wholes: Any = SimpleNamespace(
        make_room=lambda *_: 7, paged_spans=frozenset((0,)), end=ended.append, land_pages=fail
    )
    coming = Coming(wholes, ANONYMOUS)
    spans = (SpanProgress(position=PAGE_SIZE),)
    coming.expect(StateHeader(bytes(16), bytes(32), "anonymous", spans, is_sequence=True, is_pages=True))

    async def judged() -> None: ...

    @asynccontextmanager
    async def arrived() -> AsyncIterator[Any]:
        yield SimpleNamespace(id=b""), judged

    await coming.land(arrived)
    await asyncio.sleep(0)
    coming.__exit__()
    del coming
    gc.collect()
    assert ended == [7] and "never retrieved" not in caplog.text


async def test_pages_are_judged_while_the_next_come_and_written_only_where_they_are_sound() -> None:
    landed, goes_on = list[bytes](), asyncio.Event()

    async def land(_: int, header: Any) -> None:
        landed.append(header.id)

    wholes: Any = SimpleNamespace(
        make_room=lambda *_: 7, paged_spans=frozenset((0,)), end=lambda _: None, land_pages=land
    )
    coming = Coming(wholes, ANONYMOUS)
    spans = (SpanProgress(position=PAGE_SIZE),)
    coming.expect(StateHeader(bytes(16), bytes(32), "anonymous", spans, is_sequence=True, is_pages=True))

    async def judged() -> None:
        await goes_on.wait()

    async def refused() -> None:
        raise StateFileError(Flaw.DIGEST, "another")

    @asynccontextmanager
    async def arrived(id: bytes, judged: Any) -> AsyncIterator[Any]:
        came.append(id)
        yield SimpleNamespace(id=id), judged

    came = list[bytes]()
    await coming.land(lambda: arrived(b"1", judged))
    second = asyncio.create_task(coming.land(lambda: arrived(b"2", refused)))
    await asyncio.sleep(0)
    assert came == [b"1", b"2"] and not landed
    goes_on.set()
    await second
    with pytest.raises(StateFileError, match="another"):
        await coming.landed()
    assert landed == [b"1"]


async def test_pages_count_in_their_principal_s_share_until_they_are_written(pair: Any) -> None:
    """Of 64 KiB: pages of 8 KiB and then 12, which come meanwhile; a snapshot of 27 is too much beside them."""
    rig, to = pair(host_bytes=1 << 16)
    alice, bob, host, go = Principal(1, "alice"), Principal(2, "bob"), to.tiers.host, asyncio.Event()
    one = await prefilled(rig)
    pages = [await one.pages(0, 2 * PAGE_SIZE), await one.pages(2 * PAGE_SIZE, 5 * PAGE_SIZE)]
    [made] = await rig.states.create(rig.table.server_epoch, one.handles, ANONYMOUS, lease_s=1e3, is_pinned=False)
    snapshot = await exported(rig, made.id)
    to.engine.eager = False
    importing = asyncio.ensure_future(imported_by(to, held(pages, go), alice))
    await until(lambda: to.engine.num_tasks)
    with refuses(Reason.NO_SNAPSHOT_LINES):
        await imported_snapshot(to, snapshot, alice)
    to.snapshots.release([(await imported_snapshot(to, snapshot, bob)).id], bob)
    before = host.used_bytes
    go.set()
    await until(lambda: host.used_bytes > before)
    assert to.engine.num_tasks == 1, "those before are not written yet"
    to.engine.run()
    to.engine.eager = True
    with refuses(DAMAGED):  # there is no rest
        await importing
    await until(lambda: not host.used_bytes)
    await imported_snapshot(to, snapshot, alice)


async def test_a_rest_whose_pages_are_gone_opens_nothing(pair: Any) -> None:
    """The call by which they came may end before its work begins."""
    rig, to = pair()
    files = await Files.of(rig)

    class Gone(Coming):
        async def open(self, *asked: Any) -> Any:
            self.__exit__()
            return await super().open(*asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passage, "Coming", Gone)
        with refuses(INVALID):
            await imported(to, [*files.pages, files.rest])
    assert to.table.num_open == 0
    check_idle(to)


async def test_pages_of_what_is_closed_meanwhile_are_not_sent(pair: Any) -> None:
    """What was copied may be of whoever has them by then."""
    rig, _ = pair()
    one = await prefilled(rig)
    rig.engine.eager = False
    copying = asyncio.ensure_future(one.pages(0, 2 * PAGE_SIZE))
    await until(lambda: rig.tiers.host is not None and rig.tiers.host.used_bytes)
    rig.table.close(rig.table.server_epoch, one.handles)
    rig.engine.run()
    with refuses(Reason.SEQUENCE_CLOSED):
        await copying
    rig.engine.eager = True
    check_idle(rig)


async def test_a_copy_of_pages_that_is_cancelled_keeps_its_place_to_the_end(pair: Any) -> None:
    rig, _ = pair()
    one = await prefilled(rig)
    assert rig.tiers.host is not None
    rig.engine.eager = False
    copying = asyncio.ensure_future(one.pages(0, 2 * PAGE_SIZE))
    await until(lambda: rig.tiers.host is not None and rig.tiers.host.used_bytes)
    copying.cancel()
    with suppress(asyncio.CancelledError):
        await copying
    assert rig.tiers.host.used_bytes, "the device writes to it"
    rig.engine.run()
    await until(lambda: rig.tiers.host is not None and not rig.tiers.host.used_bytes)
    rig.engine.eager = True
    check_idle(rig)
