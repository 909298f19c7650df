"""A recurrence over the rows of an engine, whose states are the lines of one tensor; picks the path by device.

On the CPU the states in use are copied to a pool of their own and back, as line 0 of the native operation is the zero
state. Does not know which of the engines' functions was called.
"""

from typing import Protocol, Self

import torch
from torch import Tensor

from deltaline_kernels.compat.rows import EngineRows, read_back
from deltaline_kernels.rows import NUM_FIELDS, Rows


class Operands(Protocol):
    """Packed tokens of a recurrence, with its own operation over `Rows`."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def record(self) -> int:
        """Values of one draft token."""

    def empty_output(self) -> Tensor:
        """Return an output `[T, HV, V]` without contents."""

    def column(self, t: int, length: int) -> Self:
        """Return token t of each of the rows of `length` tokens."""

    def gather(self, index: Tensor) -> Self:
        """Return the tokens `index`, in that order."""

    def compute(self, state: Tensor, drafts: Tensor, rows: Rows) -> Tensor:
        """Run the operation on the CPU; return o `[T, HV, V]`; mutates `state`."""

    def launch(self, state: Tensor, drafts: Tensor, rows: Rows, o: Tensor, line_shift: int) -> None:
        """Launch the operation on a GPU, where line i of `rows` is line i - line_shift; mutates `state` and o."""


def advance(operands: Operands, state: Tensor, rows: EngineRows, *, keep: bool, chunked: bool) -> Tensor:
    """Run the rows' tokens; return o `[T, HV, V]`, zero for skipped rows, unspecified for tokens of no row.

    Args:
        state: `[lines, HV, V, K]` fp32 or bf16, contiguous. Mutated if `keep`: the lines of rows with tokens.
        chunked: compute in chunks, not token by token (on a GPU; the CPU path decides by itself).
    """
    run = advance_cpu if operands.device.type == "cpu" else _advance_triton
    return run(operands, state, rows, keep=keep, chunked=chunked)


def advance_cpu(operands: Operands, state: Tensor, rows: EngineRows, *, keep: bool, chunked: bool) -> Tensor:
    """Do what `advance` does, on the CPU."""
    del chunked
    # Nothing is speculative, so that the columns of a line and the width of a filter do not count.
    found = read_back(rows, columns=0, width=1)
    live = [(line, row) for line, row in enumerate(found, 1) if not row.skipped]
    pool = state.new_zeros((len(found) + 1, *state.shape[1:]))
    control = torch.full((NUM_FIELDS, len(found) + 1), -1, dtype=torch.int32)
    control[0] = torch.tensor([found[0].begin if found else 0, *(row.end for row in found)])
    control[3, :-1] = control[0].diff()
    control[4:] = 0
    lines = torch.tensor([line for line, _ in live], dtype=torch.int64)
    # Without a history a line is zero, as it is made.
    control[1:3, lines - 1] = lines.to(torch.int32)
    if rows.history is True:
        pool[lines] = state[torch.tensor([row.read for _, row in live], dtype=torch.int64)]
    drafts = torch.empty((pool.shape[0], 2, 0, operands.record), dtype=torch.float32)
    longest = max((row.length for row in found), default=0)
    o = operands.compute(pool, drafts, Rows(control, 0, 1, longest))
    if keep:
        state[torch.tensor([row.write for _, row in live], dtype=torch.int64)] = pool[lines]
    return o


def _advance_triton(operands: Operands, state: Tensor, rows: EngineRows, *, keep: bool, chunked: bool) -> Tensor:
    # Imported here: only this path needs triton, which is installed on Linux alone.
    from deltaline_kernels.compat.recurrence_launch import advance_triton

    return advance_triton(operands, state, rows, keep=keep, chunked=chunked)
