"""Prompts' keys, what a server has stored of a prompt, and what a prefill leaves there. Frozen values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from operator import index
from typing import Any, Literal

import numpy as np

from deltaline.v1 import prefix_pb2
from deltaline_client._exceptions import ProtocolError
from deltaline_client._integers import check_integer
from deltaline_client._seconds import milliseconds

Reuse = Literal["always", "if_cheaper"]
"""When an open begins with a state that is found: with the deepest one, or with what is there soonest."""

REUSE: dict[str, prefix_pb2.ReusePolicy.ValueType] = {
    "always": prefix_pb2.REUSE_POLICY_ALWAYS,
    "if_cheaper": prefix_pb2.REUSE_POLICY_IF_CHEAPER,
}
_MAX_KEYS = 4096


class Tier(IntEnum):
    """Where a snapshot's state lies."""

    DEVICE = prefix_pb2.TIER_DEVICE
    HOST = prefix_pb2.TIER_HOST
    FILE = prefix_pb2.TIER_FILE

    @classmethod
    def from_proto(cls, tier: int) -> Tier:
        """Read a server's answer. Raises ProtocolError."""
        try:
            return cls(tier)
        except ValueError as error:
            raise ProtocolError("the tier of a snapshot is not known to this client") from error


class PrefixMiss(IntEnum):
    """Why no state is stored of a prompt: of several reasons the one that is nearest to a hit."""

    NEVER_STORED = prefix_pb2.PREFIX_MISS_NEVER_STORED
    EVICTED = prefix_pb2.PREFIX_MISS_EVICTED
    OTHER_FINGERPRINT = prefix_pb2.PREFIX_MISS_OTHER_FINGERPRINT
    OTHER_ADAPTER = prefix_pb2.PREFIX_MISS_OTHER_ADAPTER
    TOO_SHORT = prefix_pb2.PREFIX_MISS_TOO_SHORT


@dataclass(frozen=True)
class Prefix:
    """Keys of a prompt: keys[i], 16 .. 64 bytes, stands for its first positions[i] tokens.

    positions: 1 .. prompt_tokens, increasing; 4,096 at most. Whoever makes keys: equal keys at equal positions have to
    mean equal tokens, all those before the position. Model and adapter need not be in them. Raises ValueError,
    TypeError.
    """

    keys: tuple[bytes, ...]
    positions: tuple[int, ...]
    prompt_tokens: int

    def __post_init__(self) -> None:
        check_integer("prompt_tokens", self.prompt_tokens, 1)
        if not len(self.keys) == len(self.positions) <= _MAX_KEYS:
            got = f"{len(self.keys)} keys, {len(self.positions)} positions"
            raise ValueError(f"keys: expected one for each position, {_MAX_KEYS} at most; got {got}")
        if not all(16 <= len(key) <= 64 for key in self.keys):
            raise ValueError(f"keys: expected 16 .. 64 bytes each, got {sorted(set(map(len, self.keys)))}")
        if not all(a < b for a, b in zip((0, *self.positions), (*self.positions, self.prompt_tokens + 1), strict=True)):
            raise ValueError(f"positions: expected them in 1 .. {self.prompt_tokens}, increasing, got {self.positions}")

    @classmethod
    def of_tokens(cls, ids: Any, *, every: int = 64, at: Iterable[int] = ()) -> Prefix:
        """Keys of a prompt by its token ids, one or more: behind each `every` tokens, at its end, and at other places.

        A key is the BLAKE2b hash, of 16 bytes, of all ids before its position, each as 8 bytes, the lowest first. So it
        does not depend on the places that are asked for, nor on what follows. Prompts whose hidden states say more than
        their ids do (pictures) need keys that do too. Raises TypeError; ValueError, also where there would be more than
        4,096 keys: then `every` must be larger.
        """
        tokens = np.asarray(ids)
        if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
            raise ValueError(f"ids: expected one or more whole numbers, got {tokens.dtype} {list(tokens.shape)}")
        check_integer("every", every, 1)
        count, places = len(tokens), set(at)
        if wrong := [place for place in places if not 0 < place <= count]:
            raise ValueError(f"at: expected places in 1 .. {count}, got {wrong[0]}")
        positions = sorted({*range(every, count, every), *places, count})
        running, done, keys, body = hashlib.blake2b(digest_size=16), 0, list[bytes](), tokens.astype("<i8")
        for position in positions:
            running.update(body[done:position].tobytes())
            keys.append(running.digest())
            done = position
        return cls(tuple(keys), tuple(positions), count)

    def message(self, positions: Iterable[int] | None = None) -> prefix_pb2.PrefixKeys:
        """The keys at some positions, those that have one, as they go on the wire; None for all."""
        wanted = None if positions is None else set(positions)
        pairs = [one for one in zip(self.keys, self.positions, strict=True) if wanted is None or one[1] in wanted]
        return prefix_pb2.PrefixKeys(
            key=[key for key, _ in pairs], position=[place for _, place in pairs], prompt_tokens=self.prompt_tokens
        )


@dataclass(frozen=True)
class PrefixMatch:
    """What is stored of a prompt.

    snapshot_id: of the state that it can go on from, None for none. position: its tokens, which need not be computed.
    tier: where it lies. restore_s, compute_s: how long it takes to restore it and to compute the rest of the prompt on
    an idle server, as that estimates; None where it has computed too little to say. miss: why there is none; None
    where there is one, or where to compute is cheaper. shared_position: up to where an earlier prompt was the same and
    then went on otherwise, if no state is as deep, 0 for none: a waypoint there would serve both.
    """

    snapshot_id: bytes | None
    position: int
    tier: Tier | None
    restore_s: float
    compute_s: float | None
    miss: PrefixMiss | None
    shared_position: int

    @classmethod
    def from_proto(cls, message: prefix_pb2.PrefixMatch) -> PrefixMatch:
        """Read the server's answer. Raises ProtocolError for a tier or a miss that this version does not know."""
        if message.miss not in {0, *map(int, PrefixMiss)}:
            raise ProtocolError("why nothing is stored of a prompt is not known to this client")
        return cls(
            snapshot_id=message.snapshot_id or None,
            position=message.position,
            tier=Tier.from_proto(message.tier) if message.snapshot_id else None,
            restore_s=message.restore_us / 1e6,
            compute_s=message.compute_us / 1e6 or None,
            miss=PrefixMiss(message.miss) if message.miss else None,
            shared_position=message.shared_position,
        )


@dataclass(frozen=True)
class Waypoints:
    """Where a prefill leaves its sequence's state on its way, as snapshots; counted in tokens of the whole sequence.

    tokens: positions, increasing; every: each multiple of so many, 0 for none, not beside `tokens`; at_end: where the
    prefill ends. Places that are no tokens of this prefill are passed over: those behind, when it began with a stored
    state, and those that a later one comes to. lease_s: how long each snapshot lives, default the server's. pinned:
    whether they stay when memory is short. prefix: the prompt's keys; a state is found by the one of its position.
    Raises ValueError and TypeError.
    """

    tokens: tuple[int, ...] = ()
    every: int = 0
    at_end: bool = False
    lease_s: float | None = None
    pinned: bool = False
    prefix: Prefix | None = None

    def __post_init__(self) -> None:
        try:  # any sequence, and any integers
            object.__setattr__(self, "tokens", tuple(map(index, self.tokens)))
            object.__setattr__(self, "every", index(self.every))
        except TypeError as error:
            message = f"tokens, every: expected whole numbers, got {self.tokens!r}, {self.every!r}"
            raise TypeError(message) from error
        for name, flag in (("at_end", self.at_end), ("pinned", self.pinned)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}: expected True or False, got {flag!r}")
        if not isinstance(self.prefix, Prefix | None):
            raise TypeError(f"prefix: expected a Prefix, or None for none, got {type(self.prefix).__name__}")
        if not all(a < b for a, b in zip((0, *self.tokens), self.tokens, strict=False)):
            raise ValueError(f"tokens: expected positions from 1 on, increasing, got {self.tokens}")
        if self.every < 0 or (self.every and self.tokens):
            raise ValueError(f"every: expected 1 or more without `tokens`, or 0, got {self.every}")
        milliseconds("lease_s", self.lease_s)

    def positions(self, begin: int, end: int) -> list[int]:
        """The places behind the tokens begin .. end of a sequence."""
        places = list(self.tokens)
        if self.every:
            places = list(range(begin - begin % self.every + self.every, end + 1, self.every))
        if self.at_end and end not in places:
            places.append(end)
        return sorted(place for place in places if begin < place <= end)


@dataclass(frozen=True)
class Waypoint:
    """What became of a place of Waypoints: the snapshot's id, or None and why there is none (a reason's name)."""

    position: int
    snapshot_id: bytes | None
    skipped: str | None

    @classmethod
    def from_proto(cls, message: prefix_pb2.Waypoint) -> Waypoint:
        """Read the server's answer."""
        return cls(message.position, message.snapshot_id or None, message.skipped or None)
