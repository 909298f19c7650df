"""A batch: the rows of one call, or of one request of it, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._arrays import Array, Shape
from deltaline_client._steps.rows import Row
from deltaline_client._steps.sequence import Progress, RowProgress, RowStep, SequenceRecord
from deltaline_client._types import Output, ServerInfo

_OUTPUTS = ("all", "last", "none")


@dataclass(frozen=True, slots=True)
class Batch:
    """One row for each of N sequences, T tokens in all.

    kinds: N of RowKind. start: N + 1 numbers, row i has the tokens start[i] up to start[i + 1]. hidden: the tokens, in
    the server's type: one array [T, *input_shape], or N arrays, one per row. output: the requested rows. output_start:
    as `start`, of the output rows when all rows are applied. output_shape: of one token.
    """

    sequences: Sequence[SequenceRecord]
    kinds: Sequence[layers.RowKind.ValueType]
    start: Sequence[int]
    hidden: Sequence[Array]
    output: Output
    output_start: Sequence[int]
    output_shape: Shape

    @classmethod
    def of_rows(cls, rows: Sequence[Row], info: ServerInfo, output: Output, span: int) -> Batch:
        """Check a span's rows and put them together. Raises ValueError or TypeError naming the first that is wrong."""
        if output not in _OUTPUTS:
            raise ValueError(f"output: expected one of {', '.join(_OUTPUTS)}, got {output!r}")
        hidden = [row.tokens(f"rows[{index}]", info, span) for index, row in enumerate(rows)]
        sequences, kinds = [row.sequence for row in rows], [row.kind for row in rows]
        return cls._packed(sequences, kinds, hidden, output, info.output_shape(span))

    @classmethod
    def of_steps(cls, steps: Sequence[tuple[RowProgress, RowStep]]) -> Batch:
        """The rows of one request: a step of each row; all rows ask for the same outputs."""
        first, first_step = steps[0]
        return cls._packed(
            [row.sequence for row, _ in steps],
            [row.kind for row, _ in steps],
            [row.hidden[step.start : step.start + step.count] for row, step in steps],
            first.output_of(first_step),
            first.output_shape,
        )

    @classmethod
    def uniform(
        cls,
        sequences: Sequence[SequenceRecord],
        kind: layers.RowKind.ValueType,
        hidden: Array,
        tokens: int,
        output_shape: Shape,
    ) -> Batch:
        """The same kind and number of tokens for each: hidden [N * tokens, *input_shape] in the server's type."""
        start = range(0, len(hidden) + 1, tokens)
        return cls(sequences, [kind] * len(sequences), start, [hidden], "all", start, output_shape)

    @classmethod
    def _packed(
        cls,
        sequences: Sequence[SequenceRecord],
        kinds: Sequence[layers.RowKind.ValueType],
        hidden: Sequence[Array],
        output: Output,
        output_shape: Shape,
    ) -> Batch:
        start = list(accumulate(map(len, hidden), initial=0))
        output_start = {"all": start, "last": range(len(start)), "none": [0] * len(start)}[output]
        return cls(sequences, kinds, start, hidden, output, output_start, output_shape)

    def rows(self, progress: Sequence[Progress]) -> list[RowProgress]:
        """The rows one by one; progress: that of each sequence."""
        hidden = self.hidden
        if len(hidden) != len(self.sequences):
            hidden = [hidden[0][begin:end] for begin, end in pairwise(self.start)]
        return [
            RowProgress(sequence, one, kind, row, self.output, self.output_shape)
            for sequence, one, kind, row in zip(self.sequences, progress, self.kinds, hidden, strict=True)
        ]
