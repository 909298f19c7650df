"""Whose adapter is loaded next, and that a load which has begun ends before the next one begins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rigs.adapter_server import Parts
from rigs.scheduler_rig import turns
from rigs.until import until

from deltaline_server.principal import Principal

MANY, FEW = Principal(1, "many"), Principal(2, "few")


class Loads(Parts):
    """Loads of a folder's adapter by principals, in the order in which they ended. Reading waits until it may go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ended, self.is_reading, self.may_read = list[str](), threading.Event(), threading.Event()
        self.before_reading = self._wait

    def _wait(self) -> None:
        self.is_reading.set()
        assert self.may_read.wait(60)

    async def load(self, owner: Principal) -> None:
        await self.loader.load_directory("good", False, owner)
        self.ended.append(owner.name)


@pytest.fixture
async def loads(tmp_path: Path) -> AsyncIterator[Loads]:
    loads = Loads(tmp_path)
    yield loads
    loads.may_read.set()
    await loads.close()


async def test_nobody_waits_for_all_that_another_loads(loads: Loads) -> None:
    """Not even behind loads of what is there, for each of which the whole file is read and hashed."""
    loading = [asyncio.create_task(loads.load(owner)) for owner in (MANY, MANY, MANY, MANY, FEW, FEW)]
    await until(loads.is_reading.is_set)
    loads.may_read.set()
    await asyncio.gather(*loading)
    assert loads.ended == ["many", "few", "many", "few", "many", "many"]


async def test_a_load_that_has_begun_is_finished_however_often_its_caller_is_cancelled(loads: Loads) -> None:
    first = asyncio.create_task(loads.load(MANY))
    await until(loads.is_reading.is_set)
    loads.is_reading.clear()
    second = asyncio.create_task(loads.load(FEW))
    for _ in range(3):
        first.cancel()
        await turns()
    assert not first.done() and not loads.is_reading.is_set()
    loads.may_read.set()
    await second
    assert first.cancelled() and loads.registry.num_loaded == 2
