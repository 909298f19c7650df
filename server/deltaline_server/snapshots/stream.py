"""A state's file as a stream: what is sent is what a file would have; what comes is judged before it is believed.

Knows bytes and what they have to be, not where they come from or go to.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import xxhash

from deltaline_server.errors import Reason, RequestError
from deltaline_server.finite import all_finite
from deltaline_server.memory.lent import Lent
from deltaline_server.snapshots.header import (
    FINGERPRINT_BYTES,
    MAX_ADAPTER_NAME_BYTES,
    MAX_TEXT_BYTES,
    PREAMBLE,
    Flaw,
    StateFileError,
    StateHeader,
    StoredHeader,
    decode,
    encode,
    header_length,
)
from deltaline_server.snapshots.layout import Bytes, Part, Section, SpanProgress, StateLayout, state_bytes
from deltaline_server.snapshots.sequences.rules import check_progress
from deltaline_server.tables.captured.snapshots import ID_BYTES
from deltaline_server.tables.prefixes.keys import MAX_KEY_BYTES

PIECE_BYTES = 1 << 20
# Threads at most, and bytes that one looks at, at least: of fewer it would mostly wait for the interpreter's lock.
THREADS, PART_BYTES = 8, 1 << 20
# From this size on a piece is copied by a thread.
LARGE_PIECE_BYTES = 256 << 10
# Of what is no state, or damaged. What no server of ours would write is the sender's mistake.
_REASONS = {
    Flaw.TRUNCATED: Reason.STATE_DAMAGED,
    Flaw.HEADER: Reason.STATE_DAMAGED,
    Flaw.DIGEST: Reason.STATE_DAMAGED,
    Flaw.VERSION: Reason.STATE_MISMATCH,
    Flaw.FINGERPRINT: Reason.STATE_MISMATCH,
    Flaw.ROOM: Reason.STATE_MISMATCH,
}

Piece = bytes | memoryview | Lent
GiveBack = Callable[[], None]
Result = TypeVar("Result")

ValueTypes = Mapping[Part, np.dtype[Any]]
"""The types of the parts that hold floating-point values."""

Judge = Callable[[Sequence[Section]], None]
"""Judges every byte of some sections."""


class StateThreads:
    """Threads that look at every byte of the states that come and go. `close` ends them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="states")

    def begin(self, work: Callable[[], Result]) -> Future[Result]:
        """Let a thread do some work, behind what was begun before."""
        return self._pool.submit(work)

    async def digests(self, sections: Sequence[Section], memory: Bytes) -> list[bytes]:
        """The digests of a state's sections, by all threads. memory: uint8 [state_bytes(sections)]; where this is
        cancelled, threads that are at it may read it still."""
        part_bytes = max(PART_BYTES, state_bytes(sections) // THREADS)
        parts = [list(some) for _, some in groupby(sections, lambda section: section.offset // part_bytes)]
        begun = [self.begin(partial(_digests, some, memory)) for some in parts]
        try:
            return [digest for one in begun for digest in await asyncio.wrap_future(one)]
        finally:
            for one in begun:
                one.cancel()

    def close(self) -> None:
        """Finish what was begun and end the threads."""
        self._pool.shutdown()


def pieces_of(
    header: StateHeader,
    sections: Sequence[Section],
    digests: Sequence[bytes],
    memory: Bytes,
    piece_bytes: int = PIECE_BYTES,
) -> Iterator[memoryview]:
    """A state's file, so many bytes at a time, views. memory: uint8 [state_bytes(sections)], that must not change until
    the last piece was used."""
    for content in (memoryview(encode(header, sections, digests)), memory.data):
        for at in range(0, len(content), piece_bytes):
            yield content[at : at + piece_bytes]


class Arriving:
    """A state's file that comes in pieces, cut anywhere, none of them empty; ahead of a sequence's those of pages."""

    def __init__(self, pieces: AsyncIterator[Piece]) -> None:
        """pieces: what is lent goes back once it was copied; others do not change."""
        self._pieces, self._piece = pieces, memoryview(b"")
        self._give_back: GiveBack | None = None

    async def read_header(self, layout: StateLayout, fingerprint: bytes) -> tuple[StoredHeader, bytes]:
        """Take and judge the header, the next one behind pages; return it with its own digest. No more is held of it
        than one of this layout can have. Raises StateFileError; what the pieces raise."""
        raw = bytearray(PREAMBLE.size)
        await self._fill(memoryview(raw))
        length, most = header_length(bytes(raw), None), _most_header_bytes(layout)
        if length > most:
            of = bytearray(FINGERPRINT_BYTES)
            await self._fill(memoryview(of))
            if of != fingerprint:
                raise StateFileError(Flaw.FINGERPRINT, "expected a state of this model and settings, got another")
            raise StateFileError(Flaw.LENGTH, f"expected a header of at most {most} bytes, got {length}")
        raw += bytes(length - len(raw))
        await self._fill(memoryview(raw)[PREAMBLE.size :])
        stored = decode(bytes(raw), layout, fingerprint)
        if not stored.header.is_sequence:
            _check_captured(stored.header.spans)
        elif not stored.header.is_pages:
            check_progress(stored.header.spans, layout.max_draft)
        return stored, PREAMBLE.unpack_from(raw)[-1]

    async def read_state(self, filling: Filling, *, is_last: bool) -> None:
        """Take what is behind the header, until a state's memory has all of it; is_last: whether nothing may come
        behind it. Raises as `read_header`."""
        async with filling:
            while filling.num_left:
                await filling.add(*await self._part(filling.num_left))
            if is_last and (bool(self._piece) or bool(await anext(self._pieces, b""))):
                raise StateFileError(Flaw.LENGTH, "expected nothing behind the last section, got more")
            await filling.filled()

    async def _fill(self, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            part, give_back = await self._part(len(memory) - done)
            memory[done : done + len(part)] = part
            done += len(part)
            if give_back is not None:
                give_back()

    async def _part(self, num_bytes: int) -> tuple[memoryview, GiveBack | None]:
        """What comes next, so many bytes at most, and what to call once it was copied. Raises StateFileError where
        nothing does; what the pieces raise."""
        if not self._piece:
            piece = await anext(self._pieces, b"")
            content, self._give_back = piece if isinstance(piece, Lent) else (piece, None)
            self._piece = memoryview(content)
            if not self._piece:
                raise StateFileError(Flaw.TRUNCATED, f"expected {num_bytes} bytes more at least")
        part, self._piece = self._piece[:num_bytes], self._piece[num_bytes:]
        return part, None if self._piece else self._give_back


class _Copying(NamedTuple):
    """A part that is copied: where it ends, the copy, and what to call then."""

    end: int
    copied: Future[None]
    give_back: GiveBack | None


class Filling:
    """A state's memory, which is filled from its beginning; each section is judged while those behind it come.

    Nothing is written any more behind the context, in which it is filled. Where that fails, and behind `end`, judges
    that waited do not begin; one that was at it may read the memory still, and nobody hears of what it finds.
    """

    def __init__(self, threads: StateThreads, stored: StoredHeader, memory: Bytes, judge: Judge) -> None:
        """memory: uint8 [state_bytes(stored.sections)]. judge: called by threads, with some sections each time."""
        self._threads, self._sections, self._memory, self._judge = threads, stored.sections, memory, judge
        self._num_bytes = self._num_there = self._num_begun = 0
        self._copying, self._judging = deque[_Copying](), list[Future[None]]()
        self._copied = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            return
        self.end()
        copies = [one.copied for one in self._copying]
        self._copying.clear()
        for copy in copies:
            copy.cancel()
        while any(not copy.done() for copy in copies):
            with suppress(asyncio.CancelledError):  # it is told already
                await asyncio.wait([asyncio.wrap_future(copy) for copy in copies])

    def end(self) -> None:
        """Let judges that wait not begin. Idempotent."""
        for one in self._judging:
            one.cancel()

    @property
    def num_left(self) -> int:
        """Bytes that are yet to come."""
        return len(self._memory) - self._num_bytes

    async def add(self, part: memoryview, give_back: GiveBack | None = None) -> None:
        """Copy bytes behind those that came; they are read afterwards too. give_back: what was lent, once it was
        copied: of such all may be copied at a time, of others one beside the last."""
        begin, self._num_bytes = self._num_bytes, self._num_bytes + len(part)
        copy = partial(np.copyto, self._memory[begin : self._num_bytes], np.frombuffer(part, np.uint8))
        if len(part) < LARGE_PIECE_BYTES:
            copied = Future[None]()
            copy()
            copied.set_result(None)
            self._copying.append(_Copying(self._num_bytes, copied, give_back))
            self._advance()
            return
        # By one thread: each that is woken waits for the interpreter's lock, and others for it.
        loop, copied = asyncio.get_running_loop(), self._threads.begin(copy)
        self._copying.append(_Copying(self._num_bytes, copied, give_back))
        copied.add_done_callback(lambda _: loop.call_soon_threadsafe(self._advance))
        if give_back is None:
            await self._until_copying(1)

    async def filled(self) -> None:
        """Wait until all that came is copied, and let what is left be judged."""
        await self._until_copying(0)
        if self._num_begun < self._num_there:
            self._begin()

    async def judged(self) -> None:
        """Wait until what was filled is judged. Raises what the judges raise of the first section that they refuse."""
        for one in self._judging:
            await asyncio.wrap_future(one)

    async def _until_copying(self, count: int) -> None:
        """Wait until no more than so many parts are copied."""
        while len(self._copying) > count:
            self._copied.clear()
            await self._copied.wait()

    def _advance(self) -> None:
        """Give back what was copied, in its order, and let sections that are there be judged."""
        while self._copying and self._copying[0].copied.done():
            end, _, give_back = self._copying.popleft()
            if give_back is not None:
                give_back()
            while self._num_there < len(self._sections) and self._sections[self._num_there].end <= end:
                self._num_there += 1
                if self._sections[self._num_there - 1].end - self._sections[self._num_begun].offset >= PART_BYTES:
                    self._begin()
            self._copied.set()

    def _begin(self) -> None:
        """Let the sections that are there be judged."""
        some = self._sections[self._num_begun : self._num_there]
        self._judging.append(self._threads.begin(partial(self._judge, some)))
        self._num_begun = self._num_there


def check_sections(
    stored: StoredHeader, memory: Bytes, layout: StateLayout, types: ValueTypes, sections: Sequence[Section]
) -> None:
    """Judge every byte of some sections of a state that came.

    Raises StateFileError: a digest is another, or what lies between the sections or in fixed commits can't be.
    RequestError NON_FINITE_INPUT.
    """
    digests = dict(zip(stored.sections, stored.digests, strict=True))
    for section in sections:
        _check_section(section, digests[section], memory, types)
        if section.part is Part.COMMITS:
            position = max(span.position for span in stored.header.spans)
            _check_commits(section.view(memory).view(np.int64), position, layout.max_draft)


def _check_section(section: Section, digest: bytes, memory: Bytes, types: ValueTypes) -> None:
    """Judge every byte of a section. Raises as `check_sections`."""
    name, end = f"{section.part.name.lower()} of {section.number}", section.offset + section.num_bytes
    if _digest(section, memory) != digest:
        message = f"{name}: expected another digest of its {section.end - section.offset} bytes"
        raise StateFileError(Flaw.DIGEST, message)
    if memory[end : section.end].any():
        raise StateFileError(Flaw.SECTIONS, f"{name}: expected zeros behind it")
    values = memory[section.offset : end]
    if section.part in types and not all_finite(values.view(types[section.part])):
        message = f"{name}: expected finite values, got some that are not"
        raise RequestError(Reason.NON_FINITE_INPUT, message, field="chunk")


def refused(error: StateFileError) -> RequestError:
    """The refusal that the sender of a wrong state gets."""
    reason = _REASONS.get(error.flaw, Reason.INVALID_REQUEST)
    return RequestError(reason, f"chunk: {error}", field="chunk", metadata={"flaw": error.flaw.value})


def _check_captured(spans: Sequence[SpanProgress]) -> None:
    """Raise StateFileError unless these are the spans of a snapshot: at one position, with nothing pending."""
    for index, span in enumerate(spans):
        expected = SpanProgress.captured(
            step=span.step,
            position=spans[0].position,
            replay=min(span.replay, span.position),
            zero_commits=span.zero_commits if span.step else 0,
            draft_half=span.draft_half,
            num_commits=0 if index else span.num_commits,
        )
        for field, value, wanted in zip(fields(span), span.values, expected.values, strict=True):
            if value != wanted:
                message = f"spans[{index}].{field.name}: expected {wanted}, got {value}"
                raise StateFileError(Flaw.SECTIONS, message)
        if span.position and not span.step:
            raise StateFileError(
                Flaw.SECTIONS, f"spans[{index}].step: expected 1 or more behind the first token, got 0"
            )


def _check_commits(commits: np.ndarray[Any, np.dtype[np.int64]], position: int, max_draft: int) -> None:
    """Raise StateFileError unless spans can have fixed such counts, int64 `[n, 3]`, before a position."""
    highest = np.array([position, np.iinfo(np.int64).max, max_draft])
    if (commits < 0).any() or (commits > highest).any() or len(np.unique(commits[:, :2], axis=0)) < len(commits):
        message = f"commits of 0: expected each once, at 0 .. {position}, of 0 .. {max_draft} tokens, got others"
        raise StateFileError(Flaw.SECTIONS, message)


def _digests(sections: Sequence[Section], memory: Bytes) -> list[bytes]:
    return [_digest(section, memory) for section in sections]


def _digest(section: Section, memory: Bytes) -> bytes:
    return xxhash.xxh3_128_digest(memory[section.offset : section.end].data)


def _most_header_bytes(layout: StateLayout) -> int:
    """Bytes of the longest header of a snapshot."""
    records = min(layout.max_draft, 1)
    most = SpanProgress(position=1, records_0=records, records_1=records, num_commits=1, reply_bytes=1)
    spans, text = (most,) * layout.num_spans, "x" * MAX_TEXT_BYTES
    adapter, key = "a" * MAX_ADAPTER_NAME_BYTES, bytes(MAX_KEY_BYTES)
    header = StateHeader(bytes(ID_BYTES), bytes(FINGERPRINT_BYTES), text, spans, adapter, key=key)
    return header.num_bytes(len(layout.sections(spans)))
