"""Rows of a step, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deltaline.v1 import layer_service_pb2
from deltaline_client._arrays import Array, as_hidden
from deltaline_client._exceptions import DeltalineError
from deltaline_client._steps.sequence import RowProgress, SequenceRecord
from deltaline_client._types import RowOutcome, ServerInfo, StepTiming


class Row(NamedTuple):
    """One sequence's part of a step: make it with Row.prefill, Row.decode or Row.verify."""

    sequence: SequenceRecord
    kind: layer_service_pb2.RowKind.ValueType
    hidden: object

    @classmethod
    def prefill(cls, sequence: SequenceRecord, hidden: object) -> Row:
        """Tokens that join the sequence: hidden [n, hidden_size], n >= 1. May be cut into several steps."""
        return cls(sequence, layer_service_pb2.ROW_KIND_PREFILL, hidden)

    @classmethod
    def decode(cls, sequence: SequenceRecord, hidden: object) -> Row:
        """One token that joins the sequence: hidden [hidden_size] or [1, hidden_size]."""
        return cls(sequence, layer_service_pb2.ROW_KIND_DECODE, hidden)

    @classmethod
    def verify(cls, sequence: SequenceRecord, hidden: object) -> Row:
        """Tokens that stay pending until a commit: hidden [n, hidden_size], 1 <= n <= ServerInfo.max_draft_tokens."""
        return cls(sequence, layer_service_pb2.ROW_KIND_VERIFY, hidden)

    def tokens(self, name: str, info: ServerInfo, span: int) -> Array:
        """Check the row for a span and return its tokens [n, *input_shape].

        Raises ValueError or TypeError naming `name`.
        """
        shape = info.input_shape(span)
        hidden = as_hidden(self.hidden, name, shape, info.dtype)
        if hidden.ndim == len(shape) and self.kind == layer_service_pb2.ROW_KIND_DECODE:
            # In other rows as many tokens without streams as there are streams would be taken for one token.
            hidden = hidden[np.newaxis]
        if hidden.ndim != len(shape) + 1 or len(hidden) == 0:
            expected = ", ".join(["tokens", *map(str, shape)])
            raise ValueError(f"{name}: expected shape [{expected}] of at least one token, got {hidden.shape}")
        if len(hidden) > 1:
            if self.kind == layer_service_pb2.ROW_KIND_DECODE:
                expected = ", ".join(["1", *map(str, shape)])
                raise ValueError(f"{name}: expected one token in a decode row, [{expected}], got shape {hidden.shape}")
            if self.kind == layer_service_pb2.ROW_KIND_VERIFY and len(hidden) > info.max_draft_tokens:
                raise ValueError(
                    f"{name}: expected at most {info.max_draft_tokens} tokens to verify, got {len(hidden)}"
                )
        return hidden


class RowResult(NamedTuple):
    """What became of one row.

    output: [rows, *output_shape] in the server's type, of the tokens that were applied. tokens: how many of the row's
    tokens were applied, fewer than it had when `error` ended it between two steps of a long prefill. position:
    committed tokens now. outcome: that of its last step.
    """

    sequence: SequenceRecord
    outcome: RowOutcome
    output: Array
    tokens: int
    position: int
    error: DeltalineError | None

    @classmethod
    def of(cls, row: RowProgress) -> RowResult:
        """What a row that is over has gathered."""
        output = row.result
        if output is None:
            output = np.empty((0, *row.output_shape), row.hidden.dtype)
        elif row.output == "all":
            output = output[: row.tokens_done]
        return cls(row.sequence, row.outcome, output, row.tokens_done, row.progress.position, row.error)


class StepResult:
    """What became of a step: one RowResult per row, in order, and where the server's time went."""

    def __init__(self, rows: Sequence[RowResult], timing: StepTiming) -> None:
        self._rows, self._timing = tuple(rows), timing

    @property
    def timing(self) -> StepTiming:
        """Where the server's time went."""
        return self._timing

    @property
    def rows(self) -> tuple[RowResult, ...]:
        """What became of each row, in order."""
        return self._rows

    @property
    def outputs(self) -> list[Array]:
        """The rows' outputs, in order."""
        return [row.output for row in self.rows]


class StepError(DeltalineError):
    """Some rows of a batch failed. Rows without an error did run, and their sequences have advanced.

    results: one RowResult per row of the call, in its order. errors: row index to what became of that row.
    """

    def __init__(self, results: Sequence[RowResult]) -> None:
        self.results = tuple(results)
        self.errors = {index: row.error for index, row in enumerate(self.results) if row.error is not None}
        first = min(self.errors)
        super().__init__(
            f"{len(self.errors)} of {len(self.results)} rows failed; row {first}: "
            f"{type(self.errors[first]).__name__}: {self.errors[first]}"
        )
