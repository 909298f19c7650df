"""States' files as streams: taken from a rig, forged, and brought to another rig."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from rigs.state_rig import FINGERPRINT, StateRig

from deltaline_server.principal import ANONYMOUS, Principal
from deltaline_server.snapshots.exchange import Exchange
from deltaline_server.snapshots.header import StateHeader, decode, encode
from deltaline_server.snapshots.layout import Bytes, Section, StateLayout
from deltaline_server.snapshots.stream import Arriving
from deltaline_server.tables.captured.snapshot import SnapshotDescription

Change = Callable[[dict[tuple[int, int, int], Section], Bytes], object]
"""Changes a state's memory, given its sections by part, number and half."""


async def exported(rig: StateRig, id: bytes, owner: Principal = ANONYMOUS) -> list[bytes]:
    """The pieces of a snapshot's file."""
    assert rig.exchange is not None
    return [bytes(piece) async for piece in rig.exchange.export(id, owner, pause_s=60.0, whole_s=600.0)]


async def coming(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Pieces that don't come all at once."""
    for piece in pieces:
        await asyncio.sleep(0)
        yield piece


async def imported(
    rig: StateRig, pieces: Iterable[bytes], owner: Principal = ANONYMOUS, *, is_pinned: bool = False
) -> SnapshotDescription:
    """The snapshot that comes of pieces."""
    assert rig.exchange is not None
    return await imported_by(rig.exchange, coming(pieces), owner, is_pinned=is_pinned)


async def imported_by(
    exchange: Exchange, pieces: AsyncIterator[bytes], owner: Principal = ANONYMOUS, *, is_pinned: bool = False
) -> SnapshotDescription:
    """The same, as the service does it."""
    arriving = Arriving(pieces)
    with exchange.on_its_way(owner):
        stored, _ = await exchange.read_header(arriving)
        exchange.check_adapter(stored.header, owner)
        async with exchange.received(arriving, stored, owner, is_pinned=is_pinned) as header:
            return exchange.add(header, owner, 60.0)


def forged(layout: StateLayout, whole: bytes, change: Change, **changes: Any) -> bytes:
    """A file whose bytes and header somebody changed who knows how digests are made. changes: of the header."""
    length = int.from_bytes(whole[12:16], "little")
    stored = decode(whole[:length], layout, FINGERPRINT)
    memory = np.frombuffer(bytearray(whole[length:]), dtype=np.uint8)
    change({(one.part, one.number, one.half): one for one in stored.sections}, memory)
    return file_of(replace(stored.header, **changes), stored.sections, memory)


def memory_of(whole: bytes) -> bytes:
    """What a file has behind its header."""
    return whole[int.from_bytes(whole[12:16], "little") :]


def file_of(header: StateHeader, sections: tuple[Section, ...], memory: Bytes) -> bytes:
    """A state's file with digests that fit."""
    digests = [xxhash.xxh3_128_digest(memory[each.offset : each.end].data) for each in sections]
    return encode(header, sections, digests) + memory.tobytes()
