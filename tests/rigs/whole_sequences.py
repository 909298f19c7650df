"""Sequences that leave one rig and go on at another: each span is stepped by itself, and a step may be sent again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from rigs.exchanged_states import coming
from rigs.state_rig import Array, StateRig

from deltaline_server.principal import ANONYMOUS, Principal
from deltaline_server.snapshots.stream import Arriving
from deltaline_server.step import OutputRows, RowKind, RowOutcome, RowWaypoints, StepForm, StepRequest, StepResult


@dataclass(frozen=True)
class Asked:
    """What a step asks, of which its inputs follow."""

    step: int
    position: int
    kind: RowKind
    count: int
    accepted: int = -1
    waypoints: RowWaypoints | None = None


@dataclass
class Cell:
    """How far a span is, and its last step."""

    step: int = 0
    position: int = 0
    last: Asked | None = None


@dataclass
class Traveller:
    """A sequence of one principal at a rig."""

    rig: StateRig
    handle: int
    owner: Principal = ANONYMOUS
    cells: list[Cell] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells = self.cells or [Cell() for _ in self.rig.model.spans]

    @property
    def handles(self) -> Any:
        return np.array([self.handle], dtype=np.uint64)

    def at(self, rig: StateRig, handle: int) -> Traveller:
        """The same at another rig."""
        return Traveller(rig, handle, self.owner, deepcopy(self.cells))

    def send(self, span: int, asked: Asked) -> asyncio.Future[StepResult]:
        """A step, new or not."""
        ends = self.rig.model.ends[span]
        draw = np.random.default_rng([asked.step, asked.position, span])
        hidden = draw.standard_normal((asked.count, ends.input_width)).astype(self.rig.model.numpy_dtype)
        form = StepForm(
            self.rig.table.server_epoch,
            span,
            self.handles,
            np.array([asked.kind], dtype=np.uint8),
            np.array([asked.accepted], dtype=np.int32),
            np.array([0, asked.count], dtype=np.int64),
            OutputRows.ALL,
            0,
            ends,
            {} if asked.waypoints is None else {0: asked.waypoints},
        )
        numbers = np.array([asked.step]), np.array([asked.position])
        done: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self.rig.scheduler.submit(StepRequest(form, *numbers, hidden, principal=self.owner), done.set_result)
        return done

    def begin(
        self, span: int, kind: RowKind, count: int, accepted: int = -1, waypoints: RowWaypoints | None = None
    ) -> asyncio.Future[StepResult]:
        """The next step of a span."""
        cell = self.cells[span]
        cell.step += 1
        cell.position += max(accepted, 0)
        cell.last = Asked(cell.step, cell.position, kind, count, accepted, waypoints)
        cell.position += 0 if kind is RowKind.VERIFY else count
        return self.send(span, cell.last)

    async def step(
        self, span: int, kind: RowKind, count: int, accepted: int = -1, waypoints: RowWaypoints | None = None
    ) -> Array:
        """The outputs of the next step of a span."""
        result = await self.begin(span, kind, count, accepted, waypoints)
        assert not result.refusals, result.refusals
        assert result.outcome.tolist() == [RowOutcome.EXECUTED]
        return np.array(result.hidden, copy=True)

    async def again(self, span: int) -> StepResult:
        """The last step of a span, sent again."""
        last = self.cells[span].last
        assert last is not None
        return await self.send(span, last)

    def commit(self, span: int, accepted: int) -> None:
        """Commit the verify that was the last step of a span."""
        cell, table = self.cells[span], self.rig.table
        counts, steps = np.array([accepted], dtype=np.int32), np.array([cell.step])
        refusals = table.commit(table.server_epoch, span, self.handles, steps, counts, self.owner)[1]
        assert not refusals, refusals
        cell.position += accepted

    async def exported(self, ahead: int = 0) -> bytes:
        """The sequence's file, without the pages of tokens that went ahead."""
        passage = self.rig.passage
        async with passage.stored(self.rig.table.server_epoch, self.handles, self.owner, ahead=ahead) as id:
            return await self._file(id)

    async def pages(self, begin: int, end: int) -> bytes:
        """The file of whole pages of tokens that are settled."""
        passage, at = self.rig.passage, (self.rig.table.server_epoch, self.handles, self.owner)
        async with passage.stored_pages(*at, begin, end) as id:
            return await self._file(id)

    async def _file(self, id: bytes) -> bytes:
        assert self.rig.exchange is not None
        pieces = self.rig.exchange.pieces(id, self.owner, pause_s=60.0, whole_s=600.0)
        return b"".join([bytes(piece) async for piece in pieces])

    async def moved_to(self, rig: StateRig) -> Traveller:
        """What comes of it at another rig."""
        return self.at(rig, await imported(rig, [await self.exported()], self.owner))


def opened(rig: StateRig, owner: Principal = ANONYMOUS) -> Traveller:
    return Traveller(rig, int(rig.table.open(1, lease_s=1e3, principal=owner).handles[0]), owner)


async def imported(
    rig: StateRig, pieces: Iterable[bytes], owner: Principal = ANONYMOUS, lease_s: float | None = 1e3
) -> int:
    """The handle of the sequence that comes of pieces, as the service opens it."""
    return await imported_by(rig, coming(pieces), owner, lease_s)


async def imported_by(
    rig: StateRig, pieces: AsyncIterator[bytes], owner: Principal = ANONYMOUS, lease_s: float | None = 1e3
) -> int:
    exchange, arriving = rig.exchange, Arriving(pieces)
    assert exchange is not None
    with exchange.on_its_way(owner), rig.passage.coming(owner) as sequence:
        stored, _ = await exchange.read_header(arriving)
        exchange.check_adapter(stored.header, owner)
        assert stored.header.is_sequence
        while stored.header.is_pages:
            sequence.expect(stored.header)
            await sequence.land(partial(exchange.arrived, arriving, stored, owner, is_pinned=False))
            stored, _ = await exchange.read_header(arriving)
        await sequence.landed()
        sequence.expect(stored.header)
        async with exchange.received(arriving, stored, owner, is_pinned=False) as header:
            [handle] = (await sequence.open(header, lease_s)).tolist()
    return int(handle)


def check_idle(*rigs: StateRig) -> None:
    """Nothing is left of what travelled but sequences."""
    for rig in rigs:
        assert rig.tiers.host is not None and rig.tiers.host.used_bytes == 0
        rig.tiers.host.check_integrity()
        rig.snapshots.check_integrity()


async def prefilled(rig: StateRig) -> Traveller:
    """So far that a verify's drafts begin a page."""
    one = opened(rig)
    for span in range(len(one.cells)):
        await one.step(span, RowKind.PREFILL, 46)
    return one
