"""Stepping: what a caller asks of sequences, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from deltaline_client._state import ClientState, info
from deltaline_client._steps.batch import Batch
from deltaline_client._steps.exchange import Exchange
from deltaline_client._steps.hold import Group, Hold
from deltaline_client._steps.rows import Row, StepResult
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._transport.flow import Flow
from deltaline_client._types import Output, StepOptions


def step(
    client: ClientState, rows: Sequence[Row], *, output: Output = "all", **options: Unpack[StepOptions]
) -> Flow[StepResult]:
    """Apply one step to each of several sequences: prefill, decode and verify rows in one batch.

    A batch that is larger than one request may be is sent as several. So is a long prefill row: its steps follow each
    other without waiting for answers. A verify's commit, if one is remembered, rides on its sequence's row. Sequences
    advance only by what was applied. Arrays are read until the call has ended, a task that is cancelled too; then they
    are the caller's again, but for one in shared memory (see `empty`).

    Raises: ValueError and TypeError for wrong arrays; StepUnfinished, SequenceBusy, DuplicateSequence before anything
    is sent; StepError when rows failed, with the results of those that did not; the error itself when nothing at all
    ran because of it.
    """
    limits = client._info or (yield from info(client))
    exchange = Exchange(client, limits, options)
    return (yield from exchange.run(Batch.of_rows(rows, limits, output, exchange.span)))


def resume(
    client: ClientState, sequences: Sequence[SequenceRecord], **options: Unpack[StepOptions]
) -> Flow[StepResult]:
    """Send unfinished steps again, and finish the rows that they belong to.

    A step whose call ended without an answer (its timeout was over, it was cancelled) may have been applied or not. The
    sequence remembers it with a copy of its tokens; this sends the same step, so that it is applied once either way,
    and returns what the first call would have returned. Making that call again does the same if all of its sequences
    have an unfinished step; one that has none was answered, and would be stepped once more.

    Raises: ValueError when a sequence has no unfinished step on the span; else as `step`.
    """
    limits = yield from info(client)
    yield from client._shared.ready(limits, client._attempts(options.get("timeout_s")))
    exchange = Exchange(client, limits, options)
    with Hold(Group.of(client, sequences), exchange.span) as hold:
        rows = []
        for index, one in enumerate(hold.progress):
            if one.unfinished is None:
                raise ValueError(f"sequences[{index}]: no unfinished step")
            rows.append(one.unfinished)
        return (yield from exchange.run_rows(rows))
