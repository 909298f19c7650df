"""A sequence's state in an engine of a small model, of one process or over ranks: gathered, or scattered and gathered
again, and what the sequence's next step gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rigs.ranked_engine import PAGE_SIZE, SPANS, WAIT_S, RankedEngine, load, open_engine

from deltaline_server.engine.rank_executor import LeadingExecutor, follow
from deltaline_server.layers.shapes import PagedShape
from deltaline_server.ranks.ways import Ranks, Ways
from deltaline_server.snapshots.device.shared_transfer import SharedTransfer
from deltaline_server.snapshots.device.transfer import StatePlace, StateTransfer
from deltaline_server.snapshots.layout import Bytes, SpanProgress, StateLayout, state_bytes
from deltaline_server.snapshots.tiers import layer_numbers, make_layout, make_share
from deltaline_server.tables.pages import PagesPlaced

# 70 tokens, 2 of 4 drafts to be taken in by the next step.
PROGRESS = [
    SpanProgress.captured(step=1, position=72, replay=2, zero_commits=0, draft_half=1, num_commits=commits)
    for commits in (1, 0)
]
COMMITS = np.array([[70, 1, 2]], dtype=np.int64)
TOKENS = 73

Carried = tuple[Bytes, list[NDArray[np.float32]]]


def check_pages_alone(
    layout: StateLayout,
    memory: Bytes,
    do: Callable[[Callable[[], None]], None],
    transfer: StateTransfer | SharedTransfer,
    pages: NDArray[np.int32],
) -> None:
    """The first page of a state that was gathered, gathered and scattered by itself, has the same keys and values."""
    of_page, paged = SpanProgress(position=PAGE_SIZE), layout.paged_spans
    spans = [of_page if span in paged else SpanProgress() for span in range(len(SPANS))]
    sections, whole = layout.pages.sections(spans), layout.sections(PROGRESS)
    alone = np.full(state_bytes(sections), 0xA5, dtype=np.uint8)
    place = StatePlace((), pages[:1])
    for work in (
        partial(transfer.gather, spans, place, COMMITS[:0], alone),
        partial(transfer.scatter, spans, place, alone),
    ):
        do(work)
    shapes = [layer.shape for layer in layout.pages.layers]
    assert len(sections) == sum(shape.page_parts for shape in shapes if isinstance(shape, PagedShape))
    for section in sections:
        [of_whole] = [one for one in whole if (one.part, one.number) == (section.part, section.number)]
        np.testing.assert_array_equal(section.view(alone), of_whole.view(memory)[:, :PAGE_SIZE])


def carry(ranks: Ranks | None, config: Path, stored: Bytes | None) -> Carried | None:
    """Return the bytes of a state, and the outputs of its next step on each span; on rank 0.

    stored: such bytes, which are scattered first; None for a state that is made here.
    """
    model, pool, executor = load(ranks, config)
    layout = make_layout(model, pool)
    transfer: StateTransfer | SharedTransfer
    if ranks is None:
        transfer, opened = StateTransfer(layout, layer_numbers(model), pool), open_engine(model, executor)
    else:
        ways = Ways.open(ranks)
        share = make_share(model, pool, ways.states)
        if ranks.rank:
            follow(executor, ways, share.follow, lambda: None)
            return None
        leading = LeadingExecutor(executor, ways)
        opened = open_engine(model, leading)
        transfer = SharedTransfer(layout, share, ways.states, leading.tell_transfer)
    line, pages = (1, np.array([1, 2], dtype=np.int32)) if stored is None else (3, np.array([5, 3], dtype=np.int32))
    opened.engine.place_pages(PagesPlaced(np.array([line]), pages[None], np.zeros((2, 0), dtype=np.int64)))
    place = StatePlace((line,) * len(SPANS), pages)
    assert len(pages) * PAGE_SIZE >= TOKENS
    if stored is None:
        nothing = np.zeros((3, 0), dtype=np.int32)
        opened.run([(70, 0, line, 70, 0, 0, 0)], nothing)
        opened.run([(4, line, line, 0, 0, 0, 70)], nothing)
    else:
        opened.engine.transfer(partial(transfer.scatter, PROGRESS, place, stored)).result(WAIT_S)
        assert np.array_equal(transfer.commits(PROGRESS, stored), COMMITS)
    memory = np.full(state_bytes(layout.sections(PROGRESS)), 0xA5, dtype=np.uint8)
    opened.engine.transfer(partial(transfer.gather, PROGRESS, place, COMMITS, memory)).result(WAIT_S)
    check_pages_alone(layout, memory, lambda work: opened.engine.transfer(work).result(WAIT_S), transfer, pages)
    token = RankedEngine(opened.engine, opened.widths)
    made = token.run([(1, line, line, 1, 2, 1, 72)], np.zeros((3, 0), dtype=np.int32))
    opened.engine.close()
    return memory, made
