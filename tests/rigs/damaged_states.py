"""Files that a server must not take for states: damaged in every way, or forged with digests that fit."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from rigs.states import LAYOUT, SNAPSHOT, make_header, make_memory

from deltaline_server.snapshots.directory import name_of
from deltaline_server.snapshots.header import PREAMBLE, Flaw, encode
from deltaline_server.snapshots.layout import NUM_PROGRESS_FIELDS

SECTIONS = LAYOUT.sections(SNAPSHOT)
MEMORY = make_memory()
DIGESTS = [xxhash.xxh3_128_digest(MEMORY[each.offset : each.end].data) for each in SECTIONS]
HEADER_BYTES = make_header().num_bytes(len(SECTIONS))
ENTRY_BYTES = 40
# Of the fixed part: how many spans and sections there are, and the lengths of owner, adapter and key.
COUNTS = PREAMBLE.size + 32 + 16 + 32 + 8 + 4
TEXTS = COUNTS + 8
PROGRESS = TEXTS + 6 + len("alice") + len("ö-lora".encode()) + 20
TABLE = PROGRESS + 2 * NUM_PROGRESS_FIELDS * 8

Content = bytearray
Spoil = Callable[[Content, np.random.Generator], Content]


def whole_file(seed: int) -> Content:
    """The bytes of a file that is accepted."""
    return bytearray(encode(make_header(seed), SECTIONS, DIGESTS) + MEMORY.tobytes())


def forged(spoil: Spoil) -> Spoil:
    """A change of the header by somebody who knows how its digest is made."""

    def spoil_and_digest(content: Content, rng: np.random.Generator) -> Content:
        content = spoil(content, rng)
        length = min(int.from_bytes(content[12:16], "little"), len(content))
        content[24:40] = bytes(16)
        content[24:40] = xxhash.xxh3_128_digest(bytes(content[:length]))
        return content

    return spoil_and_digest


def _put(content: Content, offset: int, values: bytes) -> Content:
    content[offset : offset + len(values)] = values
    return content


def _flip(content: Content, low: int, high: int, rng: np.random.Generator) -> Content:
    content[int(rng.integers(low, high))] ^= 1 << int(rng.integers(8))
    return content


def _flip_section(content: Content, rng: np.random.Generator) -> Content:
    section = SECTIONS[rng.integers(len(SECTIONS))]
    return _flip(content, HEADER_BYTES + section.offset, HEADER_BYTES + section.end, rng)


def _cut(content: Content, rng: np.random.Generator) -> Content:
    """Cut at any byte, or where something ends."""
    ends = [0, 1, 8, 39, 40, TABLE, HEADER_BYTES, *(HEADER_BYTES + each.offset for each in SECTIONS), len(content) - 1]
    size = int(rng.choice(ends)) if rng.random() < 0.5 else int(rng.integers(len(content)))
    return content[:size]


def _swap_entries(content: Content, rng: np.random.Generator) -> Content:
    one, other = (TABLE + int(i) * ENTRY_BYTES for i in rng.choice(len(SECTIONS), 2, replace=False))
    first, second = content[one : one + ENTRY_BYTES], content[other : other + ENTRY_BYTES]
    return _put(_put(content, one, bytes(second)), other, bytes(first))


def _change_entry(content: Content, rng: np.random.Generator) -> Content:
    """An offset or a length: of another section, so that two overlap; one more; or huge."""
    entry = TABLE + int(rng.integers(len(SECTIONS))) * ENTRY_BYTES
    field = entry + int(rng.choice([8, 16]))
    old = int.from_bytes(content[field : field + 8], "little")
    new = int(rng.choice([SECTIONS[-1].offset + 1, old + 64, old + 1, 2**40, 2**63]))
    return _put(content, field, struct.pack("<Q", new))


def _change_progress(content: Content, rng: np.random.Generator) -> Content:
    """A count that is impossible, or that makes sections of other sizes than there are."""
    span = int(rng.integers(2))
    fields = {1: 71, 2: 1, 3: 4, 7: 9, 8: 3, 10: 1, 11: 2**20}
    field = int(rng.choice(list(fields)))
    value = int(rng.choice([fields[field], 2**62, -1, -(2**63)]))
    return _put(content, PROGRESS + (span * NUM_PROGRESS_FIELDS + field) * 8, struct.pack("<q", value))


def _change_counts(content: Content, rng: np.random.Generator) -> Content:
    num_sections = int(rng.choice([0, len(SECTIONS) - 1, len(SECTIONS) + 1, 2**16, 2**32 - 1]))
    return _put(content, COUNTS + 4, struct.pack("<I", num_sections))


def _change_spans(content: Content, rng: np.random.Generator) -> Content:
    return _put(content, COUNTS, struct.pack("<I", int(rng.choice([0, 1, 3, 2**32 - 1]))))


def _change_texts(content: Content, rng: np.random.Generator) -> Content:
    return _put(content, TEXTS + 2 * int(rng.integers(3)), struct.pack("<H", int(rng.choice([2**16 - 1, 2**12]))))


def _shorten_key(content: Content, rng: np.random.Generator) -> Content:
    """A key of fewer bytes than a prompt's may have; the others are the adapter's."""
    count = int(rng.integers(1, 16))
    return _put(content, TEXTS + 2, struct.pack("<HH", len("ö-lora".encode()) + 20 - count, count))


def _change_total(content: Content, rng: np.random.Generator) -> Content:
    del rng
    content += bytes(4096)
    return _put(content, 16, struct.pack("<Q", len(content)))


def _change_length(content: Content, rng: np.random.Generator) -> Content:
    return _put(content, 12, struct.pack("<I", int(rng.choice([0, 40, 4095, 4097, 2**24, 2**32 - 4096]))))


def _add(content: Content, rng: np.random.Generator) -> Content:
    return content + rng.bytes(int(rng.integers(1, 5000)))


def _other_version(content: Content, rng: np.random.Generator) -> Content:
    return _put(content, 8, struct.pack("<I", int(rng.choice([0, 1, 2**31]))))


SPOILS: tuple[tuple[Spoil, set[Flaw]], ...] = (
    (_cut, {Flaw.TRUNCATED, Flaw.FOREIGN}),
    (_add, {Flaw.LENGTH}),
    (lambda content, rng: _flip(content, 0, 8, rng), {Flaw.FOREIGN}),
    (lambda content, rng: _flip(content, 8, 12, rng), {Flaw.VERSION}),
    (lambda content, rng: _flip(content, 12, 24, rng), {Flaw.LENGTH, Flaw.TRUNCATED, Flaw.HEADER}),
    (lambda content, rng: _flip(content, 24, HEADER_BYTES, rng), {Flaw.HEADER}),
    (_flip_section, {Flaw.DIGEST}),
    (lambda content, rng: bytearray(rng.bytes(int(rng.integers(20_000)))), {Flaw.FOREIGN}),
    (lambda content, rng: bytearray(len(content)), {Flaw.FOREIGN}),
    (forged(_other_version), {Flaw.VERSION}),
    (forged(_change_length), {Flaw.LENGTH, Flaw.HEADER}),
    (forged(_change_total), {Flaw.SECTIONS}),
    (forged(_change_entry), {Flaw.SECTIONS}),
    (forged(_swap_entries), {Flaw.SECTIONS}),
    (forged(_change_progress), {Flaw.SECTIONS, Flaw.ROOM}),
    (forged(_change_counts), {Flaw.HEADER, Flaw.SECTIONS}),
    (forged(_change_spans), {Flaw.SECTIONS}),
    (forged(_change_texts), {Flaw.HEADER}),
    (forged(_shorten_key), {Flaw.HEADER}),
    (forged(lambda content, rng: _put(content, COUNTS - 12, struct.pack("<q", -(10**9)))), {Flaw.HEADER}),
    (forged(lambda content, rng: _flip(content, PREAMBLE.size, PREAMBLE.size + 32, rng)), {Flaw.FINGERPRINT}),
    (forged(lambda content, rng: _flip(content, PREAMBLE.size + 32, PREAMBLE.size + 48, rng)), {Flaw.NAME}),
    (forged(lambda content, rng: _put(content, COUNTS - 4, b"\xff")), {Flaw.HEADER}),
    (forged(lambda content, rng: _put(content, TEXTS + 6, b"\xff\xfe")), {Flaw.HEADER}),
    (forged(lambda content, rng: _put(content, HEADER_BYTES - 1, b"\1")), {Flaw.HEADER}),
)
KINDS = ("link", "hard link", "folder", "fifo", "name")


def put_damaged(folder: Path, good: Path, number: int) -> set[Flaw]:
    """Put the damaged file of this number into a folder; return the flaws of which it must be told to have one.

    good: a file that would be accepted, elsewhere, for links to it.
    """
    rng = np.random.default_rng(number)
    path = folder / name_of(make_header(number).id)
    index = number % (len(SPOILS) + len(KINDS))
    if index < len(SPOILS):
        spoil, flaws = SPOILS[index]
        path.write_bytes(spoil(whole_file(number), rng))
        return flaws
    kind = KINDS[index - len(SPOILS)]
    if kind == "link":
        path.symlink_to(good if number % 2 else folder / "nowhere")
    elif kind == "hard link":
        path.hardlink_to(good)
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        names = (path.stem, f"{path.stem}.state.bak", f"{path.stem.upper()}X.state", f"{path.stem[1:]}.state")
        (folder / names[int(rng.integers(len(names)))]).write_bytes(whole_file(number))
        return {Flaw.NAME}
    return {Flaw.KIND}
