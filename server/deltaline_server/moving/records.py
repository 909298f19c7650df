"""Records of moves: a file in the folder of a server's states, by which the server of the same name that comes after it
tells where sequences live that were moved.

A move is recorded before the sequence is let go of; where that fails, it stays. A server that dies between the two has
stepped it no more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Self

import xxhash

from deltaline_server.errors import Reason, RequestError
from deltaline_server.log import event
from deltaline_server.snapshots.directory import StateDirectory
from deltaline_server.snapshots.header import Flaw, StateFileError
from deltaline_server.tables.moved import MovedSequences, Owner

# Of the file, which then has room made: some tens of thousands of records.
MAX_BYTES = 16 << 20
_NAME_CHARACTERS = 320

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """One move: the former server's name, its epoch and the sequence's handle there, whose it is, where it lives, and
    until when that is told, milliseconds since 1970."""

    name: str
    epoch: int
    handle: int
    principal: str
    server: str
    server_epoch: int
    sequence: int
    until_ms: int

    def line(self) -> bytes:
        """The record as it is kept: on a line of its own, whatever was left of one before, behind its digest."""
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        return b"\n%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)

    @classmethod
    def read(cls, line: bytes) -> Self:
        """The record of a line. Raises ValueError."""
        digest, _, text = line.partition(b" ")
        if digest != xxhash.xxh3_64_hexdigest(text).encode():
            raise ValueError("expected another digest")
        values = json.loads(text)
        types = {"int": int, "str": str}
        expected = {field.name: types[str(field.type)] for field in fields(cls)}
        if not isinstance(values, dict) or {name: type(value) for name, value in values.items()} != expected:
            raise ValueError("expected a record's fields")
        record = cls(**values)
        numbers = record.epoch, record.handle, record.server_epoch, record.sequence
        names = record.name, record.principal, record.server
        if not all(0 <= one < 2**64 for one in numbers) or any(len(one) > _NAME_CHARACTERS for one in names):
            raise ValueError("expected numbers and names that can be")
        return record


class MovedRecords:
    """The records of a folder. All methods belong to the event loop's thread; the file is written in others."""

    def __init__(
        self,
        directory: StateDirectory,
        moved: MovedSequences,
        max_lease_s: float,
        wall_clock: Callable[[], float] = time.time,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """moved: told what is found. wall_clock: seconds since 1970, which may be set: what is found is told no longer
        than max_lease_s."""
        self._directory, self._moved, self._max_lease_s = directory, moved, max_lease_s
        self._wall_clock, self._max_bytes = wall_clock, max_bytes
        self._name = ""
        self._num_bytes = 0
        self._writing = asyncio.Lock()

    async def load(self, name: str) -> None:
        """Find what servers of this name have recorded; what can't be used is passed over. To be called once, before
        the rest."""
        self._name, now = name, self._wall_clock()
        try:
            records, num_damaged = await asyncio.to_thread(self._found)
        except (OSError, StateFileError) as error:
            event(_log, "records of moves can't be used", level=logging.WARNING, why=error)
            self._num_bytes = self._max_bytes  # they are read before another is written
            return
        own = [record for record in records if record.name == name]
        for record in reversed(own):  # of several of one sequence the one that lasts longest counts
            owner = Owner(record.server, record.server_epoch, record.sequence)
            remaining_s = min(record.until_ms / 1000 - now, self._max_lease_s)
            self._moved.add(record.epoch, record.handle, record.principal, owner, remaining_s, is_told=True)
        if records:
            event(_log, "records of moves found", records=len(own), of_other_names=len(records) - len(own))
        if num_damaged:
            event(_log, "damaged records of moves passed over", level=logging.WARNING, count=num_damaged)

    async def add(self, epoch: int, handle: int, principal: str, owner: Owner, lease_s: float) -> None:
        """Record that a principal's sequence, which this server is about to let go of, lives at its owner; once this
        returns the record outlasts the host. Raises RequestError MOVE_FAILED: there is none.

        It is written to its end even if the caller is cancelled."""
        until_ms = round((self._wall_clock() + lease_s) * 1000)
        at = owner.server, owner.server_epoch, owner.handle
        record = Record(self._name, epoch, handle, principal, *at, until_ms)
        await asyncio.shield(self._append(record.line()))

    async def check(self) -> None:
        """Raise RequestError MOVE_FAILED unless a move can be recorded now."""
        await asyncio.shield(self._append(b"\n"))

    async def _append(self, line: bytes) -> None:
        async with self._writing:
            try:
                if self._num_bytes + len(line) > self._max_bytes:
                    await asyncio.to_thread(self._found)
                self._num_bytes += await asyncio.to_thread(self._directory.append_record, line)
            except (OSError, StateFileError) as error:
                event(_log, "a move can't be recorded", level=logging.WARNING, why=error)
                message = "the move could not be recorded, so the sequence stays"
                raise RequestError(Reason.MOVE_FAILED, message, retry_after_s=1.0) from error

    # -- in threads ------------------------------------------------------------------------------------------------

    def _found(self) -> tuple[list[Record], int]:
        """The records whose time is not over, of which the file has no more than half of its bytes from then on, those
        that last longest; and how many lines were none. Raises OSError, StateFileError."""
        try:
            content = self._directory.read_records(self._max_bytes)
        except StateFileError as error:
            if error.flaw in (Flaw.UNREADABLE, Flaw.BUSY):
                raise
            event(_log, "a file in place of records of moves is removed", level=logging.WARNING, why=error)
            content = b""
        now_ms, records, num_damaged = self._wall_clock() * 1000, list[Record](), 0
        for line in filter(None, content.split(b"\n")):
            try:
                records.append(Record.read(line))
            except (ValueError, RecursionError):
                num_damaged += 1
        lasting, lines, num_bytes = list[Record](), list[bytes](), 0
        for record in sorted(records, key=lambda record: -record.until_ms):
            line = record.line()
            num_bytes += len(line)
            if record.until_ms <= now_ms or num_bytes > self._max_bytes // 2:
                break
            lasting.append(record)
            lines.append(line)
        self._directory.replace_records(b"".join(lines))
        self._num_bytes = sum(map(len, lines))
        return lasting, num_damaged
