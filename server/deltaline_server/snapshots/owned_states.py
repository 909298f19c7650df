"""The states of a tier by owner: which of them make way, so that nobody's are pushed out by all that another stores.

Knows what states take, not where they lie.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar


class Owned(Protocol):
    """A state in a tier. num_uses: of those that read it now. Neither its owner's name nor its bytes ever change."""

    is_pinned: bool
    num_uses: int

    @property
    def owner(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...


S = TypeVar("S", bound=Owned)


class OwnedStates(Mapping[bytes, S]):
    """States by id."""

    def __init__(self) -> None:
        self._states: dict[bytes, S] = {}
        self._bytes = Counter[str]()
        # By owner, the least recently used first: the number of the use.
        self._uses: dict[str, OrderedDict[bytes, int]] = {}
        self._numbers = itertools.count()

    def __getitem__(self, id: bytes) -> S:
        return self._states[id]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def add(self, id: bytes, state: S) -> None:
        """A state is there, of an id that is not; that is its first use."""
        self._states[id] = state
        self._bytes[state.owner] += state.num_bytes
        self._uses.setdefault(state.owner, OrderedDict())[id] = next(self._numbers)

    def use(self, id: bytes) -> None:
        """A state that is there is used."""
        uses = self._uses[self._states[id].owner]
        uses[id] = next(self._numbers)
        uses.move_to_end(id)

    def remove(self, id: bytes) -> S:
        """A state is there no more. Raises KeyError where it was not."""
        state = self._states.pop(id)
        self._bytes[state.owner] -= state.num_bytes
        del self._uses[state.owner][id]
        if not self._uses[state.owner]:
            del self._uses[state.owner], self._bytes[state.owner]
        return state

    def victims(self, num_bytes: int) -> list[bytes]:
        """The states that make way for so many bytes, or all that may where these are fewer; pinned ones and those that
        are read stay. Removes none.

        Owners who hold an equal share of the bytes or more go first, in the order of use; who holds less loses nothing
        as long as any of theirs may go.
        """
        held, total, victims = self._bytes.copy(), self._bytes.total(), list[bytes]()
        idle = {owner: filter(self._may_go, uses) for owner, uses in self._uses.items()}
        # Of each owner, the next.
        nearest = {owner: id for owner, ids in idle.items() if (id := next(ids, None)) is not None}
        while num_bytes > 0 and nearest:
            large = [owner for owner in nearest if held[owner] * len(held) >= total]
            owner = min(large or nearest, key=lambda owner: self._uses[owner][nearest[owner]])
            id = nearest.pop(owner)
            victims.append(id)
            taken = self._states[id].num_bytes
            num_bytes, total = num_bytes - taken, total - taken
            held[owner] -= taken
            if not held[owner]:
                del held[owner]
            if (following := next(idle[owner], None)) is not None:
                nearest[owner] = following
        return victims

    def _may_go(self, id: bytes) -> bool:
        state = self._states[id]
        return not state.is_pinned and not state.num_uses
