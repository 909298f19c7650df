"""Sequences of random life on few lines: each answers as if it were alone, or the test says which was not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.programs import Alone, Program, relative_error, run_together
from rigs.small_models import HYBRID

from deltaline_client import AsyncClient
from deltaline_server.app import Server
from deltaline_server.layers.kv_cache import KvState
from deltaline_server.tables.lines import LinePool
from deltaline_server.tables.open_tokens import Opened
from deltaline_server.tables.pages import PagePool
from deltaline_server.tables.sequences import SequenceTable

TOLERANCE = 1e-4
NUM_CLIENTS = 8
LINES = 64


@pytest.fixture
def small_model(each_small_model: dict[str, Any]) -> dict[str, Any]:
    return each_small_model


async def churn(server: Server, num_sequences: int) -> list[float]:
    """Put sequences through random lives from 8 clients on 64 lines; the error of each against its run alone."""
    alone = Alone(server.runtime.model, server.config.max_draft_tokens)
    per_client = num_sequences // NUM_CLIENTS
    errors: list[float] = []

    async def one_client(number: int) -> None:
        rng = np.random.default_rng(1000 + number)
        async with AsyncClient(server.address) as client:
            left = per_client
            while left:
                count = min(left, int(rng.integers(1, LINES // NUM_CLIENTS + 1)))
                left -= count
                programs = [
                    Program.draw(int(rng.integers(2**40)), int(rng.integers(1, 9)), 64, lengths=(1, 3, 17, 40))
                    for _ in range(count)
                ]
                sequences = await client.open_many(count)
                outputs = await run_together(client, sequences, programs)
                await client.close(sequences)
                for program, output in zip(programs, outputs, strict=True):
                    expected = alone.run(program)
                    errors.append(max(relative_error(a, e) for a, e in zip(output, expected, strict=True)))

    await asyncio.gather(*(one_client(number) for number in range(NUM_CLIENTS)))
    return errors


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [160, pytest.param(1600, marks=pytest.mark.sweep)])
async def test_many_sequences_on_64_lines_answer_as_if_alone(make_server: Callable[..., Server], count: int) -> None:
    async with make_server(max_sequences=LINES) as server:
        errors = await churn(server, count)
        assert len(errors) == count and max(errors) < TOLERANCE
        server.runtime.table.check_integrity()
        assert server.runtime.table.num_open == 0


@pytest.mark.parametrize("each_small_model", [HYBRID], indirect=True, ids=["hybrid"])
async def test_pages_that_are_poisoned_when_they_come_back_are_not_read(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_server(max_sequences=LINES, page_size=16) as server:
        pool, poisoned, release = server.runtime.pool, set[int](), PagePool.release
        caches = [state for state in pool.layers if isinstance(state, KvState)]

        def poison(self: PagePool, line: int) -> None:
            before = self.num_used
            release(self, line)
            length = (before - self.num_used) * self.page_size
            pages = self.begun(*(np.array([number], dtype=np.int32) for number in (line, 0, length)))[2].tolist()
            for state in caches:
                state.k_pages[pages] = state.v_pages[pages] = float("nan")
            poisoned.update(pages)

        monkeypatch.setattr(PagePool, "release", poison)
        for state in caches:
            state.k_pages.fill_(float("nan"))
            state.v_pages.fill_(float("nan"))
        assert max(await churn(server, 160)) < TOLERANCE
        assert len(poisoned) > 40


def remove_zeroing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are handed out as they are."""
    init = LinePool.__init__

    def without_zeroing(
        self: LinePool, num_lines: int, zero: Callable[[NDArray[np.int64]], None], *arguments: Any
    ) -> None:
        init(self, num_lines, lambda lines: None, *arguments)

    monkeypatch.setattr(LinePool, "__init__", without_zeroing)


def remove_fresh_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh sequence reads its own line."""
    open_sequences = SequenceTable.open

    def without_fresh_flag(self: SequenceTable, *arguments: Any) -> Opened:
        opened = open_sequences(self, *arguments)
        slots, _ = self.lookup(self.server_epoch, opened.handles)
        self.read_line[:, slots] = self.write_line[slots]
        return opened

    monkeypatch.setattr(SequenceTable, "open", without_fresh_flag)


@pytest.mark.parametrize("each_small_model", [HYBRID], indirect=True, ids=["hybrid"])
@pytest.mark.parametrize("remove", [remove_zeroing, remove_fresh_flag])
async def test_either_guard_alone_keeps_sequences_apart(
    make_server: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    remove: Callable[[pytest.MonkeyPatch], None],
) -> None:
    remove(monkeypatch)
    async with make_server(max_sequences=LINES) as server:
        assert max(await churn(server, 160)) < TOLERANCE


@pytest.mark.parametrize("each_small_model", [HYBRID], indirect=True, ids=["hybrid"])
async def test_without_both_guards_sequences_leak(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug that shows that the tests above can fail."""
    remove_zeroing(monkeypatch)
    remove_fresh_flag(monkeypatch)
    async with make_server(max_sequences=LINES) as server:
        assert max(await churn(server, 160)) > TOLERANCE
