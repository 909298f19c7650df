"""A state's memory that is filled by threads: what is judged is a copy, which was whole by then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import xxhash
from rigs.states import make_header

from deltaline_server.memory.lent import Lent
from deltaline_server.snapshots.header import Flaw, StateFileError, StoredHeader
from deltaline_server.snapshots.layout import Bytes, Part, Section, state_bytes
from deltaline_server.snapshots.stream import PART_BYTES, THREADS, Arriving, Filling, StateThreads

# Some large, some small, none of whole parts.
SHAPES = ((3, 70_001, 5), (1, 3, 7), (2, 90_000, 4), (1, 1, 1), (1, 1, 300_000), (2, 2, 2))


def sections() -> tuple[Section, ...]:
    """Sections of these shapes, one behind the other."""
    found = list[Section]()
    for number, shape in enumerate(SHAPES):
        found.append(Section(Part.KEYS, number, 0, found[-1].end if found else 0, shape, 4))
    return tuple(found)


SECTIONS = sections()
STORED = StoredHeader(make_header(), SECTIONS, (b"",) * len(SECTIONS), 0)


@pytest.fixture
def threads() -> Iterator[StateThreads]:
    made = StateThreads()
    yield made
    made.close()


@pytest.fixture
def busy(threads: StateThreads) -> Iterator[Callable[[], None]]:
    """Every thread waits, and what else is begun waits behind, until this is called, or for some seconds."""
    goes_on = threading.Event()
    for _ in range(THREADS):
        threads.begin(partial(goes_on.wait, 5.0))
    yield goes_on.set
    goes_on.set()


def nothing(some: Sequence[Section]) -> None:
    """Judges nothing."""


def content(seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, state_bytes(SECTIONS), dtype=np.uint8)


@pytest.mark.parametrize("is_lent", [False, True])
@pytest.mark.parametrize("piece_bytes", [100_000, 300_001, PART_BYTES, 5_000_000])
async def test_each_section_is_judged_once_as_a_copy_of_what_came(
    threads: StateThreads, is_lent: bool, piece_bytes: int
) -> None:
    """Whoever has lent a piece may write to it once it is given back."""
    whole, memory = content(piece_bytes), np.full(state_bytes(SECTIONS), 255, dtype=np.uint8)
    judged, lent = list[Section](), list[int]()

    def give_back(at: int, piece: Bytes) -> None:
        piece[:] = 0
        lent.remove(at)

    def judge(some: Sequence[Section]) -> None:
        for one in some:
            np.testing.assert_array_equal(memory[one.offset : one.end], whole[one.offset : one.end])
        judged.extend(some)

    async def pieces() -> Any:
        for at in range(0, len(whole), piece_bytes):
            piece = whole[at : at + piece_bytes].copy()
            lent.append(at)
            yield Lent(piece.data, partial(give_back, at, piece)) if is_lent else piece.tobytes()

    filling = Filling(threads, STORED, memory, judge)
    await Arriving(pieces()).read_state(filling, is_last=True)
    await filling.judged()
    np.testing.assert_array_equal(memory, whole)
    assert sorted(judged, key=lambda one: one.offset) == list(SECTIONS)
    assert not lent or not is_lent


async def test_what_judges_refuse_is_told_of_the_first_section(threads: StateThreads) -> None:
    def judge(some: Sequence[Section]) -> None:
        for one in some:
            if one.number >= 2:
                raise StateFileError(Flaw.DIGEST, str(one.number))

    async with Filling(threads, STORED, np.zeros(state_bytes(SECTIONS), dtype=np.uint8), judge) as filling:
        await filling.add(memoryview(content(1).tobytes()))
        await filling.filled()
        with pytest.raises(StateFileError, match="2"):
            await filling.judged()


async def test_judges_are_asked_of_sections_alone(threads: StateThreads) -> None:
    """Also where the last one was there, and large enough, before all was asked for."""
    stored, asked = replace(STORED, sections=SECTIONS[:1]), list[Sequence[Section]]()
    memory = np.zeros(state_bytes(stored.sections), dtype=np.uint8)
    async with Filling(threads, stored, memory, asked.append) as filling:
        await filling.add(memoryview(bytearray(len(memory))))
        await filling.filled()
        await filling.judged()
    assert asked == [SECTIONS[:1]]


async def begun(piece: bytes, is_asked_on: asyncio.Event) -> AsyncIterator[bytes]:
    """A piece, and nothing behind it for ever."""
    yield piece
    is_asked_on.set()
    await asyncio.Event().wait()


async def test_a_call_that_was_cancelled_ends_behind_what_is_copied(
    threads: StateThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is another's then."""
    copies, goes_on, copyto = threading.Event(), threading.Event(), np.copyto

    def copy(target: Bytes, source: Bytes) -> None:
        copies.set()
        goes_on.wait()
        copyto(target, source)

    monkeypatch.setattr(np, "copyto", copy)
    memory, is_asked_on = np.zeros(state_bytes(SECTIONS), dtype=np.uint8), asyncio.Event()
    arriving = Arriving(begun(content(2)[: 2 * PART_BYTES].tobytes(), is_asked_on))
    reading = asyncio.create_task(arriving.read_state(Filling(threads, STORED, memory, nothing), is_last=True))
    try:
        await asyncio.to_thread(copies.wait)
        await is_asked_on.wait()
        reading.cancel()
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert not reading.done()
    finally:
        goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    before = memory.copy()
    threads.close()
    np.testing.assert_array_equal(memory, before)


async def test_what_waits_to_be_copied_is_not_behind_a_call_that_was_cancelled(
    threads: StateThreads, busy: Callable[[], None]
) -> None:
    memory, is_asked_on = np.zeros(state_bytes(SECTIONS), dtype=np.uint8), asyncio.Event()
    arriving = Arriving(begun(content(2)[: 2 * PART_BYTES].tobytes(), is_asked_on))
    reading = asyncio.create_task(arriving.read_state(Filling(threads, STORED, memory, nothing), is_last=True))
    await is_asked_on.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    busy()
    threads.close()
    assert not memory.any()


async def test_what_waits_to_be_judged_is_not_behind_a_state_that_failed(
    threads: StateThreads, busy: Callable[[], None]
) -> None:
    memory, judged = np.zeros(state_bytes(SECTIONS), dtype=np.uint8), list[Sequence[Section]]()

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(len(memory) // 100_000):
            yield bytes(100_000)

    with pytest.raises(StateFileError, match="more at least"):
        await Arriving(pieces()).read_state(Filling(threads, STORED, memory, judged.append), is_last=True)
    busy()
    threads.close()
    assert not judged


async def test_what_waits_for_its_digest_has_none_behind_a_call_that_was_cancelled(
    threads: StateThreads, busy: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    digested = list[Any]()
    monkeypatch.setattr(xxhash, "xxh3_128_digest", digested.append)
    digests = asyncio.create_task(threads.digests(SECTIONS, content(3)))
    await asyncio.sleep(0)
    digests.cancel()
    with pytest.raises(asyncio.CancelledError):
        await digests
    busy()
    threads.close()
    assert not digested
