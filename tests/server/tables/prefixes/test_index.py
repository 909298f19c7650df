"""The index of prefix keys: what is found, why something isn't, and that nobody finds what is another's."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from rigs.seeds import seeds

from deltaline_server.tables.prefixes.cost import StoredPrefix, Tier
from deltaline_server.tables.prefixes.index import ENTRY_BYTES, Found, Miss, Origin, PrefixIndex
from deltaline_server.tables.prefixes.keys import KeyHash, PrefixKeys

ORIGIN = Origin(b"weights", b"")
ADAPTED, OTHER = Origin(b"weights", b"adapter"), Origin(b"other weights", b"")


def make(num_entries: int = 64) -> PrefixIndex:
    return PrefixIndex(num_entries, bytes(16), evicted_places=2**20, seen_places=2**20)


def prompt(text: str, end: int | None = None, every: int = 1) -> PrefixKeys:
    """Keys of a prompt of a token for each letter, of which it has the first `end`."""
    positions = range(every, len(text) + 1, every)
    return PrefixKeys.of([text[:i].encode().rjust(32) for i in positions], positions, end or len(text))


def stored(name: str, position: int, tier: Tier = Tier.DEVICE) -> StoredPrefix:
    return StoredPrefix(position, name.encode(), tier, 100)


def test_the_deepest_state_strictly_before_the_end_is_found() -> None:
    index = make()
    for position in (2, 4, 6):
        assert index.register(prompt("abcdef"), 1, ORIGIN, stored(f"s{position}", position))
    assert index.find(prompt("abcdefg"), 1, ORIGIN).prefixes == (stored("s6", 6),)
    assert index.find(prompt("abcdef"), 1, ORIGIN).prefixes == (stored("s4", 4),)
    assert index.find(prompt("abcdxx"), 1, ORIGIN).prefixes == (stored("s4", 4),)
    assert index.find(prompt("abxdef"), 1, ORIGIN) == Found((stored("s2", 2),), None, 0)
    index.check_integrity({b"s2", b"s4", b"s6"})
    with pytest.raises(ValueError, match="prefix index"):
        index.check_integrity({b"s2", b"s4"})


def test_a_nearer_state_is_told_beside_a_deeper_one() -> None:
    index, keys = make(), prompt("abcdefgh")
    tiers = {1: Tier.DEVICE, 2: Tier.DEVICE, 3: Tier.FILE, 4: Tier.HOST, 5: Tier.FILE, 6: Tier.FILE}
    for position, tier in tiers.items():
        index.register(keys, 1, ORIGIN, stored(f"s{position}", position, tier))
    expected = stored("s6", 6, Tier.FILE), stored("s4", 4, Tier.HOST), stored("s2", 2)
    assert index.find(keys, 1, ORIGIN).prefixes == expected
    index.moved(b"s6", Tier.DEVICE, 7)
    assert index.find(keys, 1, ORIGIN).prefixes == (replace(stored("s6", 6), num_bytes=7),)
    index.moved(b"unknown", Tier.DEVICE, 7)


def test_a_miss_has_the_reason_that_is_nearest_to_a_hit() -> None:
    index, keys = make(), prompt("abcd")
    assert index.find(keys, 1, ORIGIN).miss is Miss.NEVER_STORED
    assert index.find(prompt("a"), 1, ORIGIN).miss is Miss.TOO_SHORT
    assert index.find(prompt("", 5), 1, ORIGIN).miss is Miss.TOO_SHORT
    index.register(keys, 1, OTHER, stored("other", 2))
    assert index.find(keys, 1, ORIGIN).miss is Miss.OTHER_FINGERPRINT
    index.register(keys, 1, ADAPTED, stored("adapted", 3))
    assert index.find(keys, 1, ORIGIN).miss is Miss.OTHER_ADAPTER
    index.register(keys, 1, ORIGIN, stored("end", 4))
    assert index.find(keys, 1, ORIGIN).miss is Miss.TOO_SHORT
    index.register(keys, 1, ORIGIN, stored("mine", 1))
    assert index.find(keys, 1, ORIGIN).miss is None
    index.forget(b"mine", is_evicted=False)
    assert index.find(keys, 1, ORIGIN).miss is Miss.TOO_SHORT
    index.register(keys, 1, ORIGIN, stored("mine", 1))
    index.forget(b"mine", is_evicted=True)
    index.forget(b"mine", is_evicted=True)
    assert index.find(keys, 1, ORIGIN).miss is Miss.EVICTED
    assert index.find(keys, 1, OTHER).prefixes == (stored("other", 2),)


def test_another_principal_s_states_are_as_if_they_were_not() -> None:
    index, keys = make(), prompt("abcdef")
    empty = index.find(keys, 2, ORIGIN)
    index.notice(keys, 1, ORIGIN)
    for i, origin in enumerate((ORIGIN, ADAPTED, OTHER)):
        index.register(keys, 1, origin, stored(f"s{i}", 3))
    index.register(keys, 1, ORIGIN, stored("gone", 4))
    index.forget(b"gone", is_evicted=True)
    assert index.find(keys, 2, ORIGIN) == empty == Found((), Miss.NEVER_STORED, 0)
    assert index.register(keys, 2, ORIGIN, stored("mine", 3))
    assert index.find(keys, 1, ORIGIN).prefixes[0].snapshot == b"s0"
    assert index.find(keys, 2, ORIGIN).prefixes[0].snapshot == b"mine"


def test_keys_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyHash, "of", lambda self, words: np.zeros(len(words), dtype=np.uint64))
    index = make()
    assert index.register(prompt("abc"), 1, ORIGIN, stored("a", 1))
    assert index.register(prompt("xyz"), 1, ORIGIN, stored("x", 1))
    assert index.find(prompt("abc"), 1, ORIGIN).prefixes == (stored("a", 1),)
    assert index.find(prompt("uvw"), 1, ORIGIN).prefixes == ()


def test_of_two_snapshots_of_one_prefix_the_nearer_is_found_else_the_first() -> None:
    index, keys = make(), prompt("abcd")
    assert index.register(keys, 1, ORIGIN, stored("host", 2, Tier.HOST))
    assert index.register(keys, 1, ORIGIN, stored("host again", 2, Tier.HOST))
    assert index.register(keys, 1, ORIGIN, stored("device", 2))
    assert index.register(keys, 1, ORIGIN, stored("file", 2, Tier.FILE))
    assert index.find(keys, 1, ORIGIN).prefixes == (stored("device", 2),)
    index.moved(b"device", Tier.FILE, 100)
    assert index.find(keys, 1, ORIGIN).prefixes == (stored("host", 2, Tier.HOST),)
    index.moved(b"device", Tier.DEVICE, 100)
    assert len(index) == 4
    index.forget(b"host", is_evicted=True)
    assert index.find(keys, 1, ORIGIN).prefixes == (stored("device", 2),)


def test_where_the_one_that_was_found_is_over_another_of_its_prefix_is_found() -> None:
    index, keys = make(), prompt("abcd")
    index.register(keys, 1, ORIGIN, stored("first", 2))
    index.register(keys, 1, ORIGIN, stored("second", 2))
    index.register(keys, 1, ORIGIN, stored("host", 2, Tier.HOST))
    index.forget(b"first", is_evicted=True)
    assert index.find(keys, 1, ORIGIN) == Found((stored("second", 2),), None, 0)
    index.moved(b"second", Tier.FILE, 100)
    assert index.find(keys, 1, ORIGIN).prefixes == (stored("host", 2, Tier.HOST),)
    index.forget(b"host", is_evicted=True)
    assert index.find(keys, 1, ORIGIN).prefixes == (stored("second", 2, Tier.FILE),)
    index.forget(b"second", is_evicted=True)
    assert index.find(keys, 1, ORIGIN).miss is Miss.EVICTED
    assert len(index) == 0
    index.check_integrity(set())


def test_what_comes_under_a_key_of_thousands_is_not_compared_with_them() -> None:
    """As that of a system prompt in the files that a restart finds."""
    index, keys, num_compared = make(1000), prompt("abcd"), 0

    class Compared(int):
        def __lt__(self, other: int) -> bool:
            nonlocal num_compared
            num_compared += 1
            return int(self) < int(other)

    tier: Any = Compared(Tier.FILE)
    for number in range(1000):
        index.register(keys, 1, ORIGIN, stored(f"{number}", 2, tier))
    assert num_compared == 0
    assert index.find(keys, 1, ORIGIN).prefixes[0].snapshot == b"0" and num_compared < 1000


def test_what_has_no_key_or_no_room_is_not_registered() -> None:
    index, keys = make(2), prompt("abcdef", every=2)
    assert not index.register(keys, 1, ORIGIN, stored("odd", 3))
    assert index.register(keys, 1, ORIGIN, stored("a", 2))
    with pytest.raises(ValueError, match="expected one that is not registered"):
        index.register(keys, 1, ORIGIN, stored("a", 4))
    assert index.register(keys, 1, ORIGIN, stored("b", 4))
    assert not index.register(keys, 1, ORIGIN, stored("c", 6))
    index.forget(b"a", is_evicted=False)
    assert index.register(keys, 1, ORIGIN, stored("c", 6))
    index.check_integrity({b"b", b"c"})


def test_a_prompt_is_told_where_an_earlier_one_went_on_otherwise() -> None:
    index = make()
    index.notice(prompt("system, one"), 1, ORIGIN)
    assert index.find(prompt("system, two"), 1, ORIGIN).shared_position == len("system, ")
    assert index.find(prompt("system, one more"), 1, ORIGIN).shared_position == 0  # it was gone on from
    assert index.find(prompt("system, one"), 1, ORIGIN).shared_position == len("system, on")  # a state there would do
    index.notice(prompt("system, "), 1, ORIGIN)  # one that ends there
    assert index.find(prompt("system, two"), 1, ORIGIN).shared_position == len("system, ")
    assert index.find(prompt("System, two"), 1, ORIGIN).shared_position == 0
    assert index.find(prompt("system, two"), 1, ADAPTED).shared_position == 0
    index.register(prompt("system, "), 1, ORIGIN, stored("s", 4))
    assert index.find(prompt("system, two"), 1, ORIGIN) == Found((stored("s", 4),), None, 8)
    index.register(prompt("system, "), 1, ORIGIN, stored("t", 8))
    assert index.find(prompt("system, two"), 1, ORIGIN) == Found((stored("t", 8),), None, 0)


def test_an_entry_takes_no_more_than_sizing_counts() -> None:
    keys = [PrefixKeys.of([b"%064d" % i], [1], 2) for i in range(2000)]
    tracemalloc.start()
    try:
        index = make(len(keys))
        before = tracemalloc.get_traced_memory()[0]
        for i, each in enumerate(keys):
            index.register(each, i, ORIGIN, stored(f"{i:016}", 1))
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(index) == len(keys)
    assert used / len(keys) < ENTRY_BYTES


@dataclass
class Model:
    """The same in plain Python: everything by owner, origin and the text before a position."""

    entries: dict[tuple[int, Origin, str], list[StoredPrefix]] = field(default_factory=dict)
    evicted: set[tuple[int, Origin, str]] = field(default_factory=set)
    seen: dict[tuple[int, Origin, str], bool] = field(default_factory=dict)

    def find(self, text: str, end: int, owner: int, origin: Origin) -> Found:
        before = [text[:i] for i in range(min(len(text), end - 1), 0, -1)]
        prefixes: list[StoredPrefix] = []
        for at in before:
            found = self.nearest((owner, origin, at))
            if found and (not prefixes or found.tier < prefixes[-1].tier):
                prefixes.append(found)
        known = [at for at in before if (owner, origin, at) in self.seen]
        shared = len(known[0]) if known and self.seen[owner, origin, known[0]] else 0
        if prefixes:
            return Found(tuple(prefixes), None, shared if shared > prefixes[0].position else 0)
        return Found((), self.why(text, before, owner, origin), shared)

    def nearest(self, at: tuple[int, Origin, str]) -> StoredPrefix | None:
        return min(self.entries.get(at, ()), key=lambda one: one.tier, default=None)

    def why(self, text: str, before: list[str], owner: int, origin: Origin) -> Miss:
        if not before:
            return Miss.TOO_SHORT
        if any((owner, origin, at) in self.evicted for at in before):
            return Miss.EVICTED
        if text != before[0] and (owner, origin, text) in self.entries:
            return Miss.TOO_SHORT
        others = {each.fingerprint for who, each, at in self.entries if who == owner and at in before}
        if not others:
            return Miss.NEVER_STORED
        return Miss.OTHER_ADAPTER if origin.fingerprint in others else Miss.OTHER_FINGERPRINT


@pytest.mark.parametrize("seed", seeds(10))
def test_random_operations_agree_with_a_model(seed: int) -> None:
    draw, index, model = random.Random(seed), make(40), Model()
    named: dict[bytes, tuple[int, Origin, str]] = {}
    hits = misses = 0
    for number in range(3000):
        text = "".join(draw.choices("ab", k=draw.randint(1, 6)))
        end = len(text) + draw.randint(0, 1)
        keys, owner, origin = prompt(text, end), draw.randint(1, 3), draw.choice([ORIGIN, ADAPTED, OTHER])
        action = draw.random()
        if action < 0.3:
            name, position, tier = b"%016d" % number, draw.randint(1, len(text)), draw.choice(list(Tier))
            at, new = (owner, origin, text[:position]), StoredPrefix(position, name, tier, number)
            is_full = len(named) == index.num_entries
            if not is_full:
                model.entries.setdefault(at, []).append(new)
                named[name] = at
            assert index.register(keys, owner, origin, new) is not is_full
        elif action < 0.5 and named:
            name, is_evicted = draw.choice(list(named)), draw.random() < 0.3
            index.forget(name, is_evicted=is_evicted)
            at = named.pop(name)
            model.entries[at] = [one for one in model.entries[at] if one.snapshot != name]
            if not model.entries[at]:
                del model.entries[at]
                model.evicted |= {at} if is_evicted else set()
        elif action < 0.6 and named:
            name, tier = draw.choice(list(named)), draw.choice(list(Tier))
            index.moved(name, tier, number)
            model.entries[named[name]] = [
                replace(one, tier=tier, num_bytes=number) if one.snapshot == name else one
                for one in model.entries[named[name]]
            ]
        elif action < 0.65:
            index.notice(keys, owner, origin)
            for i in range(1, len(text) + 1):
                at = (owner, origin, text[:i])
                model.seen[at] = model.seen.get(at, False) or i < len(text)
        found = index.find(keys, owner, origin)
        assert found == model.find(text, end, owner, origin)
        hits, misses = hits + bool(found.prefixes), misses + (found.miss is not None)
        index.check_integrity(named)
    assert min(hits, misses) > 300
