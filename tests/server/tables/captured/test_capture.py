"""Captured states: nobody writes them, who begins from one goes on as the sequence did, and all of it comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, PREFILL, VERIFY, Rig, checksum, outputs, reason, refuses

from deltaline_server.errors import Reason
from deltaline_server.tables.lines import LinePool
from deltaline_server.tables.pages import PagePool


def tokens(count: int, first: int = 1) -> list[float]:
    return [float(i) for i in range(first, first + count)]


def make_rig(**changes: Any) -> Rig:
    return Rig(**({"snapshot_lines": 4, "pages": 40} | changes))


def used(rig: Rig) -> tuple[int, int, int]:
    """Lines in use, frozen ones, and pages in use."""
    assert rig.pages is not None
    return rig.lines.num_used, rig.lines.num_frozen, rig.pages.num_used


def commit(rig: Rig, handle: int, step: int, accepted: int) -> None:
    handles, steps = np.array([handle], dtype=np.uint64), np.array([step])
    _, refusals = rig.table.commit(rig.table.server_epoch, 0, handles, steps, np.array([accepted], dtype=np.int32))
    assert not refusals


@pytest.mark.parametrize("length", [4, 6, 8])
async def test_parent_and_children_go_on_apart_in_one_batch_and_all_comes_back(length: int) -> None:
    rig = make_rig()
    (parent,) = rig.open()
    await rig.step((parent, PREFILL, 1, 0, -1, tokens(length)))
    zeroed = len(rig.zeroed)
    (state,) = rig.captured(parent)
    first, second = rig.restored(state, count=2)
    assert (state.position, state.num_lines, rig.lines.num_frozen) == (length, 1, 1)
    rows = [(parent, DECODE, 2, length, -1, [50.0]), (first, DECODE, 1, length, -1, [60.0])]
    result = await rig.step(*rows, (second, DECODE, 1, length, -1, [70.0]))
    expected = [checksum([*tokens(length), token]) for token in (50.0, 60.0, 70.0)]
    assert [outputs(result, row) for row in range(3)] == [[one] for one in expected]
    rows = [(parent, DECODE, 3, length + 1, -1, [1.0]), (second, DECODE, 2, length + 1, -1, [2.0])]
    result = await rig.step(*rows)
    assert outputs(result, 0) == [checksum([*tokens(length), 50.0, 1.0])]
    assert outputs(result, 1) == [checksum([*tokens(length), 70.0, 2.0])]
    (third,) = rig.restored(state)
    result = await rig.step((third, PREFILL, 1, length, -1, tokens(9, 80)))
    assert outputs(result)[-1] == checksum([*tokens(length), *tokens(9, 80)])
    assert len(rig.zeroed) == zeroed  # each was written before it was read
    rig.released(state)
    rig.close(parent, first, second, third)
    rig.table.check_integrity()
    assert used(rig) == (0, 0, 0)


async def test_a_frozen_line_goes_back_when_every_span_of_every_reader_has_stepped() -> None:
    rig = make_rig(spans=2, paged_spans=(1,))
    (parent,) = rig.open()
    for span in (0, 1):
        await rig.step((parent, PREFILL, 1, 0, -1, tokens(5)), span=span)
    (state,) = rig.captured(parent)
    (child,) = rig.restored(state)
    rig.released(state)
    for handle, step, span in ((parent, 2, 0), (child, 1, 1), (child, 1, 0)):
        assert used(rig)[:2] == (3, 1)
        result = await rig.step((handle, DECODE, step, 5, -1, [9.0]), span=span)
        assert outputs(result) == [checksum([*tokens(5), 9.0])]
    assert used(rig)[:2] == (3, 1)
    await rig.step((parent, DECODE, 2, 5, -1, [9.0]), span=1)
    assert used(rig)[:2] == (2, 0)


async def test_a_reader_that_ends_before_it_steps_lets_go() -> None:
    rig = make_rig()
    (parent,) = rig.open()
    await rig.step((parent, PREFILL, 1, 0, -1, tokens(6)))
    (state,) = rig.captured(parent)
    (child,) = rig.restored(state)
    rig.released(state)
    rig.close(parent)
    assert used(rig)[1] == 1
    rig.close(child)
    assert used(rig) == (0, 0, 0)


async def test_accepted_drafts_are_replayed_by_the_parent_and_its_children() -> None:
    rig = make_rig()
    (parent,) = rig.open()
    await rig.step((parent, PREFILL, 1, 0, -1, tokens(5)))
    await rig.step((parent, VERIFY, 2, 5, -1, tokens(3, 20)))
    with refuses(Reason.VERIFY_PENDING) as caught:
        rig.captured(parent)
    assert "3 tokens" in str(caught.value)
    commit(rig, parent, 2, 2)
    (state,) = rig.captured(parent)
    (child,) = rig.restored(state)
    expected = [*tokens(5), 20.0, 21.0, 9.0]
    for handle, step in ((child, 1), (parent, 3)):
        assert outputs(await rig.step((handle, DECODE, step, 7, -1, [9.0]))) == [checksum(expected)]
    (again,) = rig.restored(state)
    result = await rig.step((again, VERIFY, 1, 7, -1, [9.0, 8.0]))
    assert outputs(result) == [checksum(expected), checksum([*expected, 8.0])]


async def test_a_count_that_one_span_has_fixed_is_fixed_for_the_children_too() -> None:
    rig = make_rig(spans=2, pages=0)
    (parent,) = rig.open()
    for span in (0, 1):
        await rig.step((parent, PREFILL, 1, 0, -1, tokens(5)), span=span)
    await rig.step((parent, VERIFY, 2, 5, -1, [7.0, 8.0]), span=0)
    commit(rig, parent, 2, 0)
    (state,) = rig.captured(parent)
    (child,) = rig.restored(state)
    assert (state.read_line[0], state.num_lines) == (state.read_line[1], 1)
    await rig.step((child, VERIFY, 1, 5, -1, [7.0, 8.0]), span=1)
    result = await rig.step((child, DECODE, 2, 6, 1, [9.0]), span=1)
    assert reason(result) is Reason.COMMIT_CONFLICT
    result = await rig.step((child, DECODE, 2, 5, 0, [9.0]), span=1)
    assert outputs(result) == [checksum([*tokens(5), 9.0])]


async def test_spans_at_different_positions_mean_nothing() -> None:
    rig = make_rig(spans=2)
    (parent,) = rig.open()
    await rig.step((parent, PREFILL, 1, 0, -1, tokens(5)))
    with refuses(Reason.SPANS_UNEVEN) as caught:
        rig.captured(parent)
    assert "[5, 0]" in str(caught.value) and rig.lines.num_frozen == 0


async def test_a_state_is_captured_again_before_anything_was_done_on_it() -> None:
    rig = make_rig()
    (parent,) = rig.open()
    (nothing,) = rig.captured(parent)
    assert (nothing.position, nothing.num_lines, len(nothing.pages)) == (0, 0, 0)
    await rig.step((parent, PREFILL, 1, 0, -1, tokens(6)))
    (first,) = rig.captured(parent)
    (second,) = rig.captured(parent)
    (child,) = rig.restored(second)
    (third,) = rig.captured(child)
    assert first.read_line.tolist() == second.read_line.tolist() == third.read_line.tolist()
    assert len({int(state.pages[-1]) for state in (first, second, third)}) == 3 and rig.lines.num_frozen == 1
    for state, expected in ((nothing, []), (first, tokens(6)), (third, tokens(6))):
        (handle,) = rig.restored(state)
        result = await rig.step((handle, DECODE, 1, len(expected), -1, [9.0]))
        assert outputs(result) == [checksum([*expected, 9.0])]


async def test_what_was_granted_stays_with_the_sequence() -> None:
    rig = make_rig(pages=6, eager=False)
    (parent,) = rig.open()
    assert rig.pages is not None
    result = await rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(16)), deadline_s=rig.now - 1))
    assert reason(result) is Reason.QUEUE_DEADLINE and rig.pages.num_used == 4
    rig.engine.eager = True
    await rig.step((parent, PREFILL, 1, 0, -1, tokens(5)))
    (state,) = rig.captured(parent)
    assert (len(state.pages), rig.pages.num_used) == (2, 5)  # a copy of the one that is not full
    await rig.step((parent, PREFILL, 2, 5, -1, tokens(11)))
    assert rig.pages.num_used == 5


async def test_an_adapter_is_held_for_as_long_as_a_state_was_made_under_it() -> None:
    rig = make_rig(adapter_slots=2)
    rig.load("7")
    (parent,) = rig.open(adapter="7")
    request = rig.submit(rig.request((parent, PREFILL, 1, 0, -1, tokens(5))))
    rig.device.finish()
    await request
    rig.scheduler.settle()
    (state,) = rig.captured(parent)
    rig.close(parent)
    assert rig.registry.unload("7", drain=True) == 1
    (child,) = rig.restored(state)
    rig.released(state)
    assert outputs(await rig.step((child, DECODE, 1, 5, -1, [9.0]))) == [checksum([*tokens(5), 9.0], 7)]
    rig.close(child)
    assert rig.registry.num_registered == 0


async def test_a_batch_that_writes_what_another_row_reads_is_not_laid_out() -> None:
    lines = LinePool(6, lambda _: None, None, 2)
    lines.allocate(4)
    lines.freeze(1)
    read, write = np.array([1, 0, -1, 3], dtype=np.int32), np.array([2, 4, -1, 3], dtype=np.int32)
    lines.check_batch(read, write)
    with pytest.raises(ValueError, match="writes a line that others may read"):
        lines.check_batch(read, np.array([2, 1, -1, 3], dtype=np.int32))
    with pytest.raises(ValueError, match="reads a line that another may write"):
        lines.check_batch(np.array([3, 0, -1, 3], dtype=np.int32), write)


def test_a_batch_that_writes_a_page_that_others_hold_is_not_laid_out() -> None:
    pages = PagePool(num_pages=8, page_size=4, max_context=32, num_lines=4, spans=[0])
    pages.grant(np.array([1]), np.array([8]))
    held = pages.capture(1, 6, 2)
    pages.check_batch(np.array([2, -1], dtype=np.int32), np.array([6, 2], dtype=np.int32))
    with pytest.raises(ValueError, match="writes a page that others may read"):
        pages.check_batch(np.array([2], dtype=np.int32), np.array([3], dtype=np.int32))
    pages.drop(held)
    pages.check_batch(np.array([2], dtype=np.int32), np.array([3], dtype=np.int32))


@pytest.mark.parametrize("spoil", ["line", "page", "read"])
async def test_wrong_counts_are_noticed(spoil: str) -> None:
    rig = make_rig()
    (parent,) = rig.open()
    await rig.step((parent, PREFILL, 1, 0, -1, tokens(6)))
    (state,) = rig.captured(parent)
    if spoil == "line":
        rig.lines.hold(state.read_line)
    elif spoil == "page":
        assert rig.pages is not None
        rig.pages.drop(state.pages[:1])
    else:
        rig.table.read_line[0, rig.slots(parent)] = rig.table.write_line[rig.slots(parent)]
    with pytest.raises(ValueError, match=r"line pool|page pool|sequence table"):
        rig.table.check_integrity()
