"""The convenient forms of a step: one kind for many sequences, or one sequence.

Batch forms raise StepError when rows fail. The forms on one sequence raise the row's own error, from the StepError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._arrays import Array, as_hidden, as_numpy
from deltaline_client._prefixes import Waypoints
from deltaline_client._state import ClientState, info
from deltaline_client._steps.batch import Batch
from deltaline_client._steps.commit import commit as commit_batch
from deltaline_client._steps.exchange import Exchange
from deltaline_client._steps.request import Applied
from deltaline_client._steps.rows import Row, StepError, StepResult
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._steps.sequences import close as close_batch
from deltaline_client._steps.step import resume as resume_batch
from deltaline_client._steps.step import step
from deltaline_client._transport.flow import Flow
from deltaline_client._types import Output, StepOptions

# On a client: one row for each of several sequences.


def prefill(
    client: ClientState,
    sequences: Sequence[SequenceRecord],
    hidden: Sequence[Any],
    *,
    output: Output = "all",
    **options: Unpack[StepOptions],
) -> Flow[list[Array]]:
    """Add tokens to sequences: hidden[i] is [n_i, hidden_size]. Returns the requested output rows of each."""
    rows = _rows(Row.prefill, sequences, hidden)
    return (yield from step(client, rows, output=output, **options)).outputs


def decode(
    client: ClientState, sequences: Sequence[SequenceRecord], hidden: Any, **options: Unpack[StepOptions]
) -> Flow[Array]:
    """Add one token to each sequence: hidden [N, hidden_size], or hidden[i] [hidden_size]. Returns the outputs
    [N, hidden_size]. One array is the fast way."""
    limits = client._info or (yield from info(client))
    exchange = Exchange(client, limits, options)
    span = exchange.span
    shape = limits.input_shape(span)
    array = hidden if type(hidden) is np.ndarray else _array_or_list(hidden)
    _check_count(sequences, array, *shape)
    if isinstance(array, np.ndarray) and array.ndim == 1 + len(shape):
        array = as_hidden(array, "hidden", shape, limits.dtype)
        batch = Batch.uniform(sequences, layers.ROW_KIND_DECODE, array, 1, limits.output_shape(span))
    else:
        batch = Batch.of_rows(_rows(Row.decode, sequences, array), limits, "all", span)
    done = yield from exchange.run(batch)
    return done.packed if isinstance(done, Applied) else np.concatenate(done.outputs)


def verify(
    client: ClientState, sequences: Sequence[SequenceRecord], hidden: Any, **options: Unpack[StepOptions]
) -> Flow[list[Array]]:
    """Compute draft tokens without committing them: hidden[i] is [n_i, hidden_size]. Returns the outputs of each.

    Commit how many of them join before the next step. One array [N, n, hidden_size] is the fast way to pass the same
    number of tokens for each.
    """
    limits = client._info or (yield from info(client))
    exchange = Exchange(client, limits, options)
    span = exchange.span
    shape = limits.input_shape(span)
    array = hidden if type(hidden) is np.ndarray else _array_or_list(hidden)
    _check_count(sequences, array, "n", *shape)
    if isinstance(array, np.ndarray) and array.ndim == 2 + len(shape):
        array = as_hidden(array, "hidden", shape, limits.dtype)
        tokens = array.shape[1]
        if not 1 <= tokens <= limits.max_draft_tokens:
            raise ValueError(f"hidden: expected 1 .. {limits.max_draft_tokens} tokens to verify, got {tokens}")
        array = array.reshape(-1, *shape)
        batch = Batch.uniform(sequences, layers.ROW_KIND_VERIFY, array, tokens, limits.output_shape(span))
    else:
        batch = Batch.of_rows(_rows(Row.verify, sequences, array), limits, "all", span)
    done = yield from exchange.run(batch)
    return done.outputs


def _array_or_list(hidden: Any) -> Any:
    """The caller's tokens as one array, or the list that they came in: its elements may be tensors of any device."""
    return hidden if isinstance(hidden, list | tuple) else as_numpy(hidden, "hidden")


def _rows(
    make: Callable[[SequenceRecord, object], Row], sequences: Sequence[SequenceRecord], hidden: Sequence[Any] | Array
) -> list[Row]:
    _check_count(sequences, hidden)
    return [make(sequence, row) for sequence, row in zip(sequences, hidden, strict=True)]


def _check_count(sequences: Sequence[SequenceRecord], hidden: Sequence[Any] | Array, *row: object) -> None:
    """Raise unless there is one row for each sequence, and a sequence. row: the shape that each has in one array."""
    try:
        num_rows = len(hidden)
    except TypeError as error:  # of an array without a dimension, too
        raise TypeError(f"hidden: expected {len(sequences)} rows, one per sequence, got {hidden!r}") from error
    if num_rows != len(sequences):
        expected = f"{len(sequences)} rows, one per sequence"
        if row and isinstance(hidden, np.ndarray):
            shape = ", ".join(map(str, (len(sequences), *row)))
            raise ValueError(f"hidden: expected {expected}, [{shape}], got shape {hidden.shape}")
        raise ValueError(f"hidden: expected {expected}, got {num_rows}")
    if not sequences:
        raise ValueError("sequences: expected at least one")


# On a sequence.


def prefill_one(
    sequence: SequenceRecord,
    hidden: Any,
    *,
    output: Output = "all",
    waypoints: Waypoints | None = None,
    **options: Unpack[StepOptions],
) -> Flow[Array]:
    """Add tokens: hidden [n, hidden_size]. Returns the requested output rows: [n, .], [1, .] or [0, hidden_size].

    More tokens than one request may carry are streamed as several steps, a few of them in flight at once. waypoints:
    where states are left on the way; `sequence.waypoints` tells what became of each place. A place that is not a
    multiple of ServerInfo.waypoint_tokens behind the prefill's first token, or behind another such place, costs a step
    that ends there; of several spans, each prefilled whole, such a place is left at the end only. Raises
    InvalidWaypoint where the server leaves none.
    """
    return (yield from _one(Row.prefill(sequence, hidden), output, options, waypoints))


def decode_one(sequence: SequenceRecord, hidden: Any, **options: Unpack[StepOptions]) -> Flow[Array]:
    """Add one token: hidden [hidden_size] or [1, hidden_size]. Returns the output, of the same rank."""
    limits = yield from info(sequence._client)
    output = yield from _one(Row.decode(sequence, hidden), "all", options)
    return output[0] if np.ndim(hidden) == len(limits.input_shape(options.get("span", 0))) else output


def verify_one(sequence: SequenceRecord, hidden: Any, **options: Unpack[StepOptions]) -> Flow[Array]:
    """Compute draft tokens without committing them: hidden [n, hidden_size]. Returns the outputs [n, hidden_size].

    Commit how many of them join before the next step.
    """
    return (yield from _one(Row.verify(sequence, hidden), "all", options))


def resume_one(sequence: SequenceRecord, **options: Unpack[StepOptions]) -> Flow[Array]:
    """Send the unfinished step again, and finish its row; returns what the first call would have returned.

    A step whose call ended without an answer may have been applied or not. The sequence remembers it, and until it is
    resumed takes no other step; this sends the same step, so that it is applied once either way. Making the identical
    call again does the same. Raises ValueError when no step on the span is unfinished.
    """
    return (yield from _only(resume_batch(sequence._client, [sequence], **options)))


def commit_one(sequence: SequenceRecord, accepted: int, *, now: bool = False, span: int = 0) -> Flow[None]:
    """Fix how many tokens of the pending verify join the sequence: 0 .. n, its first token included.

    By default the count is remembered and rides on the next step. now=True sends it at once.
    """
    yield from commit_batch(sequence._client, [sequence], [accepted], now=now, span=span)


def close_one(sequence: SequenceRecord) -> Flow[None]:
    """End the sequence and free its state on the server. Idempotent."""
    yield from close_batch(sequence._client, [sequence])


def _one(row: Row, output: Output, options: StepOptions, waypoints: Waypoints | None = None) -> Flow[Array]:
    """A step of one row, and its outputs."""
    client = row.sequence._client
    limits = client._info or (yield from info(client))
    exchange = Exchange(client, limits, options)
    batch = Batch.of_rows([row], limits, output, exchange.span, "hidden")
    return (yield from _only(exchange.run(batch, waypoints)))


def _only(flow: Flow[StepResult]) -> Flow[Array]:
    try:
        return (yield from flow).outputs[0]
    except StepError as error:
        raise error.errors[0] from error
