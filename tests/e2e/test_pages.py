"""Pages over the wire: what a client is told of them, and what it meets when there are too few."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from rigs.small_models import HYBRID
from rigs.until import until

from deltaline_client import AsyncClient, PagesExhausted, Retry, Row, StepError
from deltaline_server.app import Server

PAGE_SIZE = 16
PAGE_BYTES = 2 * PAGE_SIZE * 2 * 16 * 4


@pytest.fixture
def small_model() -> dict[str, Any]:
    return HYBRID | {"max_position_embeddings": 200}


@pytest.fixture
def make_small(make_server: Callable[..., Server]) -> Callable[..., Server]:
    """A function that makes a server with so many pages."""

    def make(num_pages: int, **changes: Any) -> Server:
        lines = 5 * (4 * 16 * 16 * 4 + (3 + 4) * 128 * 4 + 2 * 4 * 100 * 4 + 13 * 4)
        limit = lines + (num_pages + 1) * PAGE_BYTES
        options = {"max_sequences": 4, "snapshot_lines": 0, "page_size": PAGE_SIZE, "state_bytes": limit}
        return make_server(**(options | changes))

    return make


def hidden(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((count, 64)).astype(np.float32)


async def test_a_row_without_pages_is_refused_alone_until_others_end(make_small: Callable[..., Server]) -> None:
    async with make_small(20) as server, AsyncClient(server.address, retry=Retry(max_attempts=1)) as client:
        first, second, third = await client.open_many(3)
        await first.prefill(hidden(150))
        with pytest.raises(StepError) as refused:
            await client.step(
                [Row.prefill(second, hidden(161)), Row.prefill(third, hidden(30)), Row.decode(first, hidden(1))]
            )
        ((row, error),) = refused.value.errors.items()
        assert row == 0 and isinstance(error, PagesExhausted) and error.retry_after_s
        load = await client.load()
        assert (load.kv_pages_used, load.kv_pages_total) == (12, 20)
        await client.close([first])
        assert (await second.prefill(hidden(161))).shape == (161, 64)
        server.runtime.table.check_integrity()


async def test_a_streamed_prefill_waits_for_pages_by_itself(make_small: Callable[..., Server]) -> None:
    """It comes as steps of 16 tokens, of which the second finds no page."""
    async with make_small(13, inline_limit_bytes=4096) as server, AsyncClient(server.address) as client:
        first, second = await client.open_many(2)
        await first.prefill(hidden(190))
        waiting = asyncio.create_task(second.prefill(hidden(100)))
        sample = "deltaline_refused_total", {"reason": "PAGES_EXHAUSTED"}
        await until(lambda: server.metrics.registry.get_sample_value(*sample))
        assert not waiting.done()
        assert server.runtime.table.pages is not None and server.runtime.table.pages.num_used == 13
        await client.close([first])
        outputs = await waiting
        (third,) = await client.open_many(1)
        np.testing.assert_allclose(outputs[:80], await third.prefill(hidden(100)[:80]), rtol=1e-3, atol=1e-4)


async def test_info_and_metrics_tell_of_pages(make_small: Callable[..., Server]) -> None:
    async with make_small(20, metrics_port=0) as server, AsyncClient(server.address) as client:
        info = await client.info()
        assert (info.kv_pages, info.kv_page_tokens, info.kv_page_bytes, info.max_context) == (20, 16, PAGE_BYTES, 200)
        (sequence,) = await client.open_many(1)
        await sequence.prefill(hidden(40))

        def scrape() -> str:
            with urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=60) as answer:
                return str(answer.read(), "utf-8")

        metrics = (await asyncio.to_thread(scrape)).splitlines()
        assert {"deltaline_kv_pages_used 3.0", "deltaline_kv_pages_capacity 20.0"} <= set(metrics)
