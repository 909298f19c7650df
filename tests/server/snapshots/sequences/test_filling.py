"""A state's memory that is filled by threads: what is judged is a copy, which was whole by then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from rigs.states import make_header

from deltaline_server.snapshots.header import Flaw, StateFileError, StoredHeader
from deltaline_server.snapshots.layout import Bytes, Part, Section, state_bytes
from deltaline_server.snapshots.stream import PART_BYTES, Arriving, Filling, StateThreads

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


def content(seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, state_bytes(SECTIONS), dtype=np.uint8)


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("piece_bytes", [100_000, 300_001, PART_BYTES, 5_000_000])
async def test_each_section_is_judged_once_as_a_copy_of_what_came(
    threads: StateThreads, kind: Any, piece_bytes: int
) -> None:
    """Whoever has sent a piece may write to it when the next is asked for."""
    whole, memory = content(piece_bytes), np.full(state_bytes(SECTIONS), 255, dtype=np.uint8)
    judged = list[Section]()

    def judge(some: Sequence[Section]) -> None:
        for one in some:
            np.testing.assert_array_equal(memory[one.offset : one.end], whole[one.offset : one.end])
        judged.extend(some)

    async def pieces() -> Any:
        for at in range(0, len(whole), piece_bytes):
            piece = kind(whole[at : at + piece_bytes].tobytes())
            yield piece
            if isinstance(piece, bytearray):
                piece[:] = bytes(len(piece))

    await Arriving(pieces()).read_state(Filling(threads, STORED, memory, judge), is_last=True)
    np.testing.assert_array_equal(memory, whole)
    assert sorted(judged, key=lambda one: one.offset) == list(SECTIONS)


async def test_what_judges_refuse_is_told_of_the_first_section(threads: StateThreads) -> None:
    def judge(some: Sequence[Section]) -> None:
        for one in some:
            if one.number >= 2:
                raise StateFileError(Flaw.DIGEST, str(one.number))

    async with Filling(threads, STORED, np.zeros(state_bytes(SECTIONS), dtype=np.uint8), judge) as filling:
        await filling.add(memoryview(content(1).tobytes()))
        with pytest.raises(StateFileError, match="2"):
            await filling.judged()


async def test_nothing_is_written_behind_a_call_that_was_cancelled(threads: StateThreads) -> None:
    """Its memory is another's then."""
    begins, goes_on = threading.Event(), threading.Event()
    memory = np.zeros(state_bytes(SECTIONS), dtype=np.uint8)

    def wait() -> None:
        begins.set()
        goes_on.wait()

    async def fill() -> None:
        async with Filling(threads, STORED, memory, lambda some: None) as filling:
            await filling.add(memoryview(bytearray(content(2))))

    waiting = [threads.begin(wait) for _ in range(64)]  # every thread has one, and what is copied waits
    await asyncio.to_thread(begins.wait)
    filling = asyncio.create_task(fill())
    await asyncio.sleep(0)
    filling.cancel()
    await asyncio.sleep(0)
    goes_on.set()
    with suppress(asyncio.CancelledError):
        await filling
    before = memory.copy()
    for one in waiting:
        await asyncio.wrap_future(one)
    await asyncio.sleep(0.05)
    np.testing.assert_array_equal(memory, before)
