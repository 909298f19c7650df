"""One step request on its way through the server: what was asked, and what became of it.

Plain arrays: no protobuf (request.py makes these, reply.py reads them), no torch, no policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Refusal
from deltaline_server.regions import OutputMemory

# The exponent bits of each type of hidden states: all of them are set in infinities and NaNs, and in nothing else.
EXPONENTS = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}


class RowKind(IntEnum):
    """What a row's tokens are; the values of deltaline.v1.RowKind."""

    PREFILL = 1
    DECODE = 2
    VERIFY = 3


class OutputRows(IntEnum):
    """Which output rows a reply carries; the values of deltaline.v1.OutputRows."""

    ALL = 1
    LAST = 2
    NONE = 3


class RowOutcome(IntEnum):
    """What became of a row; the values of deltaline.v1.RowOutcome."""

    EXECUTED = 1
    REPLAYED = 2
    JOINED = 3
    REFUSED = 4


@dataclass(frozen=True)
class StepRequest:
    """N rows for one span, already checked as a request: lengths agree, offsets are sound, no handle twice.

    handle uint64 [N]; kind uint8 [N]; step int64 [N]; position int64 [N]; accepted int32 [N], -1 for no commit;
    query_start_loc int64 [N + 1]; hidden [T, hidden] in the server's dtype.
    """

    server_epoch: int
    span: int
    handle: NDArray[np.uint64]
    kind: NDArray[np.uint8]
    step: NDArray[np.int64]
    position: NDArray[np.int64]
    accepted: NDArray[np.int32]
    query_start_loc: NDArray[np.int64]
    hidden: NDArray[Any]
    output: OutputRows
    priority: int
    deadline_s: float | None
    """When the rows must have begun, on the scheduler's monotonic clock; None for no limit."""
    client: str = ""
    """Who asks, as far as the connection tells; clients of one priority get equal shares of the prefill tokens."""
    is_input_shared: bool = False
    """Whether `hidden` lies in memory that the client shares, and has promised not to touch."""
    output_memory: OutputMemory | None = None
    """Where the outputs go, with room for all that `output` asks for; None for memory of the server's own."""

    @property
    def num_rows(self) -> int:
        return len(self.handle)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, int64 [N]."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return int(self.hidden.shape[1]) * self.hidden.dtype.itemsize

    @property
    def message_bytes(self) -> int:
        """Most bytes of a tensor that the request or its reply carries itself."""
        is_shared = self.is_input_shared and self.output_memory is not None
        return 0 if is_shared else self.hidden.nbytes

    def finite_rows(self) -> NDArray[np.bool_] | None:
        """Which rows have finite values only, bool [N]; None when all have."""
        # Integers order as magnitudes do: infinities and NaNs are the largest of each sign, read as signed integers
        # those above 0, as unsigned ones those below. Two passes, no array in between.
        bits = np.dtype(f"u{self.hidden.dtype.itemsize}")
        exponent = EXPONENTS[self.hidden.dtype.name]
        words = self.hidden.view(bits).reshape(-1)
        sign = 1 << 8 * bits.itemsize - 1
        if np.maximum.reduce(words) < sign | exponent and np.maximum.reduce(words.view(f"i{bits.itemsize}")) < exponent:
            return None
        infinite = (self.hidden.view(bits) & bits.type(exponent)) == exponent
        return ~np.logical_or.reduceat(infinite.any(axis=1), self.query_start_loc[:-1])

    @cached_property
    def output_counts(self) -> NDArray[np.int64]:
        """Output rows that the reply carries for each row that runs, int64 [N]."""
        if self.output is OutputRows.ALL:
            return self.lengths
        return np.full(self.num_rows, 1 if self.output is OutputRows.LAST else 0, dtype=np.int64)


@dataclass
class StepTiming:
    """Seconds spent per stage (sums over the chunks), and the size of the last batch that carried a row of the step."""

    queue_s: float = 0.0
    copy_in_s: float = 0.0
    compute_s: float = 0.0
    copy_out_s: float = 0.0
    batch_rows: int = 0
    batch_tokens: int = 0


@dataclass(frozen=True)
class StepResult:
    """What became of each row of a StepRequest.

    outcome uint8 [N] (RowOutcome); position int64 [N] after the step; output_start_loc int64 [N + 1] into
    hidden [rows, hidden]; refusals by row index; timing None when nothing was computed for it.
    """

    outcome: NDArray[np.uint8]
    position: NDArray[np.int64]
    output_start_loc: NDArray[np.int64]
    hidden: NDArray[Any]
    refusals: dict[int, Refusal] = field(default_factory=dict)
    timing: StepTiming | None = None
    output_memory: OutputMemory | None = None
    """Where `hidden` lies, None for memory of the server's own. In it refused rows have a place as well."""


@dataclass(frozen=True)
class StepBatch:
    """What the engine computes at once: rows of one span, short rows first.

    control int32 [6, N + 1]: query_start_loc, read_line, write_line, num_committed, num_replayed, draft_half (the
    layout of deltaline_kernels.Rows). hidden: pieces [tokens, hidden] of one dtype, at least one, that follow one
    another in row order; they stay where the requests have them. wanted int64 [rows]: packed tokens whose outputs go
    back, None for all. into [rows, hidden]: memory of a client where these outputs are to be in the end, if they go to
    one place; an engine that can write there saves a copy, and returns it as the result's hidden.
    """

    span: int
    control: NDArray[np.int32]
    num_short: int
    hidden: tuple[NDArray[Any], ...]
    wanted: NDArray[np.int64] | None
    into: NDArray[Any] | None = None

    @property
    def num_tokens(self) -> int:
        """T, the tokens of all rows."""
        return int(self.control[0, -1])


@dataclass(frozen=True)
class BatchResult:
    """What the engine made of a StepBatch.

    hidden [wanted, hidden] in the batch's dtype; finite bool [N]: False where an output of the row (wanted or not) is
    not finite, so that its state can't be trusted. failed: the computation raised; nothing of the batch's state can
    be trusted and hidden is empty.
    """

    hidden: NDArray[Any]
    finite: NDArray[np.bool_]
    copy_in_s: float = 0.0
    compute_s: float = 0.0
    copy_out_s: float = 0.0
    failed: bool = False


def finite_rows(starts: NDArray[np.int32], sizes: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Tell for each row whether all its outputs are finite; starts `[N + 1]`: the rows' first tokens, sizes `[T]`."""
    finite = np.isfinite(sizes)
    if finite.all():
        return np.ones(len(starts) - 1, dtype=np.bool_)
    bad = np.concatenate(([0], np.cumsum(~finite)))
    sound: NDArray[np.bool_] = bad[starts[1:]] == bad[starts[:-1]]
    return sound
