"""A batch: the rows of one call as arrays, checked. Sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._arrays import Array, Shape
from deltaline_client._steps.rows import Row
from deltaline_client._steps.sequence import Job, Progress, SequenceRecord
from deltaline_client._types import Output, ServerInfo

_OUTPUTS = ("all", "last", "none")


@dataclass(frozen=True, slots=True)
class Batch:
    """One row for each of N sequences, T tokens in all.

    kinds: N of RowKind. start: N + 1 numbers, row i has the tokens start[i] up to start[i + 1]. hidden: the tokens, in
    the server's type: one array [T, *input_shape], or N arrays, one per row. output: the wanted rows. output_shape: of
    one token.
    """

    sequences: Sequence[SequenceRecord]
    kinds: Sequence[layers.RowKind.ValueType]
    start: Sequence[int]
    hidden: Sequence[Array]
    output: Output
    output_shape: Shape

    @classmethod
    def of_rows(cls, rows: Sequence[Row], info: ServerInfo, output: Output, span: int) -> Batch:
        """Check a span's rows and put them together. Raises ValueError or TypeError naming the first that is wrong."""
        if output not in _OUTPUTS:
            raise ValueError(f"output: expected one of {', '.join(_OUTPUTS)}, got {output!r}")
        hidden = [row.tokens(f"rows[{index}]", info, span) for index, row in enumerate(rows)]
        start = list(accumulate(map(len, hidden), initial=0))
        shape = info.output_shape(span)
        return cls([row.sequence for row in rows], [row.kind for row in rows], start, hidden, output, shape)

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
        kinds = [kind] * len(sequences)
        return cls(sequences, kinds, range(0, len(hidden) + 1, tokens), [hidden], "all", output_shape)

    @property
    def output_start(self) -> Sequence[int]:
        """First output row of each row, N + 1 of them, when all are applied."""
        if self.output == "all":
            return self.start
        return range(len(self.start)) if self.output == "last" else [0] * len(self.start)

    def jobs(self, progress: Sequence[Progress]) -> list[Job]:
        """The rows as jobs; progress: that of each sequence."""
        hidden = self.hidden
        if len(hidden) != len(self.sequences):
            hidden = [hidden[0][begin:end] for begin, end in pairwise(self.start)]
        return [
            Job(sequence, one, kind, row, self.output, self.output_shape)
            for sequence, one, kind, row in zip(self.sequences, progress, self.kinds, hidden, strict=True)
        ]
