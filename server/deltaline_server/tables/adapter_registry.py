"""The adapters in host memory: their names, who uses them, and which goes when memory is short.

Registered is not resident: what is here may or may not have a place on the device (adapter_places.py). Knows names,
hashes and sizes; neither files nor tensors. All methods belong to one thread.

A name is its owner's: others may give it to another adapter. What SHARED owns all may use, behind what is their own.

A sequence binds an adapter by name when it opens, and has its number from then on: a number means one content forever,
while a name may be given to another content once the first is unloaded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum

from deltaline.sizes import spelled_bytes
from deltaline_server.errors import Reason, RequestError, shown
from deltaline_server.log import event
from deltaline_server.principal import ANONYMOUS, SHARED, Principal
from deltaline_server.tables.adapter_places import AdapterPlaces, Content

_log = logging.getLogger(__name__)

# Also bounds the reply that lists them.
MAX_ADAPTERS = 4096


class AdapterState(IntEnum):
    """The state of an adapter; the values of deltaline.v1.AdapterState."""

    REGISTERED = 1
    RESIDENT = 2
    DRAINING = 3


@dataclass(frozen=True)
class AdapterDescription:
    """One adapter as its owner sees it; the fields of deltaline.v1.Adapter."""

    name: str
    content_hash: bytes
    rank: int
    num_bytes: int
    state: AdapterState
    is_pinned: bool
    num_sequences: int
    num_elsewhere: int
    is_shared: bool = False


@dataclass
class _Entry:
    owner: Principal
    name: str
    content: Content
    is_pinned: bool
    num_sequences: int = 0
    is_draining: bool = False


class AdapterRegistry:
    """Adapters of at most `limit_bytes` together. When memory is short the least recently used one of the owner goes
    that no sequence has bound, no batch uses and nobody pinned.

    Attributes: places, those of adapters on the device; load_s, how long the loads of those registered took together.
    """

    def __init__(self, limit_bytes: int, places: AdapterPlaces) -> None:
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self.num_loaded = self.num_evicted = 0
        self.load_s = 0.0
        self.places = places
        self._num_reserved = 0
        self._next_number = 1
        # By number, the least recently used first.
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._numbers: dict[tuple[int, str], int] = {}

    @property
    def num_registered(self) -> int:
        """Adapters that are held, those that drain included."""
        return len(self._entries)

    # -- loading ---------------------------------------------------------------------------------------------------

    def known_hash(self, name: str, owner: Principal = ANONYMOUS) -> bytes | None:
        """The content that has a name of an owner's now."""
        number = self._numbers.get((owner.number, name))
        return None if number is None else self._entries[number].content.content_hash

    def reserve(self, num_bytes: int, owner: Principal = ANONYMOUS) -> None:
        """Take memory for an adapter that is about to be read; others of its owner may go for it.

        `register` or `unreserve` must follow. Raises RequestError ADAPTER_BYTES_EXHAUSTED or QUOTA_EXCEEDED; then
        nothing has changed.
        """
        victims: list[int] = []
        free = self.limit_bytes - self.used_bytes
        own = sum(entry.content.num_bytes for entry in self._entries.values() if entry.owner.number == owner.number)
        quota = 0 if owner.quotas is None else owner.quotas.adapter_bytes
        num_adapters = len(self._entries) + self._num_reserved
        for number, entry in self._entries.items():
            is_within = not quota or own + num_bytes <= quota
            if is_within and free >= num_bytes and num_adapters - len(victims) < MAX_ADAPTERS:
                break
            if entry.owner.number != owner.number:
                continue
            if not (entry.is_pinned or entry.num_sequences or self.places.is_busy(number)):
                victims.append(number)
                free += entry.content.num_bytes
                own -= entry.content.num_bytes
        if owner.quotas is not None:
            owner.quotas.check("adapter_bytes", own, num_bytes)
        if free < num_bytes or num_adapters - len(victims) >= MAX_ADAPTERS:
            raise RequestError(
                Reason.ADAPTER_BYTES_EXHAUSTED,
                self._why_not(num_bytes, free),
                retry_after_s=1.0 if num_bytes <= self.limit_bytes else None,
            )
        for number in victims:
            self._remove(number, "adapter evicted")
            self.num_evicted += 1
        self.used_bytes += num_bytes
        self._num_reserved += 1

    def unreserve(self, num_bytes: int) -> None:
        """Give back what `reserve` took."""
        self.used_bytes -= num_bytes
        self._num_reserved -= 1

    def register(
        self, name: str, content: Content, is_pinned: bool, owner: Principal = ANONYMOUS
    ) -> AdapterDescription:
        """Keep an adapter whose `num_bytes` are reserved, under a name that is free."""
        if (owner.number, name) in self._numbers:
            raise ValueError("name: expected one that is free, got one that is taken")
        number = self._next_number
        self._next_number += 1
        self._num_reserved -= 1
        self._entries[number] = _Entry(owner, name, content, is_pinned)
        self._numbers[owner.number, name] = number
        self.num_loaded += 1
        return self._describe(number)

    def confirm(
        self, name: str, content_hash: bytes, is_pinned: bool, owner: Principal = ANONYMOUS
    ) -> AdapterDescription:
        """The same adapter was loaded again under a name that is taken; whether it is pinned may change.

        Raises RequestError ADAPTER_EXISTS when the content is another.
        """
        number = self._number(name, owner)
        entry = self._entries[number]
        if entry.content.content_hash != content_hash:
            raise RequestError(
                Reason.ADAPTER_EXISTS,
                "the name has another content: unload it first, or choose another name",
                field="name",
            )
        entry.is_pinned = is_pinned
        self._entries.move_to_end(number)
        return self._describe(number)

    # -- use -------------------------------------------------------------------------------------------------------

    def bind(self, name: str, count: int = 1, principal: Principal = ANONYMOUS) -> int:
        """`count` sequences of a principal open with the adapter: returns its number. `release` must follow for each of
        them.

        Raises RequestError ADAPTER_UNKNOWN.
        """
        number = self.named(name, principal)
        self._entries[number].num_sequences += count
        return number

    def named(self, name: str, principal: Principal) -> int:
        """The number of the adapter that has a name to a principal now. Raises RequestError ADAPTER_UNKNOWN."""
        owner = principal if (principal.number, name) in self._numbers else SHARED
        return self._number(name, owner, ": load it first")

    def bind_content(self, content_hash: bytes, principal: Principal) -> int:
        """The same by what it is, whatever name it has to the principal now. Raises RequestError ADAPTER_UNKNOWN."""
        for number, entry in self._entries.items():
            is_named = entry.owner.number in (principal.number, SHARED.number) and not entry.is_draining
            if is_named and entry.content.content_hash == content_hash:
                entry.num_sequences += 1
                return number
        raise RequestError(Reason.ADAPTER_UNKNOWN, "no adapter has the content that the state was made with: load it")

    def hold(self, number: int, count: int = 1) -> None:
        """So many more sequences or captured states have an adapter that one has bound: as `bind` does."""
        self._entries[number].num_sequences += count

    def release(self, number: int, count: int = 1) -> None:
        """`count` sequences that had bound the adapter are over."""
        entry = self._entries.get(number)
        if entry is None or entry.num_sequences < count:
            raise ValueError(f"adapter: expected one that {count} sequences have bound, got {number}")
        entry.num_sequences -= count
        if entry.num_sequences:
            return
        self._entries.move_to_end(number)
        self.places.cancel(number)
        if entry.is_draining:
            self._remove(number, "adapter drained")

    def content(self, number: int) -> Content:
        """What a number that is bound means."""
        return self._entries[number].content

    def name(self, number: int) -> str:
        """The name that a number that is bound was loaded under; it may mean another by now."""
        return self._entries[number].name

    def bound(self) -> dict[int, int]:
        """The numbers that sequences have bound, and how many."""
        return {number: entry.num_sequences for number, entry in self._entries.items() if entry.num_sequences}

    # -- the end ---------------------------------------------------------------------------------------------------

    def unload(self, name: str, drain: bool, owner: Principal = ANONYMOUS) -> int:
        """Free an owner's name at once, and the adapter too unless sequences use it; returns how many do.

        With `drain` those go on with it, and it is freed after the last of them. Raises RequestError ADAPTER_UNKNOWN;
        without `drain` ADAPTER_IN_USE if there are any; then nothing has changed.
        """
        number = self._number(name, owner)
        entry = self._entries[number]
        if entry.num_sequences and not drain:
            raise RequestError(
                Reason.ADAPTER_IN_USE,
                f"open sequences that use the adapter: {entry.num_sequences}; close them, or unload it with drain",
                metadata={"sequences": str(entry.num_sequences)},
                retry_after_s=1.0,
            )
        del self._numbers[owner.number, name]
        entry.is_draining = True
        if entry.num_sequences:
            self._tell("adapter drains", entry.content, sequences=entry.num_sequences)
        else:
            self._remove(number, "adapter unloaded")
        return entry.num_sequences

    def describe(self, principal: Principal = ANONYMOUS) -> list[AdapterDescription]:
        """The adapters that are a principal's, or shared, by name, its own first; those that drain are behind the one
        that has their name now."""
        owners = principal.number, SHARED.number
        seen = {i: entry for i, entry in self._entries.items() if entry.owner.number in owners}
        numbers = sorted(
            seen, key=lambda i: (seen[i].name, seen[i].owner.number == SHARED.number, seen[i].is_draining, i)
        )
        return [self._describe(number) for number in numbers]

    def check_integrity(self) -> None:
        """Raise ValueError unless names, numbers, bytes and places agree."""
        self.places.check_integrity()
        live = {number: entry for number, entry in self._entries.items() if not entry.is_draining}
        named = {(entry.owner.number, entry.name): number for number, entry in live.items()}
        if named != self._numbers:
            raise ValueError("adapter registry: names and adapters disagree")
        held = sum(entry.content.num_bytes for entry in self._entries.values())
        if not 0 <= held <= self.used_bytes <= self.limit_bytes or (not self._num_reserved and held != self.used_bytes):
            raise ValueError("adapter registry: bytes and adapters disagree")
        for entry in self._entries.values():
            if entry.num_sequences < 0 or (entry.is_draining and not entry.num_sequences):
                raise ValueError("adapter registry: an adapter is held for nobody")

    def _number(self, name: str, owner: Principal, hint: str = "") -> int:
        number = self._numbers.get((owner.number, name))
        if number is None:
            raise RequestError(Reason.ADAPTER_UNKNOWN, f"no adapter has the name {shown(name)}{hint}", field="name")
        return number

    def _why_not(self, num_bytes: int, free: int) -> str:
        """Why `num_bytes` can't be had when `free` can, and what to do."""
        asked, limit = spelled_bytes(num_bytes), spelled_bytes(self.limit_bytes)
        if num_bytes > self.limit_bytes:
            return f"the adapter takes {asked}, more than the {limit} of the server: start it with more --adapter-bytes"
        if num_bytes <= free:
            return f"the server keeps {MAX_ADAPTERS} adapters at most, all in use, pinned or being loaded: unload some"
        return (
            f"the adapter takes {asked}, and {spelled_bytes(free)} of {limit} can be had, as the rest is in use, "
            "pinned or being loaded: unload adapters, or start the server with more --adapter-bytes"
        )

    def _remove(self, number: int, message: str) -> None:
        """Forget an adapter; the log has the message."""
        entry = self._entries.pop(number)
        self.used_bytes -= entry.content.num_bytes
        named = entry.owner.number, entry.name
        if self._numbers.get(named) == number:
            del self._numbers[named]
        self.places.forget(number)
        self._tell(message, entry.content)

    def _tell(self, message: str, content: Content, **fields: int) -> None:
        """Log what became of an adapter. Its name is left out, as a client chose it; the content tells which it is."""
        event(
            _log,
            message,
            content=content.content_hash.hex()[:16],
            rank=content.rank,
            size_bytes=content.num_bytes,
            **fields,
        )

    def _describe(self, number: int) -> AdapterDescription:
        entry = self._entries[number]
        is_ready = self.places.is_ready(number)
        state = AdapterState.RESIDENT if is_ready else AdapterState.REGISTERED
        return AdapterDescription(
            name=entry.name,
            content_hash=entry.content.content_hash,
            rank=entry.content.rank,
            num_bytes=entry.content.num_bytes,
            state=AdapterState.DRAINING if entry.is_draining else state,
            is_pinned=entry.is_pinned,
            num_sequences=entry.num_sequences,
            num_elsewhere=entry.content.num_elsewhere,
            is_shared=entry.owner.number == SHARED.number,
        )
