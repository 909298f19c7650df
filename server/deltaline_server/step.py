"""What a step is on its way through the server: what is asked, and what became of each row.

Plain arrays: no protobuf, no torch, no rules.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Refusal
from deltaline_server.finite import CHECKSUM_BYTES, all_finite, finite_rows
from deltaline_server.principal import ANONYMOUS, Principal

Shape = tuple[int, ...]

# Waypoints stand behind multiples of so many tokens of a row, the chunk of the kernels.
WAYPOINT_TOKENS = 64
# What a place and what became of it take, at most, while they are kept.
WAYPOINT_BYTES = 256

# A row's request is kept whole up to this size, as a checksum beyond it.
WHOLE_REQUEST_BYTES = 16384


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
class SpanShapes:
    """The hidden state of one token: `[hidden]`, or `[streams, hidden]` where there are residual streams.

    Everything between the wire and the layers has one row of values per token, `width` of them.
    input_streams, output_streams: 0 where there is no such dimension. itemsize: bytes of a value.
    """

    hidden_size: int
    itemsize: int
    input_streams: int = 0
    output_streams: int = 0

    @cached_property
    def input_shape(self) -> Shape:
        """What enters the span."""
        return self._shape(self.input_streams)

    @cached_property
    def output_shape(self) -> Shape:
        """What leaves it."""
        return self._shape(self.output_streams)

    @cached_property
    def input_width(self) -> int:
        """Values of a token that enters the span."""
        return math.prod(self.input_shape)

    @cached_property
    def output_width(self) -> int:
        """Values of a token that leaves it."""
        return math.prod(self.output_shape)

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of a token that enters the span."""
        return self.input_width * self.itemsize

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of a token that leaves it."""
        return self.output_width * self.itemsize

    @property
    def streams(self) -> dict[str, int]:
        """Streams of both ends, as deltaline.v1.LayerSpan names them."""
        return {"input_streams": self.input_streams, "output_streams": self.output_streams}

    def _shape(self, streams: int) -> Shape:
        return (streams, self.hidden_size) if streams else (self.hidden_size,)


@dataclass(frozen=True)
class Limits:
    """Bounds of requests, of the queue and of batches; constant while the process lives.

    queue_rows, queue_bytes: all that may wait or run, so that a larger step would never be taken. A batch has at most
    short_rows rows of max_draft_tokens tokens or fewer, and long_rows others, with chunk_tokens tokens in all.
    """

    max_sequences: int
    max_draft_tokens: int
    max_lease_ms: int
    inline_limit_bytes: int
    queue_rows: int
    queue_bytes: int
    chunk_tokens: int
    short_rows: int
    long_rows: int


@dataclass(frozen=True)
class OutputMemory:
    """Where a request's outputs go: bytes of a region, uint8 [size], and how the reply names them."""

    region: int
    offset: int
    memory: NDArray[np.uint8]


@dataclass(frozen=True)
class RowWaypoints:
    """Where a PREFILL row leaves states on its way, and what snapshots they become.

    tokens: of the row before each place, multiples of WAYPOINT_TOKENS, increasing. at_end: whether another is left
    behind all of the row's tokens. lease_s: None for the default. keys: under which a state is found, by its tokens of
    the sequence.
    """

    tokens: tuple[int, ...]
    at_end: bool = False
    lease_s: float | None = None
    is_pinned: bool = False
    keys: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def num_places(self) -> int:
        return len(self.tokens) + self.at_end

    def within(self, begin: int, end: int) -> tuple[int, ...]:
        """The places behind more than `begin` tokens of the row, and `end` at most."""
        return self.tokens[bisect_right(self.tokens, begin) : bisect_right(self.tokens, end)]


class LeftWaypoint(NamedTuple):
    """What became of a place, `position` tokens of the sequence: a snapshot, or the reason why there is none."""

    position: int
    snapshot: bytes = b""
    skipped: str = ""


@dataclass(frozen=True, eq=False)
class StepForm:
    """What a step asks apart from its numbers and its tensor: N rows of one span, checked as a request.

    A decode loop sends one form again and again: what follows from it is found once. No array of it is ever written.

    handle uint64 [N], none twice; kind uint8 [N]; accepted int32 [N], -1 for no commit; query_start_loc int64 [N + 1],
    sound. shapes: what a token of the span is. waypoints: by row.
    """

    server_epoch: int
    span: int
    handle: NDArray[np.uint64]
    kind: NDArray[np.uint8]
    accepted: NDArray[np.int32]
    query_start_loc: NDArray[np.int64]
    output: OutputRows
    priority: int
    shapes: SpanShapes
    waypoints: Mapping[int, RowWaypoints] = field(default_factory=dict)

    @cached_property
    def num_rows(self) -> int:
        return len(self.handle)

    @cached_property
    def num_of_kind(self) -> Mapping[RowKind, int]:
        """How many rows there are of each kind."""
        return count_kinds(self.kind)

    @cached_property
    def has_commits(self) -> bool:
        """Whether a row says how many drafts were accepted."""
        return self.accepted.tobytes() != b"\xff\xff\xff\xff" * self.num_rows

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, int64 [N]."""
        return np.diff(self.query_start_loc)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths.max())

    @cached_property
    def output_counts(self) -> NDArray[np.int64]:
        """Output rows that the reply carries for each row that runs, int64 [N]."""
        if self.output is OutputRows.ALL:
            return self.lengths
        return np.full(self.num_rows, 1 if self.output is OutputRows.LAST else 0, dtype=np.int64)

    @cached_property
    def output_start(self) -> NDArray[np.int64]:
        """Where each row's outputs begin in a reply that has those of all rows, int64 [N + 1]."""
        if self.output is OutputRows.ALL:
            return self.query_start_loc
        return np.concatenate(([0], np.cumsum(self.output_counts)))

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of the outputs in a reply that has those of all rows."""
        return int(self.output_start[-1]) * self.shapes.output_bytes

    @cached_property
    def kept_bytes(self) -> NDArray[np.int64]:
        """Bytes that each row and its reply take while they are kept, int64 [N]."""
        row_bytes = self.lengths * self.shapes.input_bytes
        requests = np.where(row_bytes <= WHOLE_REQUEST_BYTES, row_bytes, CHECKSUM_BYTES)
        kept: NDArray[np.int64] = requests + self.output_counts * self.shapes.output_bytes
        for row, asked in self.waypoints.items():
            kept[row] += asked.num_places * WAYPOINT_BYTES
        return kept

    @cached_property
    def total_kept_bytes(self) -> int:
        """The sum of kept_bytes."""
        return int(self.kept_bytes.sum())


@dataclass(slots=True, eq=False)
class StepRequest:
    """One step of the rows of a form. step int64 [N]; position int64 [N]; hidden [T, width] in the server's dtype.

    Nothing of it changes; it is not frozen because every step makes one.
    """

    form: StepForm
    step: NDArray[np.int64]
    position: NDArray[np.int64]
    hidden: NDArray[Any]
    deadline_s: float | None = None
    """When the rows must have begun, on the scheduler's monotonic clock; None for no limit."""
    principal: Principal = ANONYMOUS
    client: str = ""
    """The connection that asks; clients of one priority get equal shares of the prefill tokens."""
    is_input_shared: bool = False
    """Whether `hidden` lies in memory that the client shares, and has promised not to touch."""
    output_memory: OutputMemory | None = None
    """Where the outputs go, with room for all that the form asks for; None for memory of the server's own."""
    is_finite: bool | None = None
    """Whether all values of `hidden` are finite, None when nobody has looked."""
    finite: NDArray[np.bool_] | None = None
    """Which rows have finite values only, bool [N], where not all have and somebody has looked at each."""
    checksum: Future[bytes] | None = None
    """Of the one row's `hidden`, when somebody has begun to compute it."""
    trace: object | None = None
    """The span of the call that asks, where it is recorded (tracing.py)."""

    @property
    def message_bytes(self) -> int:
        """Most bytes of a tensor that the request or its reply carries itself."""
        is_shared = self.is_input_shared and self.output_memory is not None
        return 0 if is_shared else max(self.hidden.nbytes, self.form.output_bytes)

    @property
    def is_kept_as_checksum(self) -> bool:
        """Whether of the request's one row no more than a checksum is kept, since its reply is so much smaller."""
        is_large = self.hidden.nbytes > WHOLE_REQUEST_BYTES and not self.is_input_shared
        return self.form.num_rows == 1 and is_large and self.form.output is not OutputRows.ALL

    def finite_rows(self) -> NDArray[np.bool_] | None:
        """Which rows have finite values only, bool [N]; None when all have."""
        if self.is_finite or (self.is_finite is None and all_finite(self.hidden)):
            return None
        if self.finite is not None:
            return self.finite
        return finite_rows(self.hidden, self.form.query_start_loc[:-1])


@dataclass
class StepTiming:
    """Seconds spent per stage (sums over the chunks), and the size of the last batch that carried a row of the step."""

    queue_s: float = 0.0
    copy_in_s: float = 0.0
    compute_s: float = 0.0
    copy_out_s: float = 0.0
    batch_rows: int = 0
    batch_tokens: int = 0


@dataclass(slots=True)
class StepResult:
    """What became of each row of a StepRequest.

    outcome uint8 [N] (RowOutcome); position int64 [N] after the step; output_start_loc int64 [N + 1] into
    hidden [rows, *shapes.output_shape]; refusals by row index; timing None when nothing was computed for it.
    """

    outcome: NDArray[np.uint8]
    position: NDArray[np.int64]
    output_start_loc: NDArray[np.int64]
    hidden: NDArray[Any]
    refusals: dict[int, Refusal] = field(default_factory=dict)
    timing: StepTiming | None = None
    output_memory: OutputMemory | None = None
    """Where `hidden` lies, None for memory of the server's own. In it refused rows have a place as well."""
    waypoints: Sequence[tuple[int, LeftWaypoint]] = ()
    """What became of each place, beside the row, in the order of rows and places."""


def count_kinds(kind: NDArray[np.uint8]) -> dict[RowKind, int]:
    """How many rows there are of each kind; kind uint8 [N]."""
    kinds = kind.tobytes()
    return {kind: kinds.count(kind) for kind in RowKind}
