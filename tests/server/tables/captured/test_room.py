"""Who gives way: what is asked for is freed, by none in vain, or nobody goes; and many take no longer than few."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import pytest
from rigs.num_calls import num_calls
from rigs.scheduler_rig import DECODE, PREFILL, VERIFY, Rig, checksum, outputs, reason
from rigs.seeds import seeds

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import ANONYMOUS
from deltaline_server.step import RowKind
from deltaline_server.tables.captured.capture import NO_SLOTS, Needs
from deltaline_server.tables.captured.state import CapturedState

PAGE = 4
NONE = np.array([0], dtype=np.int32)


class World:
    """Sequences and snapshots that share what they can."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.rig = Rig(slots=24, snapshot_lines=40, pages=400, page_size=PAGE)
        self.at: dict[int, tuple[int, int]] = {}
        self.state_of: dict[bytes, CapturedState] = {}

    def held(self, is_pinned: bool) -> dict[bytes, CapturedState]:
        """The states of the snapshots that are held, pinned ones or the others."""
        told, _ = self.rig.snapshots.describe(ANONYMOUS)
        return {one.id: self.state_of[one.id] for one in told if one.is_pinned == is_pinned}

    async def act(self) -> None:
        rig, draw = self.rig, self.draw
        action, ids = draw.random(), [*self.held(True), *self.held(False)]
        if action < 0.25 and rig.table.num_open < 20:
            (handle,) = rig.restore(draw.choice(ids)) if ids and draw.random() < 0.7 else rig.open()
            position = rig.table.ledger.done.position[0, rig.slots(handle)[0]]
            self.at[handle] = (0, int(position))
        elif action < 0.6 and self.at:
            handle = draw.choice(list(self.at))
            step, position = self.at[handle]
            count = draw.choice([1, 3, PAGE, 3 * PAGE])
            result = await rig.step((handle, PREFILL, step + 1, position, -1, [1.0] * count))
            if reason(result) is None:
                self.at[handle] = (step + 1, position + count)
        elif action < 0.9 and self.at:
            handle = draw.choice(list(self.at))
            for _ in range(draw.choice([1, 1, 2])):
                before = set(rig.table.captured)
                (made,) = await rig.snapshot(handle, is_pinned=draw.random() < 0.1)
                (self.state_of[made.id],) = rig.table.captured - before
        elif self.at:
            handle = draw.choice(list(self.at))
            rig.close(handle)
            del self.at[handle]


def given(rig: Rig, states: Iterable[CapturedState]) -> Needs:
    """What is free if states are let go of that was not before, counted one by one."""
    assert rig.pages is not None
    holders = {"line": rig.capture.line_holders(NO_SLOTS), "page": rig.pages.references()}
    dropped: Counter[tuple[str, int]] = Counter()
    for state in states:
        dropped.update(("line", line) for line in state.read_line.tolist() if line)
        dropped.update(("page", page) for page in state.pages.tolist())
    free = Counter(kind for (kind, number), count in dropped.items() if holders[kind][number] == count)
    return Needs(free["line"], free["page"])


@pytest.mark.parametrize("seed", seeds(6))
async def test_what_is_asked_for_is_freed_by_none_in_vain_or_nobody_goes(seed: int) -> None:
    world = World(seed)
    rig, draw = world.rig, world.draw
    told: Counter[str] = Counter()
    for _ in range(300):
        await world.act()
        held = world.held(is_pinned=False)
        free = set(held)
        kept = draw.sample(sorted(free), min(len(free), draw.choice([0, 0, 2])))
        free -= set(kept)
        most = given(rig, (held[id] for id in free))
        num_pages = draw.choice([0, 1, 10, 40, most.pages, most.pages + 1, draw.randint(0, most.pages)])
        needs, count = Needs(draw.choice([0, 0, 0, 1, 3]), num_pages), draw.choice([0, 0, 0, 2])
        try:
            victims = rig.snapshots.device.room.victims(needs, count, NO_SLOTS, kept)
        except RequestError as error:
            lacks_lines = most.lines < needs.lines or len(free) < count
            expected = Reason.NO_SNAPSHOT_LINES if lacks_lines else Reason.PAGES_EXHAUSTED
            assert error.refusal.reason is expected and (lacks_lines or most.pages < needs.pages)
            told[expected.name] += 1
            continue
        assert len(set(victims)) == len(victims) >= count and set(victims) <= free
        made = given(rig, (held[id] for id in victims))
        assert made.lines >= needs.lines and made.pages >= needs.pages
        if count or (needs.lines and needs.pages):
            continue  # some go for one that would also do for the other
        for id in victims:
            less = given(rig, (held[other] for other in victims if other != id))
            assert less.lines < needs.lines or less.pages < needs.pages
            told["needed"] += 1
    assert min(told[name] for name in ("NO_SNAPSHOT_LINES", "PAGES_EXHAUSTED", "needed")) > 5, told


async def calls_beside(num_snapshots: int, num_tokens: int) -> int:
    """Calls of ours while a step of so many tokens lacks pages beside so many snapshots of a page each."""
    rig = Rig(slots=4, snapshot_lines=num_snapshots, pages=num_snapshots + 4, page_size=PAGE)
    step, epoch = 1, rig.table.server_epoch
    for i in range(num_snapshots):
        if i % 32 == 0:
            rig.table.close(epoch, rig.table.handles(np.arange(rig.table.num_open)))
            (handle,) = rig.open()
            step = 1
        await rig.submit(rig.request((handle, PREFILL, step, PAGE * (step - 1), -1, [1.0] * PAGE)))
        await rig.states.create(epoch, np.array([handle], dtype=np.uint64), ANONYMOUS, lease_s=None, is_pinned=False)
        step += 1
    rig.close(handle)
    (handle,) = rig.open()
    assert rig.snapshots.num_held == num_snapshots
    request = rig.request((handle, PREFILL, 1, 0, -1, [1.0] * num_tokens))
    return num_calls(lambda: rig.submit(request))


@pytest.mark.parametrize("num_tokens", [PAGE * 6, PAGE * 10_000])
async def test_how_many_snapshots_there_are_does_not_tell_in_calls(num_tokens: int) -> None:
    """Whether some give way, or all together would not do."""
    few, many = [await calls_beside(count, num_tokens) for count in (64, 1024)]
    assert many <= few + 10


async def test_decodes_find_no_room_to_make() -> None:
    """A step that lacks nothing asks for nothing."""
    rig = Rig(slots=4, snapshot_lines=2, pages=8, page_size=PAGE)
    assert rig.pages is not None
    rig.pages.num_givable = lambda: pytest.fail("asked")
    rig.pages.make_room = lambda num_pages: pytest.fail("asked")
    (handle,) = rig.open()
    assert reason(await rig.step((handle, DECODE, 1, 0, -1, [1.0]))) is None


class UnevenWorld:
    """Sequences of two spans, of which one steps without the other and stays where it was: drafts of which none is
    accepted. So a sequence may wait on a line with each span."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.rig = Rig(slots=6, spans=2, snapshot_lines=4, pages=120, page_size=PAGE, paged_spans=(0, 1))
        self.tokens: dict[int, list[float]] = {}
        self.steps: dict[tuple[int, int], int] = {}

    async def step(self, handle: int, kind: RowKind, tokens: list[float], spans: Iterable[int] = (0, 1)) -> None:
        known = self.tokens[handle]
        for span in spans:
            step = self.steps[span, handle] = self.steps.get((span, handle), 0) + 1
            result = await self.rig.step((handle, kind, step, len(known), -1, tokens), span=span)
            ends = range(len(known) + 1, len(known) + len(tokens) + 1)
            assert outputs(result) == [checksum([*known, *tokens][:end]) for end in ends]
            if kind is VERIFY:
                self.rig.table.commit(
                    self.rig.table.server_epoch, span, np.array([handle], dtype=np.uint64), np.array([step]), NONE
                )

    async def act(self) -> None:
        rig, draw, handles = self.rig, self.draw, list(self.tokens)
        held = [one.id for one in rig.snapshots.describe(ANONYMOUS)[0]]
        action = draw.choice("oppvvvssrc")
        if action == "o" and len(handles) < 6:
            self.tokens[rig.open()[0]] = []
        elif action == "p" and handles:
            handle, tokens = draw.choice(handles), [float(draw.randint(1, 9)) for _ in range(draw.choice([1, 5]))]
            await self.step(handle, PREFILL, tokens)
            self.tokens[handle] += tokens
        elif action == "v" and handles:
            await self.step(draw.choice(handles), VERIFY, [7.0, 8.0], draw.choice([(0,), (1,)]))
        elif action == "s" and handles:
            with suppress(RequestError):
                await rig.snapshot(*draw.sample(handles, draw.randint(1, min(3, len(handles)))))
        elif action == "r" and held:
            rig.snapshots.release([draw.choice(held)], ANONYMOUS)
        elif action == "c" and handles:
            rig.close(handle := draw.choice(handles))
            del self.tokens[handle]


@pytest.mark.parametrize("seed", seeds(6))
async def test_room_that_was_made_is_there_and_nobody_reads_anothers_state(seed: int) -> None:
    world = UnevenWorld(seed)
    rig, num_two, num_made = world.rig, 0, 0
    for _ in range(400):
        await world.act()
        rig.snapshots.check_integrity()
        is_read = (rig.table.read_line != 0) & (rig.table.read_line != rig.table.write_line)
        num_two += int((is_read.all(axis=0) & (rig.table.read_line[0] != rig.table.read_line[1])).sum())
        if world.draw.random() < 0.1:
            lines = world.draw.randint(1, 3)
            with suppress(RequestError):
                rig.snapshots.device.make_room(Needs(lines))
                assert rig.lines.num_freezable >= lines
                num_made += 1
    assert num_two > 5 and num_made > 5
