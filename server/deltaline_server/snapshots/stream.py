"""A state's file as a stream: what is sent is what a file would have; what comes is judged before it is believed.

Knows bytes and what they have to be, not where they come from or go to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import xxhash

from deltaline_server.errors import Reason, RequestError
from deltaline_server.finite import all_finite
from deltaline_server.snapshots.header import (
    FINGERPRINT_BYTES,
    ID_BYTES,
    MAX_ADAPTER_BYTES,
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
from deltaline_server.tables.prefixes.keys import MAX_KEY_BYTES

PIECE_BYTES = 1 << 20
# Of large states, each byte of which is looked at: threads, and bytes of each at least.
THREADS, PART_BYTES = 8, 4 << 20
# Of what is no state, or damaged. What no server of ours would write is the sender's mistake.
_REASONS = {
    Flaw.TRUNCATED: Reason.STATE_DAMAGED,
    Flaw.HEADER: Reason.STATE_DAMAGED,
    Flaw.DIGEST: Reason.STATE_DAMAGED,
    Flaw.VERSION: Reason.STATE_MISMATCH,
    Flaw.FINGERPRINT: Reason.STATE_MISMATCH,
    Flaw.ROOM: Reason.STATE_MISMATCH,
}

Buffer = bytes | memoryview
Result = TypeVar("Result")

ValueTypes = Mapping[Part, np.dtype[Any]]
"""The types of the parts that hold floating-point values."""


def pieces_of(
    header: StateHeader, sections: Sequence[Section], memory: Bytes, piece_bytes: int = PIECE_BYTES
) -> Iterator[memoryview]:
    """A state's file, so many bytes at a time, views; the first piece takes a look at every byte. memory: uint8
    [state_bytes(sections)], that must not change until the last piece was used."""
    digests = _by_threads(lambda some: [_digest(section, memory) for section in some], sections)
    for content in (memoryview(encode(header, sections, digests)), memory.data):
        for at in range(0, len(content), piece_bytes):
            yield content[at : at + piece_bytes]


class Arriving:
    """A state's file that comes in pieces, cut anywhere, none of them empty; ahead of a sequence's those of pages."""

    def __init__(self, pieces: AsyncIterator[Buffer]) -> None:
        self._pieces, self._piece = pieces, memoryview(b"")

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

    async def read_state(self, memory: Bytes, *, is_last: bool) -> None:
        """Take what is behind the header, all of which a state's memory has; is_last: whether nothing may come behind
        it. Raises as `read_header`."""
        await self._fill(memory.data)
        if is_last and (bool(self._piece) or bool(await anext(self._pieces, b""))):
            raise StateFileError(Flaw.LENGTH, "expected nothing behind the last section, got more")

    async def _fill(self, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            if not self._piece:
                piece = await anext(self._pieces, b"")
                self._piece = memoryview(piece)
                if not piece:
                    raise StateFileError(Flaw.TRUNCATED, f"expected {len(memory) - done} bytes more at least")
            count = min(len(self._piece), len(memory) - done)
            memory[done : done + count] = self._piece[:count]
            self._piece, done = self._piece[count:], done + count


def check_state(stored: StoredHeader, memory: Bytes, layout: StateLayout, types: ValueTypes) -> None:
    """Judge every byte of a state that came; takes milliseconds per 100 MB.

    Raises StateFileError: a digest is another, or what lies between the sections or in fixed commits can't be.
    RequestError NON_FINITE_INPUT.
    """
    digests = dict(zip(stored.sections, stored.digests, strict=True))

    def check(sections: Sequence[Section]) -> list[None]:
        for section in sections:
            _check_section(section, digests[section], memory, types)
            if section.part is Part.COMMITS:
                position = max(span.position for span in stored.header.spans)
                _check_commits(section.view(memory).view(np.int64), position, layout.max_draft)
        return []

    _by_threads(check, stored.sections)


def _check_section(section: Section, digest: bytes, memory: Bytes, types: ValueTypes) -> None:
    """Judge every byte of a section. Raises as `check_state`."""
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


def _by_threads(work: Callable[[Sequence[Section]], list[Result]], sections: Sequence[Section]) -> list[Result]:
    """The results of work on sections, some to each of THREADS threads, with none where they are few bytes. Raises what
    the work raises of the first that fails."""
    part_bytes = max(PART_BYTES, -(-state_bytes(sections) // THREADS))
    parts = [list(some) for _, some in groupby(sections, lambda section: section.offset // part_bytes)]
    if len(parts) < 2:
        return work(sections)
    with ThreadPoolExecutor(len(parts), thread_name_prefix="digests") as pool:
        return [result for some in pool.map(work, parts) for result in some]


def refused(error: StateFileError) -> RequestError:
    """What who sends a state is told of it."""
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


def _digest(section: Section, memory: Bytes) -> bytes:
    return xxhash.xxh3_128_digest(memory[section.offset : section.end].data)


def _most_header_bytes(layout: StateLayout) -> int:
    """Bytes of the longest header of a snapshot."""
    records = min(layout.max_draft, 1)
    most = SpanProgress(position=1, records_0=records, records_1=records, num_commits=1, reply_bytes=1)
    spans, text = (most,) * layout.num_spans, "x" * MAX_TEXT_BYTES
    adapter, key = "a" * MAX_ADAPTER_BYTES, bytes(MAX_KEY_BYTES)
    header = StateHeader(bytes(ID_BYTES), bytes(FINGERPRINT_BYTES), text, spans, adapter, key=key)
    return header.num_bytes(len(layout.sections(spans)))
