"""A batch: the rows of one call, or of one request of it, as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._arrays import Array, Shape
from deltaline_client._steps.rows import Row
from deltaline_client._steps.sequence import Progress, RowProgress, RowStep, SequenceRecord
from deltaline_client._types import Output, ServerInfo

_OUTPUTS = ("all", "last", "none")
_SHAPE, _SIZE, _DTYPE = attrgetter("shape"), attrgetter("size"), attrgetter("dtype")
_START = np.dtype("<u4")


@dataclass(eq=False, slots=True)
class Batch:
    """One row for each of N sequences, T tokens in all.

    kinds: N of RowKind, a byte each. start: N + 1 numbers, row i has the tokens start[i] up to start[i + 1]. hidden: in
    the server's type, one array [T, *input_shape], or N arrays, one per row, [n, *input_shape] or a single token's
    [*input_shape]. output: the requested rows. output_start: as `start`, of the output rows when all rows are applied.
    input_shape, output_shape: of one token.
    """

    sequences: tuple[SequenceRecord, ...]
    kinds: bytes
    start: NDArray[np.uint32]
    hidden: Sequence[Array]
    output: Output
    output_start: NDArray[np.uint32]
    input_shape: Shape
    output_shape: Shape

    @classmethod
    def of_rows(cls, rows: Sequence[Row], info: ServerInfo, output: Output, span: int, name: str = "rows[{}]") -> Batch:
        """Check a span's rows and put them together. Raises ValueError or TypeError naming the first that is wrong.

        name: what the caller calls the tokens of a row, whose index takes the place of {}.
        """
        if output not in _OUTPUTS:
            raise ValueError(f"output: expected one of {', '.join(_OUTPUTS)}, got {output!r}")
        columns: Any = tuple(zip(*rows, strict=True)) or ((), (), ())
        sequences, kinds, hidden = columns
        shape = info.input_shape(span)
        start = _usual_start(kinds, hidden, shape, info)
        if start is None:
            hidden = [row.tokens(name.format(index), info, span) for index, row in enumerate(rows)]
            start = _start(hidden, shape)
        return cls._packed(sequences, bytes(kinds), start, hidden, output, shape, info.output_shape(span))

    @classmethod
    def of_steps(cls, steps: Sequence[tuple[RowProgress, RowStep]]) -> Batch:
        """The rows of one request: a step of each row; all rows ask for the same outputs."""
        first, first_step = steps[0]
        hidden = [row.hidden[step.start : step.start + step.count] for row, step in steps]
        shape = first.hidden.shape[1:]
        return cls._packed(
            tuple([row.sequence for row, _ in steps]),
            bytes([row.kind for row, _ in steps]),
            _start(hidden, shape),
            hidden,
            first.output_of(first_step),
            shape,
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
        start = _uniform_start(len(hidden), tokens)
        kinds = bytes((kind,)) * len(sequences)
        return cls(tuple(sequences), kinds, start, (hidden,), "all", start, hidden.shape[1:], output_shape)

    @classmethod
    def _packed(
        cls,
        sequences: tuple[SequenceRecord, ...],
        kinds: bytes,
        start: NDArray[np.uint32],
        hidden: Sequence[Array],
        output: Output,
        input_shape: Shape,
        output_shape: Shape,
    ) -> Batch:
        output_start = start
        if output != "all":
            output_start = np.arange(len(start)).astype(_START) if output == "last" else np.zeros_like(start)
        return cls(sequences, kinds, start, hidden, output, output_start, input_shape, output_shape)

    def packed(self) -> Array:
        """The tokens in one array [T, *input_shape], without a copy where they lie in one."""
        if len(self.hidden) == 1:
            return self.hidden[0].reshape(-1, *self.input_shape)
        return np.concatenate(self.hidden, axis=None).reshape(-1, *self.input_shape)

    def rows(self, progress: Sequence[Progress]) -> list[RowProgress]:
        """The rows one by one; progress: that of each sequence."""
        hidden = self.hidden
        if len(hidden) != len(self.sequences):
            hidden = [hidden[0][begin:end] for begin, end in pairwise(self.start.tolist())]
        return [
            RowProgress(
                sequence,
                one,
                sequence._home,
                layers.RowKind.ValueType(kind),
                np.ascontiguousarray(row).reshape(-1, *self.input_shape),
                self.output,
                self.output_shape,
            )
            for sequence, one, kind, row in zip(self.sequences, progress, self.kinds, hidden, strict=True)
        ]


def _start(hidden: Sequence[Array], shape: Shape) -> NDArray[np.uint32]:
    """Where the tokens of each row begin; shape: of one."""
    start = np.zeros(len(hidden) + 1, _START)
    sizes = np.fromiter(map(_SIZE, hidden), np.intp, len(hidden))
    np.cumsum(sizes // math.prod(shape), out=start[1:])
    return start


@lru_cache(256)
def _uniform_start(num_tokens: int, tokens: int) -> NDArray[np.uint32]:
    """Where the tokens of each row begin, all rows having the same number."""
    start = np.arange(0, num_tokens + 1, tokens).astype(_START)
    start.flags.writeable = False
    return start


def _usual_start(
    kinds: tuple[int, ...], hidden: tuple[Any, ...], shape: Shape, info: ServerInfo
) -> NDArray[np.uint32] | None:
    """Where the tokens of each row begin, if all are numpy arrays in the server's type of shapes that are right.

    Looks once at each kind and shape that there is: a batch has few. None where rows have to be looked at one by one.
    """
    if set(map(type, hidden)) != {np.ndarray} or set(map(_DTYPE, hidden)) != {info.dtype}:
        return None
    shapes = list(map(_SHAPE, hidden))
    if kinds.count(kinds[0]) == shapes.count(shapes[0]) == len(hidden):
        if not _is_right(kinds[0], shapes[0], shape, info):
            return None
        tokens = hidden[0].size // math.prod(shape)
        return _uniform_start(len(hidden) * tokens, tokens)
    if not all(_is_right(kind, found, shape, info) for kind, found in set(zip(kinds, shapes, strict=True))):
        return None
    return _start(hidden, shape)


def _is_right(kind: int, found: Shape, shape: Shape, info: ServerInfo) -> bool:
    """Whether a row of a kind may have tokens of the shape that was found; shape: of one token."""
    tokens = found[: -len(shape)]
    if found[-len(shape) :] != shape:
        return False
    if kind == layers.ROW_KIND_DECODE:
        return tokens in ((), (1,))
    most = info.max_draft_tokens if kind == layers.ROW_KIND_VERIFY else math.inf
    return len(tokens) == 1 and 0 < tokens[0] <= most
