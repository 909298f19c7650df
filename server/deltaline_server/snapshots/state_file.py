"""One state's file: written in one pass, and read only as a whole that every digest agrees with.

Works on open descriptors; names and folders are directory.py's.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import xxhash

from deltaline_server.snapshots.header import (
    PREAMBLE,
    Flaw,
    StateFileError,
    StateHeader,
    StoredHeader,
    decode,
    encode,
    header_length,
)
from deltaline_server.snapshots.layout import Bytes, Section, StateLayout, state_bytes

# Large enough that calls cost nothing; small enough that what was hashed is still in the cache when it is copied.
PIECE_BYTES = 4 << 20
# File systems without such a call; then room is found as it is written.
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def file_bytes(header: StateHeader, sections: Sequence[Section]) -> int:
    """Bytes of the file of such a state."""
    return header.num_bytes(len(sections)) + state_bytes(sections)


def write_state(descriptor: int, header: StateHeader, sections: Sequence[Section], memory: Bytes) -> StoredHeader:
    """Write a new, empty file, and wait until it is on the disk. memory: uint8 [state_bytes(sections)].

    Raises OSError: then the file is part of one.
    """
    begin = header.num_bytes(len(sections))
    # What the disk has no room for shows here, before anything is written.
    try:
        os.posix_fallocate(descriptor, 0, file_bytes(header, sections))
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
    digests, written = [], 0
    for section in sections:
        state = xxhash.xxh3_128()
        for at, end in _pieces(section):
            state.update(memory[at:end].data)
            if end - written >= PIECE_BYTES:
                _write(descriptor, memory[written:end].data, begin + written)
                written = end
        digests.append(state.digest())
    _write(descriptor, memory[written:].data, begin + written)
    # Last, so that a file that is cut off here has none.
    _write(descriptor, encode(header, sections, digests), 0)
    os.fsync(descriptor)
    return StoredHeader(header, tuple(sections), tuple(digests), begin)


def read_header(descriptor: int, layout: StateLayout, fingerprint: bytes) -> StoredHeader:
    """Read and judge the header of a snapshot's file. Raises StateFileError; OSError if it can't be read."""
    size = os.fstat(descriptor).st_size
    length = header_length(os.pread(descriptor, PREAMBLE.size, 0), size)
    raw = bytearray(length)
    _read(descriptor, memoryview(raw), 0)
    stored = decode(bytes(raw), layout, fingerprint)
    if stored.header.is_sequence:
        raise StateFileError(Flaw.HEADER, "expected a snapshot's state, got that of a sequence")
    return stored


def read_state(descriptor: int, stored: StoredHeader, memory: Bytes) -> None:
    """Read the sections into a state's memory, uint8 [state_bytes(sections)], which is spoilt where this fails.

    Raises StateFileError: cut off, or a digest is another; OSError if it can't be read.
    """
    with suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    have = 0
    for section, digest in zip(stored.sections, stored.digests, strict=True):
        state = xxhash.xxh3_128()
        for at, end in _pieces(section):
            if have < end:
                ahead = min(have + PIECE_BYTES, len(memory))
                _read(descriptor, memory[have:ahead].data, stored.data_offset + have)
                have = ahead
            state.update(memory[at:end].data)
        if state.digest() != digest:
            name = f"{section.part.name.lower()} of {section.number}"
            raise StateFileError(Flaw.DIGEST, f"{name}: expected another digest of its {section.num_bytes} bytes")


def _pieces(section: Section) -> Iterator[tuple[int, int]]:
    """Where a section's bytes, and the zeros behind them, begin and end, no more than PIECE_BYTES at a time; never
    across a multiple of that."""
    at = section.offset
    while at < section.end:
        end = min(section.end, (at // PIECE_BYTES + 1) * PIECE_BYTES)
        yield at, end
        at = end


def _write(descriptor: int, content: memoryview | bytes, offset: int) -> None:
    """Write all of it, and let the disk begin. Raises OSError."""
    view = memoryview(content)
    done = 0
    while done < len(view):
        count = os.pwrite(descriptor, view[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += count
    with suppress(OSError):
        # The kernel would keep all of it until fsync: the disk would wait for the processor, then the other way round.
        os.posix_fadvise(descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)


def _read(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill the view. Raises StateFileError where the file ends before; OSError."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise StateFileError(Flaw.TRUNCATED, f"expected {offset + len(view)} bytes, got {offset + done}")
        done += count
