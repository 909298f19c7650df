"""Which stored snapshot continues which prompt: found by the keys that orchestrators send.

Keys are a principal's own: each has a table of its own, so that no key of another is ever compared with what it asks
for. In it a key has an entry for each origin, and an entry is right only if all of the key's bytes are. All methods
belong to one thread.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from deltaline_server.tables.prefixes.cost import StoredPrefix, Tier
from deltaline_server.tables.prefixes.keys import KeyHash, KeyMemory, PrefixKeys

# Most bytes that an entry takes, with its place in both tables, where keys are as long as they may be.
ENTRY_BYTES = 1024
# Keys of a prompt are noticed at one bit, those behind which it went on at the other.
_WENT_ON = np.uint64(1)


class Miss(IntEnum):
    """Why no state was found, the reason that is nearest to a hit."""

    NEVER_STORED = 1
    EVICTED = 2
    OTHER_FINGERPRINT = 3
    OTHER_ADAPTER = 4
    TOO_SHORT = 5


@dataclass(frozen=True)
class Origin:
    """What computed a state: no other can go on from it. adapter_hash: the content's, empty without an adapter."""

    fingerprint: bytes
    adapter_hash: bytes = b""


@dataclass(frozen=True)
class Found:
    """What is stored of a prompt.

    prefixes: the deepest state of each tier, strictly before the prompt's end, the deepest first; none is deeper than
    the first, and each that follows is nearer. miss: why there is none. shared_position: up to where an earlier prompt
    was the same and then went on otherwise, if no state is as deep; 0 for none. A waypoint there would serve both.
    """

    prefixes: tuple[StoredPrefix, ...]
    miss: Miss | None
    shared_position: int


@dataclass(slots=True, eq=False)
class _Entry:
    """A key of an owner and an origin. stored: the snapshots under it, the first one first."""

    owner: int
    hashed: int
    key: bytes
    position: int
    origin: Origin
    stored: dict[bytes, StoredPrefix]

    @property
    def prefix(self) -> StoredPrefix:
        """What is found by the key: the nearest of them, of several the first."""
        return min(self.stored.values(), key=lambda one: one.tier)


class PrefixIndex:
    """Snapshots by key, `num_entries` at most; of what was evicted and of prompts' keys as much as has places.

    secret: 16 random bytes or more. A seen or an evicted key is 8 bytes; nothing grows but entries.
    """

    def __init__(
        self, num_entries: int, secret: bytes, *, evicted_places: int = 2**16, seen_places: int = 2**18
    ) -> None:
        self.num_entries = num_entries
        self._hash = KeyHash(secret)
        # By snapshot.
        self._entries: dict[bytes, _Entry] = {}
        # By owner and hash.
        self._tables: dict[int, dict[int, list[_Entry]]] = {}
        self._evicted, self._seen = KeyMemory(evicted_places), KeyMemory(seen_places)

    def __len__(self) -> int:
        return len(self._entries)

    # -- what is stored --------------------------------------------------------------------------------------------

    def register(self, keys: PrefixKeys, owner: int, origin: Origin, stored: StoredPrefix) -> bool:
        """A snapshot was stored at the position of one of the keys: find it by that from now on.

        Returns whether it is: not where no key has the position, or the index is full. Where there are several under a
        key, the one that is nearest is found, of those the first, and another once that one is gone. A snapshot has one
        key at most: raises ValueError for one that is registered.
        """
        if stored.snapshot in self._entries:
            raise ValueError("snapshot: expected one that is not registered, got one that is")
        i = keys.index_of(stored.position)
        if i is None or len(self._entries) >= self.num_entries:
            return False
        hashed, key = int(self._hash.of(keys.words[i : i + 1])[0]), keys.words[i].tobytes()
        same = self._tables.setdefault(owner, {}).setdefault(hashed, [])
        entry = next((one for one in same if one.key == key and one.origin == origin), None)
        if entry is None:
            entry = _Entry(owner, hashed, key, stored.position, origin, {})
            same.append(entry)
        entry.stored[stored.snapshot] = stored
        self._entries[stored.snapshot] = entry
        return True

    def moved(self, snapshot: bytes, tier: Tier, num_bytes: int) -> None:
        """A snapshot lies elsewhere now. One that is not registered is passed over."""
        entry = self._entries.get(snapshot)
        if entry is not None:
            entry.stored[snapshot] = StoredPrefix(entry.position, snapshot, tier, num_bytes)

    def forget(self, snapshot: bytes, *, is_evicted: bool) -> None:
        """A snapshot is gone; where it was evicted, that is remembered. Idempotent."""
        entry = self._entries.pop(snapshot, None)
        if entry is None:
            return
        del entry.stored[snapshot]
        if entry.stored:
            return
        self._remove(entry)
        if is_evicted:
            hashed = np.array([entry.hashed], dtype=np.uint64)
            self._evicted.add(hashed + self._scope(entry.owner, entry.origin))

    def notice(self, keys: PrefixKeys, owner: int, origin: Origin) -> None:
        """A prompt with these keys is prefilled: later ones that begin alike are told how far (Found)."""
        tags = self._tags(self._hash.of(keys.words), owner, origin)
        self._seen.add(tags[:-1] | _WENT_ON)
        last = tags[-1:]
        self._seen.add(last[~self._seen.holds(last | _WENT_ON)])

    # -- what is asked for -----------------------------------------------------------------------------------------

    def find(self, keys: PrefixKeys, owner: int, origin: Origin) -> Found:
        """What is stored of an owner's prompt, from which an origin can go on. Changes nothing."""
        hashes = self._hash.of(keys.words)
        matches = self._matches(keys, hashes, owner)
        usable = [e.prefix for e in matches if e.origin == origin and e.position < keys.prompt_tokens]
        prefixes: list[StoredPrefix] = []
        for prefix in usable:
            if not prefixes or prefix.tier < prefixes[-1].tier:
                prefixes.append(prefix)
        shared = self._shared_position(keys, hashes, owner, origin)
        if prefixes:
            return Found(tuple(prefixes), None, shared if shared > prefixes[0].position else 0)
        return Found((), self._why_missed(keys, hashes, owner, origin, matches), shared)

    def _matches(self, keys: PrefixKeys, hashes: NDArray[np.uint64], owner: int) -> list[_Entry]:
        """The owner's entries of these keys, of any origin, the deepest first."""
        table = self._tables.get(owner)
        if table is None:
            return []
        found = list(map(table.get, hashes.tolist()))
        return [
            entry
            for i in range(len(found) - 1, -1, -1)
            for entry in found[i] or ()
            if entry.key == keys.words[i].tobytes()
        ]

    def _why_missed(
        self, keys: PrefixKeys, hashes: NDArray[np.uint64], owner: int, origin: Origin, matches: list[_Entry]
    ) -> Miss:
        """The reason of a miss. matches: of these keys, none of them usable."""
        usable = keys.num_usable
        if usable == 0:
            return Miss.TOO_SHORT
        if self._evicted.holds(hashes[:usable] + self._scope(owner, origin)).any():
            return Miss.EVICTED
        if any(entry.origin == origin for entry in matches):
            return Miss.TOO_SHORT
        others = {e.origin.fingerprint for e in matches if e.position < keys.prompt_tokens}
        if not others:
            return Miss.NEVER_STORED
        return Miss.OTHER_ADAPTER if origin.fingerprint in others else Miss.OTHER_FINGERPRINT

    def _shared_position(self, keys: PrefixKeys, hashes: NDArray[np.uint64], owner: int, origin: Origin) -> int:
        """The deepest usable position up to which an earlier prompt was the same, if that one went on otherwise."""
        tags = self._tags(hashes[: keys.num_usable], owner, origin)
        went_on = self._seen.holds(tags | _WENT_ON)
        seen = np.flatnonzero(went_on | self._seen.holds(tags))
        if len(seen) == 0 or not went_on[seen[-1]]:
            return 0
        return int(keys.positions[seen[-1]])

    def _tags(self, hashes: NDArray[np.uint64], owner: int, origin: Origin) -> NDArray[np.uint64]:
        """What seen keys are remembered by, uint64 [N]; the lowest bit is free."""
        return (hashes + self._scope(owner, origin)) & ~_WENT_ON

    def _scope(self, owner: int, origin: Origin) -> np.uint64:
        return self._hash.of_scope(str(owner).encode(), origin.fingerprint, origin.adapter_hash)

    def _remove(self, entry: _Entry) -> None:
        table = self._tables[entry.owner]
        table[entry.hashed].remove(entry)
        if not table[entry.hashed]:
            del table[entry.hashed]
        if not table:
            del self._tables[entry.owner]

    def check_integrity(self, held: Container[bytes]) -> None:
        """Raise ValueError unless each snapshot is held and found by its key alone, and the bound holds."""
        listed = [
            (entry.owner, entry.hashed) == (owner, hashed) and self._entries.get(snapshot) is entry and snapshot in held
            for owner, table in self._tables.items()
            for hashed, entries in table.items()
            for entry in entries
            for snapshot in entry.stored
        ]
        if not all(listed) or len(listed) != len(self._entries) or len(listed) > self.num_entries:
            raise ValueError("prefix index: keys and snapshots disagree, or there are too many")
