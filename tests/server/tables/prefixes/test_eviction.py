"""Which snapshot gives way: never a pinned one, what is passed before tails and branch points, and as a model says."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from rigs.seeds import seeds

from deltaline_server.tables.prefixes.eviction import Eviction


def victims(eviction: Eviction, count: int, *, by_size: bool = False) -> list[bytes]:
    """At most so many of those that may give way, the one that it costs least to lose in front: as Room chooses."""
    costs = eviction.costs(by_size=by_size)
    places = np.argsort(costs, kind="stable")[: int(np.isfinite(costs).sum())]
    return [eviction.snapshot_at(place) for place in places[:count].tolist()]


def chain(eviction: Eviction, *names: bytes, step: int = 100, owner: int = 0) -> None:
    """Snapshots that continue one another, the first one nothing."""
    for i, name in enumerate(names):
        eviction.stored(name, step * (i + 1), names[i - 1] if i else None, owner=owner)


def test_without_snapshots_or_with_pinned_ones_alone_nothing_gives_way() -> None:
    eviction = Eviction(2)
    assert victims(eviction, 3) == []
    chain(eviction, b"a", b"b")
    eviction.pin(b"a", True)
    assert victims(eviction, 3) == [b"b"]
    eviction.pin(b"b", True)
    assert victims(eviction, 3) == []
    eviction.pin(b"a", False)
    assert victims(eviction, 3) == [b"a"]


def test_what_a_conversation_has_passed_gives_way_before_its_end() -> None:
    eviction = Eviction(8)
    chain(eviction, b"old tail", step=300)
    chain(eviction, b"passed 1", b"passed 2", b"tail")
    assert set(victims(eviction, 2)) == {b"passed 1", b"passed 2"}


def test_branch_points_stay_longer_than_what_is_passed() -> None:
    eviction = Eviction(8)
    eviction.stored(b"branch", 100, None)
    eviction.stored(b"passed", 100, None)
    for name, continues in ((b"a", b"branch"), (b"b", b"branch"), (b"c", b"passed")):
        eviction.stored(name, 200, continues)
    assert victims(eviction, 1) == [b"passed"]


def test_use_refreshes_what_was_used_and_not_the_path_to_it() -> None:
    eviction = Eviction(8)
    for name in (b"x", b"y"):
        chain(eviction, name + b" passed", name)
    for _ in range(20):
        eviction.consumed(b"x")
    assert set(victims(eviction, 2)) == {b"x passed", b"y passed"}
    assert victims(eviction, 4)[2:] == [b"y", b"x"]


def test_of_alike_snapshots_the_one_that_saves_fewer_tokens_gives_way() -> None:
    eviction = Eviction(8)
    chain(eviction, b"root", step=1000)
    eviction.stored(b"deep", 1100, b"root")
    eviction.stored(b"own", 500, None)
    eviction.stored(b"clock", 1, None)
    eviction.pin(b"clock", True)
    for _ in range(12):  # so that all are of one age
        eviction.consumed(b"clock")
    assert victims(eviction, 3)[-1] == b"own"
    eviction.gone(b"root")  # nothing is left to fall back on
    assert victims(eviction, 2) == [b"own", b"deep"]


def test_what_takes_more_of_what_is_short_gives_way_first() -> None:
    eviction = Eviction(4)
    eviction.stored(b"small", 100, None, size=1.0)
    eviction.stored(b"large", 100, None, size=10.0)
    assert victims(eviction, 2, by_size=True) == [b"large", b"small"]


def test_the_measured_outweighs_the_assumed() -> None:
    """Where conversations go on from the prompt's end, and never from what was generated, the latter gives way."""
    draw, eviction = random.Random(0), Eviction(64)
    sources: list[bytes | None] = [None] * 32
    for turn in range(1500):
        i = draw.randrange(len(sources))
        source = sources[i]
        if source is not None and source in eviction:
            eviction.consumed(source)
        while len(eviction) > 62:
            eviction.gone(*victims(eviction, 1))
        prompt, generated = b"prompt %d" % turn, b"generated %d" % turn
        eviction.stored(prompt, 200 * turn + 100, source)
        eviction.stored(generated, 200 * turn + 200, prompt)
        sources[i] = prompt
    # There are lines for all prompts' ends; by what is assumed alone 9 of the 32 are there.
    assert sum(source in eviction for source in sources if source) >= 28


def test_who_floods_the_server_loses_their_own() -> None:
    eviction = Eviction(32)
    for i in range(4):
        eviction.stored(b"quiet %d" % i, 10, None, owner=1)
    for i in range(200):
        while len(eviction) >= 32:
            (victim,) = victims(eviction, 1)
            assert not victim.startswith(b"quiet")
            eviction.gone(victim)
        eviction.stored(b"flood %d" % i, 10_000, None, owner=2)
        eviction.consumed(b"flood %d" % i)
    for i in range(200):
        if b"flood %d" % i in eviction:
            eviction.pin(b"flood %d" % i, True)
    (victim,) = victims(eviction, 1)
    assert victim.startswith(b"quiet")  # all others are pinned


def test_who_holds_less_than_a_share_keeps_even_what_saves_nothing() -> None:
    eviction = Eviction(4)
    eviction.stored(b"quiet", 0, None, owner=1)
    for name in (b"flood", b"flood, pinned"):
        eviction.stored(name, 100, None, owner=2)
    eviction.pin(b"flood, pinned", True)
    assert victims(eviction, 2) == [b"flood", b"quiet"]


def test_wrong_calls_change_nothing() -> None:
    eviction = Eviction(2)
    chain(eviction, b"a", b"b")
    for name in (b"a", b"c"):
        with pytest.raises(ValueError, match="expected one that is not here, and a free place"):
            eviction.stored(name, 1, None)
    eviction.consumed(b"unknown")
    eviction.gone(b"unknown")
    eviction.gone(b"a")
    eviction.gone(b"a")
    assert len(eviction) == 1 and victims(eviction, 3) == [b"b"]
    eviction.stored(b"c", 1, b"a")  # which is gone
    assert len(eviction) == 2


@dataclass
class Node:
    position: int
    parent: bytes | None
    owner: int
    size: float
    touched: int
    continued: int = 0
    is_pinned: bool = False


@dataclass
class Model:
    """The same in plain Python, one snapshot after the other."""

    num_places: int
    now: int = 0
    counted: int = 0
    halved: int = 0
    nodes: dict[bytes, Node] = field(default_factory=dict)
    uses: Counter[tuple[int, bool, int]] = field(default_factory=Counter)
    events: Counter[tuple[int, bool, int]] = field(default_factory=Counter)

    def kind(self, node: Node) -> tuple[int, bool, int]:
        parent = self.nodes[node.parent] if node.parent else None
        is_passed_by = parent is not None and parent.touched > node.touched and parent.continued < 4
        return min(node.continued, 3), is_passed_by, (self.now - node.touched).bit_length()

    def tick(self) -> None:
        self.now += 1
        since = self.now - self.counted
        if since >= max(16, len(self.nodes) // 32):
            self.counted = self.now
            for node in self.nodes.values():
                self.events[self.kind(node)] += since
        if self.now - self.halved >= 8 * self.num_places:
            self.halved = self.now
            for each in (self.uses, self.events):
                for kind in each:
                    each[kind] /= 2  # type: ignore[assignment]

    def worth(self, name: bytes, by_size: bool) -> float:
        node = self.nodes[name]
        kind = continued, is_passed_by, age = self.kind(node)
        assumed = {0: (1.0, 0.1), 1: (0.1, 0.05)}.get(continued, (1.0, 0.5))[is_passed_by] / 2**age
        chance = (self.uses[kind] + 64 * assumed) / (self.events[kind] + 64)
        saved = node.position - (self.nodes[node.parent].position if node.parent else 0)
        return float(chance * max(saved, 0) ** 0.5 / (node.size if by_size else 1.0))

    def can_go(self) -> list[bytes]:
        free = [name for name, node in self.nodes.items() if not node.is_pinned]
        held = Counter(node.owner for node in self.nodes.values())
        above = [name for name in free if held[self.nodes[name].owner] * len(held) >= len(self.nodes)]
        return above or free


def check(eviction: Eviction, model: Model, count: int, by_size: bool) -> None:
    """Compare who gives way; of equals either may."""
    candidates = model.can_go()
    chosen = victims(eviction, min(count, len(candidates)), by_size=by_size)
    assert len(set(chosen)) == len(chosen) == min(count, len(candidates)) and set(chosen) <= set(candidates)
    least = sorted(model.worth(name, by_size) for name in candidates)[: len(chosen)]
    np.testing.assert_allclose([model.worth(name, by_size) for name in chosen], least, rtol=1e-9)


@pytest.mark.parametrize("seed", seeds(10))
def test_random_operations_agree_with_a_model(seed: int) -> None:
    draw, eviction, model = random.Random(seed), Eviction(60), Model(60)
    names: list[bytes | None] = [None]
    for number in range(4000):
        action, known = draw.random(), list(model.nodes)
        if action < 0.4:
            if len(eviction) == 60:
                first = victims(eviction, 1)
                if not first:
                    continue
                assert not model.nodes[first[0]].is_pinned
                remove(eviction, model, *first)
            name, continues = b"%016d" % number, draw.choice(names[-40:])
            owner, size = draw.choice([1, 1, 1, 2, 3]), draw.choice([1.0, 2.5])
            parent = model.nodes.get(continues) if continues else None
            position = (parent.position if parent else 0) + draw.randint(0, 500)
            eviction.stored(name, position, continues, owner=owner, size=size)
            model.tick()
            model.nodes[name] = Node(position, continues if parent else None, owner, size, model.now)
            if parent:
                parent.continued += 1
            names.append(name)
        elif action < 0.8 and known:
            name = draw.choice(known[-20:])
            eviction.consumed(name)
            model.tick()
            model.uses[model.kind(model.nodes[name])] += 1
            model.nodes[name].touched = model.now
        elif action < 0.9 and known:
            name, is_pinned = draw.choice(known), draw.random() < 0.3
            eviction.pin(name, is_pinned)
            model.nodes[name].is_pinned = is_pinned
        elif known:
            remove(eviction, model, draw.choice(known))
        if number % 7 == 0:
            check(eviction, model, draw.choice([1, 2, 10, 100]), draw.choice([False, True]))
        assert set(victims(eviction, 100)) == {name for name, node in model.nodes.items() if not node.is_pinned}
    assert len(eviction) == len(model.nodes)


def remove(eviction: Eviction, model: Model, name: bytes) -> None:
    eviction.gone(name)
    over = model.nodes.pop(name)
    for node in model.nodes.values():
        if node.parent == name:
            node.parent = over.parent
