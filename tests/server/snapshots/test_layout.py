"""Where the sections of a state are: sizes, order, limits, ranks' parts, and that none of it changes unseen."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from rigs.states import ATTENTION, GATED_DELTA, LAYOUT, MAX_DRAFT, MOVED, SNAPSHOT

from deltaline_server.layers.shapes import GatedDeltaNetShape
from deltaline_server.snapshots.layout import (
    ALIGNMENT,
    MAX_COUNT,
    LayoutError,
    Part,
    Section,
    SpanProgress,
    StateLayer,
    StateLayout,
    state_bytes,
)

FRESH = (SpanProgress(), SpanProgress())


def found(sections: tuple[Section, ...], part: Part, number: int, half: int = 0) -> Section:
    [section] = [each for each in sections if (each.part, each.number, each.half) == (part, number, half)]
    return section


def test_sections_follow_each_other_aligned() -> None:
    for spans in (FRESH, SNAPSHOT, MOVED):
        sections, end = LAYOUT.sections(spans), 0
        for section in sections:
            assert section.offset == end and section.offset % ALIGNMENT == 0 and section.num_bytes > 0
            end = section.end
            assert 0 <= end - section.offset - section.num_bytes < ALIGNMENT
        assert state_bytes(sections) == end


def test_a_snapshot_holds_what_the_next_step_reads_and_no_more() -> None:
    sections = LAYOUT.sections(SNAPSHOT)
    assert [(each.part.name, each.number, each.half, each.shape, each.itemsize) for each in sections] == [
        ("RECURRENT", 0, 0, (4, 6, 8), 4),
        ("RECURRENT", 3, 0, (4, 6, 8), 4),
        ("CONV_Q", 0, 0, (2, 5, 8), 2),  # W - 1 = 3 columns behind the 2 that are replayed
        ("CONV_K", 0, 0, (2, 5, 8), 2),
        ("CONV_V", 0, 0, (4, 5, 6), 2),
        ("CONV_X", 3, 0, (4, 2, 6), 2),
        ("CONV_B", 3, 0, (2, 2, 8), 2),
        ("CONV_C", 3, 0, (2, 2, 8), 2),
        ("DRAFT_KEYS", 0, 1, (2, 2, 8), 4),
        ("DRAFT_UPDATES", 0, 1, (4, 2, 6), 4),
        ("DRAFT_GATES", 0, 1, (4, 2), 4),
        ("KEYS", 1, 0, (2, 70, 16), 2),
        ("VALUES", 1, 0, (2, 70, 16), 2),
        ("KEYS", 4, 0, (2, 70, 16), 2),
        ("VALUES", 4, 0, (2, 70, 16), 2),
    ]


def test_a_sequence_that_moves_has_its_pending_verify_both_halves_commits_and_reply() -> None:
    sections = LAYOUT.sections(MOVED)
    assert found(sections, Part.KEYS, 1).shape[1] == 64 + 3
    assert found(sections, Part.KEYS, 4).shape[1] == 67
    assert found(sections, Part.DRAFT_KEYS, 0, 0).shape[1] == 3 and found(sections, Part.DRAFT_KEYS, 0, 1).shape[1] == 1
    assert found(sections, Part.CONV_Q, 0).shape[1] == 3 + 3 and found(sections, Part.CONV_X, 3).shape[1] == 2 + 4
    assert found(sections, Part.COMMITS, 0).shape == (2, 3) and found(sections, Part.COMMITS, 1).shape == (1, 3)
    assert found(sections, Part.REPLY, 0).num_bytes == 77


def test_a_state_of_27_billion_parameters_has_the_bytes_that_it_must() -> None:
    shape = GatedDeltaNetShape(16, 48, 128, 128, 4)
    layout = StateLayout(tuple(StateLayer(i, 0, shape) for i in range(48)), 1, 2, 4, max_draft=8)
    sections = layout.sections([SpanProgress(position=8192)])
    assert state_bytes(sections) == 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2) == 153_944_064


@pytest.mark.parametrize("name", [field.name for field in fields(SpanProgress)])
def test_a_field_out_of_range_is_named(name: str) -> None:
    for value in (-1, MAX_COUNT + 1):
        with pytest.raises(LayoutError, match=rf"^spans\[1\]\.{name}: expected 0 \.\. \d+, got {value}$"):
            LAYOUT.sections([SpanProgress(), replace(SpanProgress(), **{name: value})])


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        (SpanProgress(pending=MAX_DRAFT + 1), "pending: expected 0 .. 4, got 5"),
        (SpanProgress(replay=2), "records_0: expected at least 2, got 0"),
        (SpanProgress(replay=2, records_0=2, draft_half=1), "records_1: expected at least 2, got 0"),
        (SpanProgress(draft_half=2), "draft_half: expected 0 .. 1, got 2"),
        (SpanProgress(position=501), "position: expected 0 .. 500, got 501"),
        (SpanProgress(position=499, pending=2, records_0=2), "position: expected 0 .. 498, got 499"),
        (SpanProgress(num_commits=16385), "num_commits: expected 0 .. 16384, got 16385"),
    ],
)
def test_a_progress_that_cannot_be_is_refused(progress: SpanProgress, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        LAYOUT.sections([progress, SpanProgress()])
    assert str(error.value) == f"spans[0].{message}"


def test_positions_have_no_limit_where_nothing_grows() -> None:
    layout = StateLayout((StateLayer(0, 0, GATED_DELTA),), 1, 2, 4, MAX_DRAFT, max_tokens=500)
    assert layout.sections([SpanProgress(position=10**12)]) == layout.sections([SpanProgress(position=1)])


def test_a_size_beyond_all_bounds_is_refused_before_it_is_had() -> None:
    layout = StateLayout((StateLayer(0, 0, ATTENTION),), 1, 2, 4, MAX_DRAFT)
    with pytest.raises(LayoutError, match="size: expected at most"):
        layout.sections([SpanProgress(position=MAX_COUNT)])
    with pytest.raises(LayoutError, match="spans: expected 1, got 2"):
        layout.sections(FRESH)


def test_ranks_have_runs_of_whole_heads() -> None:
    sections = LAYOUT.sections(SNAPSHOT)
    for section in sections:
        for world_size in (1, 2):
            shares = [section.share(rank, world_size) for rank in range(world_size)]
            assert [offset for offset, _ in shares] == [
                section.offset + rank * section.num_bytes // world_size for rank in range(world_size)
            ]
            assert {count for _, count in shares} == {section.num_bytes // world_size}
    keys = found(sections, Part.KEYS, 1)
    half = keys.num_bytes // 2
    assert [keys.share(rank, 4) for rank in range(4)] == [(keys.offset, half)] * 2 + [(keys.offset + half, half)] * 2
    with pytest.raises(ValueError, match="world_size: expected a divisor or a multiple of 2 heads, got 3"):
        keys.share(0, 3)
