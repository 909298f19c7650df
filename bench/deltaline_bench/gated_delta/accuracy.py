"""A bar on errors: what our side may lose is what a named peer loses on the same inputs, tensor by tensor.

Knows sides and their errors, neither times nor what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from deltaline_bench.bar import Bar, Kind, Score
from deltaline_bench.case import Case, Side, SideMaker
from deltaline_bench.error import compare


class Errors:
    """The relative error of each tensor of each side, as found when the side is checked.

    Args:
        expected: fp32 tensors by name.
    """

    def __init__(self, expected: Mapping[str, Tensor]) -> None:
        self._expected = expected
        self._found: dict[tuple[str, str], float] = {}

    def watch(self, sides: Mapping[str, SideMaker]) -> dict[str, SideMaker]:
        """Return `sides`, each of which leaves its errors here when its outputs are looked at."""
        return {name: partial(self._make, name, make) for name, make in sides.items()}

    def _make(self, name: str, make: SideMaker) -> Side:
        side = make()

        def outputs(done: Any) -> Mapping[str, Tensor]:
            tensors = side.outputs(done)
            for tensor, actual in tensors.items():
                self._found[name, tensor] = compare({tensor: actual}, self._expected).relative
            return tensors

        return replace(side, outputs=outputs)

    def least(self, sides: tuple[str, ...], tensor: str) -> float | None:
        """Return the smallest error of `tensor` among `sides`; None where none of them has a finite one."""
        errors = (self._found.get((side, tensor), math.nan) for side in sides)
        return min(filter(math.isfinite, errors), default=None)


@dataclass(frozen=True, kw_only=True)
class NoWorse(Bar):
    """The error of one tensor of our side is at most a peer's; the text has both, once they are known.

    Args:
        ours: our side. peer: what the text calls the peer. sides: the peer's; the best of them counts.
    """

    kind: Kind = field(default=Kind.PEERS, init=False)
    value: float = field(default=1.0, init=False)
    errors: Errors
    tensor: str
    ours: str
    peer: str
    sides: tuple[str, ...]

    def __str__(self) -> str:
        ours, theirs = self._both()
        return f"error of {self.tensor}{_figure(ours)} <= {self.peer}'s{_figure(theirs)}"

    def is_met(self, score: Score) -> bool | None:
        """Say whether ours is no larger; None where the peer has no error."""
        ours, theirs = self._both()
        if theirs is None:
            return None
        return ours is not None and ours <= theirs

    def _both(self) -> tuple[float | None, float | None]:
        return self.errors.least((self.ours,), self.tensor), self.errors.least(self.sides, self.tensor)


def hold_errors_to(case: Case, peer: str, sides: tuple[str, ...]) -> Case:
    """Return the case with a needed bar for each tensor of each side of ours; the others are those of NoWorse."""
    errors = Errors(case.expected)
    bars = tuple(
        NoWorse(errors=errors, tensor=tensor, ours=name, peer=peer, sides=sides)
        for name in case.ours
        for tensor in case.expected
    )
    return replace(case, ours=errors.watch(case.ours), peers=errors.watch(case.peers), needed=(*case.needed, *bars))


def _figure(error: float | None) -> str:
    return "" if error is None else f" {error:.2e}"
