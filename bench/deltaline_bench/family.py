"""A suite's table: rows of shapes and bars, and the family that makes the inputs and the sides of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import torch

from deltaline_bench.bar import Bar
from deltaline_bench.batch import AnyBatch
from deltaline_bench.case import ERROR_LIMITS, Case, CaseMaker, Side, SideMaker
from deltaline_bench.peers import Peers

S = TypeVar("S")
B = TypeVar("B", bound=AnyBatch)


@dataclass(frozen=True)
class Row(Generic[S]):
    """A row of a table: a case before its inputs exist.

    Args:
        needed, aim: the bars of a Case.
        beside: the name of a side to compare with, and the shape of which our own first side makes it; bars in
            multiples look at it.
        max_error: None for that of the dtype.
    """

    name: str
    what: str
    shape: S
    needed: tuple[Bar, ...] = ()
    aim: tuple[Bar, ...] = ()
    beside: tuple[str, S] | None = None
    max_error: float | None = None


@dataclass(frozen=True)
class Family(Generic[S, B]):
    """What the rows of a table have alike.

    Args:
        batch: makes the inputs of a shape, of a name that seeds them, on a device.
        ours, peers: the sides of a Case.
    """

    batch: Callable[[S, str, torch.device], B]
    ours: Callable[[B], Mapping[str, SideMaker]]
    peers: Callable[[B, Peers], Mapping[str, SideMaker]]

    def cases(self, rows: Sequence[Row[S]]) -> dict[str, CaseMaker]:
        """Return the makers of the rows' cases, by name."""
        return {row.name: partial(self.make, row) for row in rows}

    def make(self, row: Row[S], device: torch.device, found: Peers) -> Case:
        """Make the inputs and the truth of a row."""
        batch = self.batch(row.shape, row.name, device)
        case = Case(
            name=row.name,
            what=row.what,
            shapes=batch.words(),
            dtype=batch.shape.dtype,
            num_bytes=batch.num_bytes(),
            num_flops=batch.num_flops(),
            max_error=ERROR_LIMITS[batch.shape.dtype] if row.max_error is None else row.max_error,
            expected=batch.expected(),
            ours=self.ours(batch),
            peers=self.peers(batch, found),
            needed=row.needed,
            aim=row.aim,
        )
        if row.beside is None:
            return case
        name, shape = row.beside
        return self._compare(case, name, self.batch(shape, f"{row.name} beside", device))

    def _compare(self, case: Case, name: str, batch: B) -> Case:
        """Put our own first side on another batch beside the peers; its tensors have its name before theirs."""
        make_own = next(iter(self.ours(batch).values()))

        def make() -> Side:
            side = make_own()
            return replace(side, outputs=lambda done: {f"{name}: {key}": x for key, x in side.outputs(done).items()})

        expected = {f"{name}: {key}": x for key, x in batch.expected().items()}
        return replace(case, expected={**case.expected, **expected}, peers={name: make, **case.peers})
