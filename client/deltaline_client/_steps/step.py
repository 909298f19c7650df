"""Stepping: what a caller asks of sequences, and what came of it. Flows; they know no channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from deltaline_client._exceptions import StepUnfinished
from deltaline_client._state import ClientState, info
from deltaline_client._steps.batch import Batch
from deltaline_client._steps.exchange import Exchange
from deltaline_client._steps.hold import Hold
from deltaline_client._steps.plain import Applied, PlainStep
from deltaline_client._steps.rows import Row, RowResult, StepError, StepResult
from deltaline_client._steps.sequence import Job, SequenceRecord
from deltaline_client._transport.flow import Flow
from deltaline_client._types import Output, ServerInfo, StepOptions


def step(
    client: ClientState, rows: Sequence[Row], *, output: Output = "all", **options: Unpack[StepOptions]
) -> Flow[StepResult]:
    """Apply one step to each of several sequences: prefill, decode and verify rows in one batch.

    A batch that is larger than one request may be is sent as several. So is a long prefill row: its steps follow each
    other without waiting for answers. A verify's commit, if one is remembered, rides on its sequence's row. Sequences
    advance only by what was applied.

    Raises: ValueError and TypeError for wrong arrays; StepUnfinished, SequenceBusy, DuplicateSequence before anything
    is sent; StepError when rows failed, with the results of those that did not; the error itself when nothing at all
    ran because of it.
    """
    limits = yield from info(client)
    done = yield from stepped(client, limits, Batch.of_rows(rows, limits, output, options.get("span", 0)), options)
    return done if isinstance(done, StepResult) else done.result()


def resume(
    client: ClientState, sequences: Sequence[SequenceRecord], **options: Unpack[StepOptions]
) -> Flow[StepResult]:
    """Send unfinished steps again, and finish the rows that they belong to.

    A step whose call ended without an answer (its timeout was over, it was cancelled) may have been applied or not. The
    sequence remembers it; this sends the same step, so that it is applied once either way, and returns what the first
    call would have returned. Making that call again does the same.

    Raises: ValueError when a sequence has no unfinished step on the span; else as `step`.
    """
    limits = yield from info(client)
    yield from client._shared.ready(limits, client._attempts(options.get("timeout_s")))
    exchange = Exchange(client, limits, options)
    with Hold(sequences, options.get("span", 0)) as progress:
        jobs = []
        for index, one in enumerate(progress):
            if one.unfinished is None:
                raise ValueError(f"sequences[{index}]: no unfinished step")
            jobs.append(one.unfinished)
        return (yield from _run(jobs, exchange))


def stepped(client: ClientState, limits: ServerInfo, batch: Batch, options: StepOptions) -> Flow[Applied | StepResult]:
    """Apply a batch: as arrays where nothing is out of the ordinary, else as jobs. Raises as `step` does."""
    yield from client._shared.ready(limits, client._attempts(options.get("timeout_s")))
    exchange = Exchange(client, limits, options)
    with Hold(batch.sequences, options.get("span", 0)) as progress:
        plain = PlainStep(batch, progress, options)
        if plain.is_ordinary(limits):
            done = yield from plain.run(exchange)
            return _gathered(done, exchange) if isinstance(done, list) else done
        jobs = batch.jobs(progress)
        for index, job in enumerate(jobs):
            unfinished = job.progress.unfinished
            if unfinished is not None:
                if not unfinished.is_same_row(job):
                    raise StepUnfinished(
                        f"rows[{index}]: a step has an unknown outcome; resume it, or repeat that call"
                    )
                jobs[index] = unfinished
        return (yield from _run(jobs, exchange))


def _run(jobs: list[Job], exchange: Exchange) -> Flow[StepResult]:
    """Run jobs, whose progress is held, to their end and gather the results. Raises as `step` does."""
    try:
        for job in jobs:
            job.error = None
        yield from exchange.run(jobs)
    finally:
        for job in jobs:
            job.leave()
    return _gathered(jobs, exchange)


def _gathered(jobs: Sequence[Job], exchange: Exchange) -> StepResult:
    """The results of jobs that are over. Raises: StepError; the error itself when nothing at all ran because of it."""
    results = tuple(map(RowResult.from_job, jobs))
    if all(job.error is None for job in jobs):
        return StepResult(results, exchange.timing)
    whole = exchange.request_error
    if whole is not None and all(job.error is whole and not job.tokens_done for job in jobs):
        raise whole
    raise StepError(results)
