"""What prefills of real layers leave on their way: bitwise the state of a sequence that stopped there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.small_models import GATED_DELTA_NET, HYBRID, KIMI, LFM2, MAMBA1, MAMBA2
from rigs.state_rig import PAGE_SIZE, Array, InlineEngine, StateRig

from deltaline_server.engine import executor
from deltaline_server.principal import ANONYMOUS
from deltaline_server.scheduling.waypoints import Waypoints
from deltaline_server.step import (
    OutputRows,
    RowKind,
    RowWaypoints,
    StepForm,
    StepRequest,
    StepResult,
)
from deltaline_server.tables.captured.waypoints import WaypointTable
from deltaline_server.tables.pages import PagePool

MODELS: dict[str, tuple[dict[str, Any], list[range] | None]] = {
    "gated_delta_net": (GATED_DELTA_NET, None),
    "mamba1": (MAMBA1, None),
    "mamba2": (MAMBA2, None),
    "short convolutions": (LFM2, None),
    "latents": (KIMI, None),
    "hybrid": (HYBRID, None),
    "hybrid, two spans": (HYBRID, [range(0, 1), range(1, 2)]),
    "streams": (HYBRID | {"hc_mult": 2}, None),
}
LENGTH = 150


class World:
    """A rig, and the tokens that every sequence is fed, on every span others."""

    def __init__(self, name: str, folder: Path, chunk_tokens: int) -> None:
        config, spans = MODELS[name]
        self.rig = StateRig(
            config,
            folder,
            lambda batch, handles: lambda hidden: None,
            slots=8,
            snapshot_lines=4,
            pages=80,
            spans=spans,
            references=1,
            chunk_tokens=chunk_tokens,
        )
        rng = np.random.default_rng(5)
        self.tokens = [
            rng.standard_normal((LENGTH + 4, one.input_width)).astype(np.float32) for one in self.rig.model.ends
        ]

    def open(self) -> int:
        return int(self.rig.table.open(1).handles[0])

    def restored(self, id: bytes) -> int:
        return int(self.rig.states.restore([id], ANONYMOUS, lease_s=None).handles[0])

    async def step(
        self, handle: int, number: int, begin: int, end: int, kind: RowKind = RowKind.PREFILL, **changes: Any
    ) -> list[StepResult]:
        """A step of every span, with its tokens begin .. end - 1."""
        results = []
        for span, shapes in enumerate(self.rig.model.ends):
            form = StepForm(
                self.rig.table.server_epoch,
                span,
                np.array([handle], dtype=np.uint64),
                np.array([kind], dtype=np.uint8),
                np.array([-1], dtype=np.int32),
                np.array([0, end - begin]),
                OutputRows.ALL,
                0,
                shapes,
                **changes,
            )
            request = StepRequest(form, np.array([number]), np.array([begin]), self.tokens[span][begin:end])
            done: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
            self.rig.scheduler.submit(request, done.set_result)
            while not done.done():
                assert not self.rig.scheduler.has_failed
                await asyncio.sleep(0)
            results.append(done.result())
            assert not results[-1].refusals
            self.rig.scheduler.settle()
            self.rig.snapshots.check_integrity()
            self.rig.waypoints.check_integrity()
        return results

    async def continued(self, handle: int, step: int, position: int) -> list[Array]:
        """What the rest of the prompt and some decodes give behind a position."""
        found = [result.hidden for result in await self.step(handle, step, position, LENGTH)]
        for i in range(LENGTH, LENGTH + 4):
            step += 1
            found += [result.hidden for result in await self.step(handle, step, i, i + 1, RowKind.DECODE)]
        return found


def assert_equal(made: list[Array], expected: list[Array]) -> None:
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("first", [0, 7, 16])
async def test_it_goes_on_like_a_sequence_that_stopped_there(name: str, first: int, tmp_path: Path) -> None:
    """With the same chunks: pages are cut at 7 tokens, and whole at none and 16."""
    world = World(name, tmp_path, chunk_tokens=64)
    assert first + 128 < LENGTH and 16 % PAGE_SIZE == 0
    parent, stopped = world.open(), world.open()
    for handle in (parent, stopped) if first else ():
        await world.step(handle, 1, 0, first)
    places = {0: RowWaypoints((64, 128), at_end=True, keys={first + 128: b"k" * 16})}
    *others, last = await world.step(parent, 1 + (first > 0), first, LENGTH, waypoints=places)
    assert not any(result.waypoints for result in others)
    assert [place.position for _, place in last.waypoints] == [first + 64, first + 128, LENGTH]
    table, position = world.rig.table, first
    for number, (_, place) in enumerate(last.waypoints[:2], 1 + (first > 0)):
        await world.step(stopped, number, position, place.position)
        position = place.position
        # The one that stopped goes on in a fork, so that it can stop again.
        handles = np.array([stopped], dtype=np.uint64)
        forked = await world.rig.states.fork(table.server_epoch, handles, 1, ANONYMOUS, lease_s=None)
        expected = await world.continued(int(forked.handles[0]), 1, position)
        child = world.restored(place.snapshot)
        assert_equal(await world.continued(child, 1, position), expected)
        table.close(table.server_epoch, np.array([child, *forked.handles.tolist()], dtype=np.uint64))
    child = world.restored(last.waypoints[2][1].snapshot)
    decodes = [
        await world.step(handle, number, LENGTH, LENGTH + 1, RowKind.DECODE)
        for handle, number in ((child, 1), (parent, 2 + (first > 0)))
    ]
    assert_equal(*([result.hidden for result in results] for results in decodes))


@pytest.mark.parametrize("name", MODELS)
async def test_a_place_within_a_chunk_is_that_of_one_at_its_end(name: str, tmp_path: Path) -> None:
    """The chunk's shape is the device's business; what the kernels leave in it is what they would have at its end."""
    world = World(name, tmp_path, chunk_tokens=1024)
    parent, stopped = world.open(), world.open()
    *_, last = await world.step(parent, 1, 0, LENGTH, waypoints={0: RowWaypoints((64, 128))})
    await world.step(stopped, 1, 0, 128)
    child = world.restored(last.waypoints[1][1].snapshot)
    expected = await world.continued(stopped, 2, 128)
    assert_equal(await world.continued(child, 1, 128), expected)


def forget_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that a place cuts is not copied for it."""
    monkeypatch.setattr(InlineEngine, "place_pages", lambda self, placed: None)


def copy_before_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that a place cuts is copied before the device has written it."""
    take = WaypointTable.take

    def taken(self: WaypointTable, *place: Any) -> int:
        line = take(self, *place)
        self.share_pages()
        return line

    monkeypatch.setattr(WaypointTable, "take", taken)


def share_a_page_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page that a place cuts goes on being written by the sequence."""
    share = PagePool.share

    def shared(self: PagePool, line: int, num_tokens: int) -> tuple[Any, int]:
        pages, source = share(self, line, num_tokens)
        if source:
            pages = np.append(pages[:-1], np.int32(source))
        return pages, 0

    monkeypatch.setattr(PagePool, "share", shared)


def write_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is not told of the lines."""
    monkeypatch.setattr(executor, "fill_waypoints", lambda table, *_: table.fill(-1))


def write_the_line_of_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two places in a chunk each has the other's line."""
    take = Waypoints.take

    def taken(self: Waypoints, *batch: Any) -> Any:
        found = take(self, *batch)
        if found is not None:
            found[2] = found[2, ::-1].copy()
        return found

    monkeypatch.setattr(Waypoints, "take", taken)


def give_back_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is free again while it is under way."""
    share_pages = WaypointTable.share_pages

    def shared(self: WaypointTable) -> None:
        share_pages(self)
        for state in self._device.under_way:
            self._table.lines.release(state.read_line.tolist())

    monkeypatch.setattr(WaypointTable, "share_pages", shared)


@pytest.mark.parametrize(
    "plant",
    [
        forget_the_copy,
        copy_before_the_batch,
        share_a_page_too_many,
        write_no_line,
        write_the_line_of_another_place,
        give_back_too_early,
    ],
)
async def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch)
    world = World("hybrid", tmp_path, chunk_tokens=1024)
    parent, stopped = world.open(), world.open()
    with pytest.raises((AssertionError, ValueError)):
        for handle in (parent, stopped):
            await world.step(handle, 1, 0, 7)
        [last] = await world.step(parent, 2, 7, LENGTH, waypoints={0: RowWaypoints((64, 128))})
        await world.step(stopped, 2, 7, 71)
        expected = await world.continued(stopped, 3, 71)
        assert_equal(await world.continued(world.restored(last.waypoints[0][1].snapshot), 1, 71), expected)
