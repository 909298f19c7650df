"""A captured state: all that the next step of a sequence reads, at one position, which nobody writes any more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from deltaline_server.tables.ledger import CommittedProgress
from deltaline_server.tables.lines import NULL_LINE
from deltaline_server.tables.prefixes.cost import Tier
from deltaline_server.tables.sequence_adapters import BoundAdapter


@dataclass(frozen=True, eq=False)
class CapturedState:
    """A state, as held by whoever has it: a reference of each line and of each page, and of its adapter.

    read_line int64 [spans]: the line that the next step of each span reads, NULL_LINE where none was done yet.
    draft_half int64 [spans]: the half of its drafts that is replayed. pages int32 [n]: those of its tokens, empty where
    no layer keeps keys.
    """

    tier: ClassVar[Tier] = Tier.DEVICE
    read_line: NDArray[np.int64]
    draft_half: NDArray[np.int64]
    pages: NDArray[np.int32]
    progress: CommittedProgress
    adapter: BoundAdapter

    @property
    def position(self) -> int:
        """Its tokens."""
        return self.progress.position

    @property
    def num_lines(self) -> int:
        """Lines that it holds, each counted once."""
        return len(np.unique(self.read_line[self.read_line != NULL_LINE]))


@dataclass(frozen=True)
class StoredState:
    """A state that lies in a tier beside the device, and takes so many bytes there. adapter: of number NO_ADAPTER."""

    tier: Tier
    position: int
    adapter: BoundAdapter
    num_bytes: int


def count_references(
    num_lines: int, read_line: NDArray[np.int64], write_line: NDArray[np.int64], captured: Iterable[CapturedState]
) -> NDArray[np.int64]:
    """The references that lines should have, int64 [num_lines + 1]: of who writes them (int64 [slots]), of spans that
    read one which is not their own (int64 [spans, slots]), and of captured states."""
    references = np.zeros(num_lines + 1, dtype=np.int64)
    np.add.at(references, write_line, 1)
    np.add.at(references, read_line[read_line != write_line], 1)
    for state in captured:
        np.add.at(references, state.read_line, 1)
    references[NULL_LINE] = 0
    return references
