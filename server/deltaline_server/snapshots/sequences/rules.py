"""Which progress a sequence can have that comes from elsewhere: what its ledger would never say is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, replace

from deltaline_server.snapshots.header import Flaw, StateFileError, StateHeader
from deltaline_server.snapshots.layout import SpanProgress


def check_progress(spans: Sequence[SpanProgress], max_draft: int) -> None:
    """Raise StateFileError unless steps of a sequence can have led to these spans, whose fields a layout has judged
    one by one."""
    for index, span in enumerate(spans):
        for name, (low, high) in _limits(index, span, max_draft):
            value = getattr(span, name)
            if not low <= value <= high:
                message = f"spans[{index}].{name}: expected {low} .. {high}, got {value}"
                raise StateFileError(Flaw.SECTIONS, message)


def check_ahead(header: StateHeader, before: StateHeader | None, paged: Collection[int]) -> None:
    """Raise StateFileError unless a state is of the sequence whose pages came before it, and begins where they end.

    before: of the last of them, None where none came. paged: the spans that have pages.
    """
    came = 0 if before is None else max(span.position for span in before.spans)
    if before is not None and _whose(header) != _whose(before):
        message = "expected the owner and the adapter of the sequence whose pages came before, got others"
        raise StateFileError(Flaw.SECTIONS, message)
    end = max(span.position for span in header.spans)
    for index, span in enumerate(header.spans):
        expected = replace(span, ahead=came if index in paged else 0)
        if header.is_pages:
            expected = SpanProgress(position=max(end, came + 1), ahead=came) if index in paged else SpanProgress()
        for field, value, wanted in zip(fields(span), span.values, expected.values, strict=True):
            if value != wanted:
                message = f"spans[{index}].{field.name}: expected {wanted}, got {value}"
                raise StateFileError(Flaw.SECTIONS, message)


def _whose(header: StateHeader) -> tuple[bool, str, str, bytes]:
    return header.is_sequence, header.owner, header.adapter, header.adapter_hash


def _limits(index: int, span: SpanProgress, max_draft: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The least and the most that a field may be, beside the others."""
    if not span.step:
        yield from dict.fromkeys(("pending", "reply_bytes"), (0, 0)).items()
    # A verify is pending, or was committed and is to be replayed, or is neither; the drafts of no other are read.
    yield "replay", (0, 0 if span.pending else span.position)
    drafts = span.replay + span.pending
    yield "records_0", (0, 0) if span.draft_half else (drafts, drafts)
    yield "records_1", (drafts, drafts) if span.draft_half else (0, 0)
    # A verify that is pending is the last step.
    yield "committed_step", (0, span.step - 1 if span.pending else span.step)
    is_last = 0 < span.committed_step == span.step
    most = max_draft if span.committed_step else 0
    yield "committed_accepted", (span.replay, span.replay) if is_last else (0, most)
    if index:
        yield "num_commits", (0, 0)
