"""Commits of verified tokens: remembered for the next step, or sent at once."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._exceptions import (
    AcceptedOutOfRange,
    DeltalineError,
    ProtocolError,
    StateElsewhere,
    TransportError,
)
from deltaline_client._state import ClientState, rerouted
from deltaline_client._steps.hold import Group, Hold
from deltaline_client._steps.moves import Homes, by_server, followed
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._table import COMMIT, COMMIT_IN_DOUBT, PENDING, UNFINISHED, Numbers
from deltaline_client._transport.flow import Flow, Server, Sleep, call
from deltaline_client._transport.methods import COMMIT as COMMIT_METHOD
from deltaline_client._transport.retry import MOST_MOVES, is_retryable
from deltaline_client._transport.statuses import from_status

# Rows of a request: of so many a reply fits 4 MiB, whatever becomes of each.
_MAX_ROWS = 8192


def commit(
    client: ClientState,
    sequences: Sequence[SequenceRecord],
    accepted: Sequence[int],
    *,
    now: bool = False,
    span: int = 0,
) -> Flow[None]:
    """Fix how many tokens of each sequence's pending verify join it: accepted[i] of 0 .. n, the first token included.

    By default the count is remembered and rides on the sequence's next step, which costs no round trip. now=True sends
    it; should no answer come, the count stays remembered and the next step repeats it.

    Raises: ValueError when the lengths differ; SequenceBusy, DuplicateSequence, NothingToCommit (SequenceClosed where
    this client closed it), AcceptedOutOfRange, StepUnfinished and CommitConflict before anything is changed; with
    now=True, the error of the first commit that failed (the others are made).
    """
    if len(sequences) != len(accepted):
        raise ValueError(f"accepted: expected {len(sequences)} counts, one per sequence, got {len(accepted)}")
    with Hold(Group.of(client, sequences), span) as hold:
        counts = _checked(hold, accepted)
        hold.ledger.write(hold.group.slots, {COMMIT: counts + 1})
        if now:
            errors = yield from _send_all(client, sequences, span)
            if errors:
                raise errors[0]


def _checked(hold: Hold, accepted: Sequence[int]) -> Numbers:
    """The counts as an array. Raises as `commit` for the first that is wrong."""
    try:
        counts = np.fromiter(map(index, accepted), np.int64, len(accepted))
    except TypeError as error:
        raise TypeError(f"accepted: expected whole numbers, got {accepted!r}") from error
    except OverflowError as error:
        raise AcceptedOutOfRange(f"accepted: expected counts of pending tokens, got {accepted!r}") from error
    numbers = hold.numbers
    is_wrong = (numbers[UNFINISHED] != 0) | (counts < 0) | (counts > numbers[PENDING]) | (numbers[PENDING] == 0)
    is_wrong |= (numbers[COMMIT_IN_DOUBT] != 0) & (counts + 1 != numbers[COMMIT])
    if is_wrong.any():
        first = int(is_wrong.argmax())
        hold.progress[first].check_commit(int(counts[first]))
    return counts


def _send_all(
    client: ClientState, sequences: Sequence[SequenceRecord], span: int, moves: int = MOST_MOVES
) -> Flow[list[DeltalineError]]:
    """Send the remembered commits of one span, and return the errors. moves: how many in a row are followed."""
    errors = list[DeltalineError]()
    for server, homes in by_server(sequences, _MAX_ROWS):
        errors += yield from _send(client, server, homes, span, moves)
    return errors


def _send(client: ClientState, server: Server, homes: Homes, span: int, moves: int) -> Flow[list[DeltalineError]]:
    """Commit until each sequence is answered for good; return the errors."""
    attempts, final, waiting, moved = client._attempts(), list[DeltalineError](), list(homes), list[SequenceRecord]()
    while waiting:
        request = layers.CommitSequencesRequest(
            server_epoch=server.epoch,
            span=span,
            sequence=[homes[sequence].handle for sequence in waiting],
            step=[sequence.progress(span).step for sequence in waiting],
            accepted=[sequence.progress(span).accepted or 0 for sequence in waiting],
        )
        for sequence in waiting:
            sequence.progress(span).write({COMMIT_IN_DOUBT: 1})
        try:
            response = yield from call(COMMIT_METHOD, request, attempts.next_timeout_s(), server)
            errors = _apply(waiting, span, response)
        except DeltalineError as failure:
            errors = dict.fromkeys(waiting, failure)
        delay_s = attempts.delay_s(*(error.retry_after_s for error in errors.values()))
        waiting = []
        for sequence, error in errors.items():
            if moves and (yield from followed(sequence, homes[sequence], error)):
                moved.append(sequence)
            elif ((yield from rerouted(server, error)) or is_retryable(error)) and delay_s is not None:
                waiting.append(sequence)
            else:
                final.append(error)
                sequence.progress(span).write({COMMIT_IN_DOUBT: isinstance(error, TransportError | StateElsewhere)})
        if waiting and delay_s is not None:
            yield Sleep(delay_s)
    return final + (yield from _send_all(client, moved, span, moves - 1))


def _apply(
    waiting: list[SequenceRecord], span: int, response: layers.CommitSequencesResponse
) -> dict[SequenceRecord, DeltalineError]:
    """Note the commits that were made; return why the others were not. Raises ProtocolError."""
    if len(response.position) != len(waiting):
        raise ProtocolError("the reply's arrays do not fit the request")
    statuses = {row.row: row.status for row in response.row_status}
    errors = {}
    for row, sequence in enumerate(waiting):
        if row in statuses:
            errors[sequence] = from_status(statuses[row])
        else:
            sequence.progress(span).committed(response.position[row])
    return errors
