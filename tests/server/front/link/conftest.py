"""A server with a local link, and raw connections to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from rigs.raw_link import RawLink, raw_link

from deltaline_server.app import Server


@pytest.fixture
def link_option(tmp_path: Path) -> str:
    """What --link is in these tests."""
    return str(tmp_path / "run" / "link.sock")


@pytest.fixture
async def server(make_server: Callable[..., Server], link_option: str) -> AsyncIterator[Server]:
    async with make_server(link=link_option) as server:
        yield server


@pytest.fixture
async def raw(server: Server) -> AsyncIterator[RawLink]:
    async with raw_link(server.link.path) as connection:
        yield connection
