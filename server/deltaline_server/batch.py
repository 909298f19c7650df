"""What the engine computes at once, and what it makes of it. Plain arrays: no protobuf, no torch, no rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class StepBatch:
    """What the engine computes at once: rows of one span, short rows first.

    control int32 [7, N + 1]: query_start_loc, read_line, write_line, num_committed, num_replayed, draft_half, position
    (the layout of deltaline_kernels.Rows); a row whose lines are -1 is padding, which nobody wants. hidden: buffers
    [tokens, width] of one dtype, at least one but on ranks other than 0, that follow one another in row order; they
    stay where the requests have them. wanted int64 [rows]: packed tokens whose outputs go back, None for all. into:
    memory of clients where the outputs of each buffer are to be in the end [rows, width], empty unless all have such a
    place; an engine that can write there saves a copy. copied_bytes: of what crosses between host and device, what is
    not in shared memory. adapter_places int32 [N]: where each row's adapter is on the device, -1 for none; None when no
    row has one. new_pages int32 [3, n]: line, place and page of those that begin within the rows' tokens, so that the
    device knows each before it needs it; None where the span's layers have none. waypoints int32 [3, n]: rows that are
    not short, multiples of WAYPOINT_TOKENS tokens of each, and the lines to which the layers write what the row is
    there; None for none.
    """

    span: int
    control: NDArray[np.int32]
    num_short: int
    hidden: tuple[NDArray[Any], ...]
    wanted: NDArray[np.int64] | None
    into: tuple[NDArray[Any], ...] = ()
    copied_bytes: int = 0
    adapter_places: NDArray[np.int32] | None = None
    new_pages: NDArray[np.int32] | None = None
    waypoints: NDArray[np.int32] | None = None

    @property
    def num_tokens(self) -> int:
        """T, the tokens of all rows."""
        return int(self.control[0, -1])


@dataclass(slots=True)
class BatchResult:
    """What the engine made of a StepBatch.

    hidden [wanted, width] in the batch's dtype; is_placed: it is empty, all outputs lie in the batch's `into`. finite
    bool [N]: False where an output of the row (wanted or not) is not finite, so that its state can't be trusted.
    failed: the computation raised; nothing of the batch's state can be trusted and hidden is empty. is_lost: nor any.
    """

    hidden: NDArray[Any]
    finite: NDArray[np.bool_]
    copy_in_s: float = 0.0
    compute_s: float = 0.0
    copy_out_s: float = 0.0
    failed: bool = False
    is_lost: bool = False
    is_placed: bool = False


def sound_rows(starts: NDArray[np.int32], sizes: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Tell for each row whether all its outputs are finite; starts `[N + 1]`: the rows' first tokens, sizes `[T]`."""
    finite = np.isfinite(sizes)
    if finite.all():
        return np.ones(len(starts) - 1, dtype=np.bool_)
    bad = np.concatenate(([0], np.cumsum(~finite)))
    sound: NDArray[np.bool_] = bad[starts[1:]] == bad[starts[:-1]]
    return sound
