"""How inference engines take rows through a recurrence, in plain loops: the truth that their functions are tested
against. What a token does to a state is told by the recurrence; shares nothing with what it tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Tokens(Protocol):
    """Packed tokens of a recurrence."""

    @property
    def values(self) -> Tensor:
        """What is of the outputs' shape, `[T, heads, dim]`."""

    def advance(self, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output `[heads, dim]` and the state after token t, all in fp64."""


def field_rows(tokens: Tokens, starts: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor]:
    """Return o `[T, heads, dim]`, NaN where no row is, and the states of the N rows after them, both fp64."""
    o = torch.full(tokens.values.shape, torch.nan, dtype=torch.float64)
    after = states.double()
    for i in range(len(starts) - 1):
        h = after[i]
        for t in range(starts[i], starts[i + 1]):
            o[t], h = tokens.advance(t, h)
        after[i] = h
    return o, after


def field_slots(tokens: Tokens, starts: Sequence[int], pool: Tensor, slots: Sequence[int], pad: int = -1) -> Tensor:
    """Return o fp64, NaN where no row is; mutates the states `pool`, rounded once per row."""
    o = torch.full(tokens.values.shape, torch.nan, dtype=torch.float64)
    for i, slot in enumerate(slots):
        begin, end = starts[i], starts[i + 1]
        if slot < 0 or slot == pad:
            o[begin:end] = 0
        elif end > begin:
            h = pool[slot].double()
            for t in range(begin, end):
                o[t], h = tokens.advance(t, h)
            pool[slot] = h.to(pool.dtype)
    return o


def field_table(
    tokens: Tokens,
    starts: Sequence[int],
    pool: Tensor,
    table: Sequence[Sequence[int]],
    accepted: Sequence[int] | None,
    pad: int = -1,
) -> Tensor:
    """Return o fp64, NaN where no row is; mutates the states `pool`. What is rounded is stored, and does not go on."""
    o = torch.full(tokens.values.shape, torch.nan, dtype=torch.float64)
    for i, slots in enumerate(table):
        begin, end = starts[i], starts[i + 1]
        count = 1 if accepted is None else accepted[i]
        first = slots[min(max(count, 1), len(slots)) - 1]
        used = [first, *slots[: end - begin]]
        if end > begin and (min(used) < 0 or pad in used):
            o[begin:end] = 0
            continue
        h = pool[first].double()
        for t in range(begin, end):
            o[t], h = tokens.advance(t, h)
            pool[slots[t - begin]] = h.to(pool.dtype)
    return o


def field_moves(
    tokens: Tokens,
    starts: Sequence[int],
    pool: Tensor,
    begins: Sequence[int],
    final: Tensor,
    targets: Sequence[Sequence[int]],
    *,
    each: bool,
) -> Tensor:
    """Return o fp64, NaN where no row is, of rows that begin with slots of `pool` and leave states in those of `final`.

    Mutates `final`: of row i the last state goes to slot `targets[i][0]`, or `each` one to a slot of its own. Below 0 a
    beginning skips the row, and a target keeps nothing.
    """
    o = torch.full(tokens.values.shape, torch.nan, dtype=torch.float64)
    before = pool.clone()
    for i, begin in enumerate(begins):
        if begin < 0:
            o[starts[i] : starts[i + 1]] = 0
            continue
        h = before[begin].double()
        for j, t in enumerate(range(starts[i], starts[i + 1])):
            o[t], h = tokens.advance(t, h)
            if each and targets[i][j] >= 0:
                final[targets[i][j]] = h.to(final.dtype)
        if not each and targets[i][0] >= 0:
            final[targets[i][0]] = h.to(final.dtype)
    return o
