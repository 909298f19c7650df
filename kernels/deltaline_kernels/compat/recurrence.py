"""A recurrence over the rows of an engine, whose states are the lines of one tensor. Never waits for a GPU."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from deltaline_kernels.compat.arguments import EngineRows
from deltaline_kernels.compat.rows import LINE_SHIFT, place_rows
from deltaline_kernels.rows import Rows, StateLines


class HasRecord(Protocol):
    """Sizes of a layer's heads."""

    @property
    def record(self) -> int:
        """Values of one draft token."""


class Inputs(Protocol):
    """Packed tokens of a recurrence."""

    @property
    def heads(self) -> HasRecord: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def empty_output(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return room for the outputs, `[T, HV, V]`, of the tokens' dtype or another."""


AnyInputs = TypeVar("AnyInputs", bound=Inputs)
# The operation itself: writes the rows' outputs to its last argument and mutates the lines.
Operation = Callable[[AnyInputs, StateLines, Rows, Tensor], None]


def advance(
    run: Operation[AnyInputs],
    inputs: AnyInputs,
    state: Tensor,
    rows: EngineRows,
    *,
    written: Tensor | None = None,
    keep: bool = True,
    chunked: bool = False,
    o: Tensor | None = None,
) -> Tensor:
    """Run the rows' tokens; return o `[T, HV, V]`, zero for skipped rows, unspecified for tokens of no row.

    Args:
        state: `[lines, HV, V, K]`, a line stride is fine. Mutated if `keep`: the lines of rows with tokens, and with
            `rows.moves` of those without.
        written: None, or likewise what is mutated in place of `state`.
        chunked: compute as long rows, in chunks or many tokens at once (on a GPU; the CPU path decides by itself).
        o: contiguous, of a dtype that `run` writes; None: a new one.
    """
    if o is None:
        o = inputs.empty_output()
    if rows.num_rows == 0 or (o.numel() == 0 and not rows.moves):
        return o
    placed = place_rows(rows, inputs.num_tokens, inputs.device, keep=keep)
    if rows.token_lines is None:
        num_short = 0 if chunked else placed.num_rows
        max_short = max(rows.longest, 1) if rows.waypoints is None else 1
        placed = Rows(placed.control, num_short, max_short, rows.longest, waypoints=rows.waypoints)
    # No row verifies: drafts are neither read nor written.
    drafts = torch.empty((1, 2, 1, inputs.heads.record), dtype=torch.float32, device=inputs.device)
    run(inputs, StateLines(state, drafts, LINE_SHIFT, written), placed, o)
    return o
