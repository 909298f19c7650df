"""What stands before a state's bytes in a file: whose it is, what it is of, and an offset and a digest of each section.

    magic, version, length of the header, length of the whole, digest of the header
    fingerprint, id, adapter's digest, when it was made, flags, numbers of spans and sections, lengths of texts
    owner, adapter, key | progress of each span | an entry for each section | zeros up to a multiple of 4096

Little-endian throughout. Nothing that a header says is trusted: from the progress of the spans follows what all offsets
and lengths have to be, and any others are refused. Digests find damage and mistakes; they prove nothing of who wrote a
file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltaline_server.snapshots.layout import (
    NUM_PROGRESS_FIELDS,
    VERSION,
    LayoutError,
    NoRoom,
    Section,
    SpanProgress,
    StateLayout,
    state_bytes,
)
from deltaline_server.tables.captured.snapshots import ID_BYTES
from deltaline_server.tables.prefixes.keys import MAX_KEY_BYTES, MAX_TOKENS, MIN_KEY_BYTES

MAGIC = b"dl-state"
FINGERPRINT_BYTES = 32
ADAPTER_HASH_BYTES = 32
MAX_TEXT_BYTES = 1024
# Of an adapter's name, as whoever loads one holds it to: a list of snapshots with longer ones might not fit a reply.
MAX_ADAPTER_NAME_BYTES = 64
# That of 4,096 layers, each its own span.
MAX_HEADER_BYTES = 8 << 20
PAGE = 4096
PREAMBLE = struct.Struct("<8sIIQ16s")
_FIXED = struct.Struct("<32s16s32sqIIIHHH")
_ENTRY = np.dtype(
    [
        ("part", "<u2"),
        ("half", "<u2"),
        ("number", "<u4"),
        ("offset", "<u8"),
        ("num_bytes", "<u8"),
        ("digest", "V16"),
    ]
)
_PINNED, _SEQUENCE, _PAGES = 1, 2, 4


class Flaw(StrEnum):
    """Why a file is not accepted."""

    NAME = "name"
    """Its name is no state's, or not that of the state in it."""
    KIND = "kind"
    """A link, a directory, a FIFO, or another user's."""
    GONE = "gone"
    UNREADABLE = "unreadable"
    BUSY = "busy"
    """The system has no descriptor or no memory to read it with now; later it may."""
    FOREIGN = "foreign"
    """It does not begin as a state's file does."""
    VERSION = "version"
    TRUNCATED = "truncated"
    LENGTH = "length"
    """Longer than it says, or a header of an impossible length."""
    HEADER = "header"
    """Its header's digest is another, or its header says what can't be."""
    FINGERPRINT = "fingerprint"
    """Of another model, or of other settings that change what a state means."""
    SECTIONS = "sections"
    """Its sections are not where they have to be."""
    ROOM = "room"
    """It has more tokens or drafts than a sequence may have here."""
    DIGEST = "digest"
    """A section's digest is another."""


class StateFileError(Exception):
    """A file can't be accepted; the message has neither its name nor its folder."""

    def __init__(self, flaw: Flaw, message: str) -> None:
        super().__init__(message)
        self.flaw = flaw


@dataclass(frozen=True)
class StateHeader:
    """What is known of a stored state beside its bytes.

    fingerprint: of what it is a state of. owner: a principal's name. adapter, adapter_hash: empty for none. created_ns:
    since the epoch. key: under which it is looked for, empty for none. is_sequence: whether it is of a sequence as it
    stands between two steps, which goes on as that one, and is no snapshot. is_pages: whether it is only keys and
    values of such a sequence, which go ahead of the rest.
    """

    id: bytes
    fingerprint: bytes
    owner: str
    spans: tuple[SpanProgress, ...]
    adapter: str = ""
    adapter_hash: bytes = b""
    created_ns: int = 0
    is_pinned: bool = False
    key: bytes = b""
    is_sequence: bool = False
    is_pages: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError where a field has another length, or a number, than it may have."""
        texts = self.owner.encode(), self.adapter.encode()
        lengths = {
            "id": (len(self.id), ID_BYTES, ID_BYTES),
            "fingerprint": (len(self.fingerprint), FINGERPRINT_BYTES, FINGERPRINT_BYTES),
            "owner": (len(texts[0]), 1, MAX_TEXT_BYTES),
            "adapter": (len(texts[1]), 0, MAX_ADAPTER_NAME_BYTES),
            "adapter_hash": (len(self.adapter_hash), *(ADAPTER_HASH_BYTES if self.adapter_hash else 0,) * 2),
            "key": (len(self.key), MIN_KEY_BYTES if self.key else 0, MAX_KEY_BYTES),
        }
        for name, (length, low, high) in lengths.items():
            if not low <= length <= high:
                raise ValueError(f"{name}: expected {low} .. {high} bytes, got {length}")
        if self.created_ns < 0:
            raise ValueError(f"created_ns: expected 0 or more, got {self.created_ns}")
        if self.key and self.spans[0].position > MAX_TOKENS:
            raise ValueError(f"key: expected none for so many tokens, got {self.spans[0].position}")
        if not self.is_sequence and (self.is_pages or any(span.ahead for span in self.spans)):
            raise ValueError("is_pages, ahead: expected none but a sequence's")

    def sections(self, layout: StateLayout) -> tuple[Section, ...]:
        """The sections of the state that it is of. Raises LayoutError."""
        return (layout.pages if self.is_pages else layout).sections(self.spans)

    def num_bytes(self, num_sections: int) -> int:
        """Bytes of the header of a state with so many sections: where its data begins in a file."""
        texts = len(self.owner.encode()) + len(self.adapter.encode()) + len(self.key)
        progress = len(self.spans) * NUM_PROGRESS_FIELDS * 8
        size = PREAMBLE.size + _FIXED.size + texts + progress + num_sections * _ENTRY.itemsize
        return -(-size // PAGE) * PAGE


def encode(header: StateHeader, sections: Sequence[Section], digests: Sequence[bytes]) -> bytes:
    """Return the header of a file whose sections have these digests, each of `section.offset .. section.end`."""
    owner, adapter = header.owner.encode(), header.adapter.encode()
    fixed = _FIXED.pack(
        header.fingerprint,
        header.id,
        header.adapter_hash,
        header.created_ns,
        _PINNED * header.is_pinned | _SEQUENCE * header.is_sequence | _PAGES * header.is_pages,
        len(header.spans),
        len(sections),
        len(owner),
        len(adapter),
        len(header.key),
    )
    progress = np.array([span.values for span in header.spans], dtype="<i8").tobytes()
    entries = _entries(sections)
    entries["digest"] = np.array(digests, dtype="V16") if digests else entries["digest"]
    body = fixed + owner + adapter + header.key + progress + entries.tobytes()
    length = header.num_bytes(len(sections))
    body = body.ljust(length - PREAMBLE.size, b"\0")
    total = length + state_bytes(sections)
    digest = xxhash.xxh3_128_digest(PREAMBLE.pack(MAGIC, VERSION, length, total, bytes(16)) + body)
    return PREAMBLE.pack(MAGIC, VERSION, length, total, digest) + body


def header_length(preamble: bytes, file_bytes: int | None) -> int:
    """Return the length of the header that begins with these PREAMBLE.size bytes, in a file of so many; None where they
    are yet to come.

    Raises StateFileError: the file is none of ours, of another version, or not as long as it says.
    """
    if len(preamble) < PREAMBLE.size:
        flaw = Flaw.TRUNCATED if MAGIC.startswith(preamble[: len(MAGIC)]) else Flaw.FOREIGN
        raise StateFileError(flaw, f"expected a header of at least {PREAMBLE.size} bytes, got {len(preamble)}")
    magic, version, length, total, _ = PREAMBLE.unpack(preamble)
    if magic != MAGIC:
        raise StateFileError(Flaw.FOREIGN, "expected the file of a snapshot or of a sequence, got something else")
    if version != VERSION:
        raise StateFileError(Flaw.VERSION, f"expected version {VERSION}, got {version}")
    if length % PAGE or not PAGE <= length <= min(MAX_HEADER_BYTES, total):
        raise StateFileError(Flaw.LENGTH, f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {length}")
    if file_bytes is not None and total != file_bytes:
        flaw = Flaw.TRUNCATED if file_bytes < total else Flaw.LENGTH
        raise StateFileError(flaw, f"expected a file of {total} bytes, got {file_bytes}")
    return int(length)


@dataclass(frozen=True)
class RememberedHeader:
    """As much of a header that was judged as tells it from any other; its sections and their digests, hundreds of
    them, are in its file. digest: of all of these."""

    header: StateHeader
    digest: bytes


@dataclass(frozen=True)
class StoredHeader:
    """A header that was read and judged: with its sections, their digests, and where the data begins."""

    header: StateHeader
    sections: tuple[Section, ...]
    digests: tuple[bytes, ...]
    data_offset: int

    @property
    def remembered(self) -> RememberedHeader:
        return RememberedHeader(self.header, xxhash.xxh3_128_digest(b"".join(self.digests)))


def decode(raw: bytes, layout: StateLayout, fingerprint: bytes) -> StoredHeader:
    """Judge a whole header, whose length is that of `header_length`.

    Raises StateFileError: damaged, of another fingerprint, or with spans or sections that this layout does not have.
    """
    magic, version, length, total, digest = PREAMBLE.unpack_from(raw)
    if digest != xxhash.xxh3_128_digest(PREAMBLE.pack(magic, version, length, total, bytes(16)) + raw[PREAMBLE.size :]):
        raise StateFileError(Flaw.HEADER, "expected a whole header, got one with another digest")
    of, id, adapter_hash, created_ns, flags, num_spans, num_sections, *texts = _FIXED.unpack_from(raw, PREAMBLE.size)
    if of != fingerprint:
        raise StateFileError(Flaw.FINGERPRINT, "expected a state of this model and settings, got another")
    if flags & ~(most := _PINNED | _SEQUENCE | _PAGES):
        raise StateFileError(Flaw.HEADER, f"flags: expected 0 .. {most}, got {flags}")
    if num_spans != layout.num_spans:
        raise StateFileError(Flaw.SECTIONS, f"spans: expected {layout.num_spans}, got {num_spans}")
    size = PREAMBLE.size + _FIXED.size + sum(texts) + num_spans * NUM_PROGRESS_FIELDS * 8
    size += num_sections * _ENTRY.itemsize
    if not size <= length == len(raw) < size + PAGE or any(raw[size:]):
        raise StateFileError(Flaw.HEADER, f"expected a header of {size} bytes and zeros, got one of {length}")
    at = PREAMBLE.size + _FIXED.size
    owner, adapter, key = (raw[at + sum(texts[:i]) : at + sum(texts[: i + 1])] for i in range(3))
    at += sum(texts)
    progress = np.frombuffer(raw, dtype="<i8", count=num_spans * NUM_PROGRESS_FIELDS, offset=at)
    at += progress.nbytes
    spans = tuple(SpanProgress(*values) for values in progress.reshape(num_spans, -1).tolist())
    entries = np.frombuffer(raw, dtype=_ENTRY, count=num_sections, offset=at)
    sections = _same_sections(layout.pages if flags & _PAGES else layout, spans, entries)
    if total != length + state_bytes(sections):
        raise StateFileError(Flaw.SECTIONS, f"expected {length + state_bytes(sections)} bytes, got {total}")
    try:
        header = StateHeader(
            id,
            of,
            owner.decode(),
            spans,
            adapter.decode(),
            adapter_hash if any(adapter_hash) else b"",
            created_ns,
            bool(flags & _PINNED),
            key,
            bool(flags & _SEQUENCE),
            bool(flags & _PAGES),
        )
    except ValueError as error:
        raise StateFileError(Flaw.HEADER, f"expected fields within their limits ({type(error).__name__})") from error
    return StoredHeader(header, sections, tuple(bytes(digest) for digest in entries["digest"].tolist()), length)


def _same_sections(layout: StateLayout, spans: Sequence[SpanProgress], entries: NDArray[Any]) -> tuple[Section, ...]:
    """Return the sections that spans of this progress have, if those are the entries. Raises StateFileError."""
    try:
        sections = layout.sections(spans)
    except LayoutError as error:
        raise StateFileError(Flaw.ROOM if isinstance(error, NoRoom) else Flaw.SECTIONS, str(error)) from error
    expected = _entries(sections)
    expected["digest"] = entries["digest"] if len(entries) == len(expected) else b""
    if expected.tobytes() != entries.tobytes():
        raise StateFileError(Flaw.SECTIONS, f"expected the {len(expected)} sections of such a state, got others")
    return sections


def _entries(sections: Sequence[Section]) -> NDArray[Any]:
    """The table of the sections, without digests."""
    rows = [(each.part, each.half, each.number, each.offset, each.end - each.offset, bytes(16)) for each in sections]
    return np.array(rows, dtype=_ENTRY)
