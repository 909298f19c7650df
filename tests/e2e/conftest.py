"""Servers for the end-to-end tests: in this process, small, with random weights; one of them under bad input."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rigs.in_turns import take_turns
from rigs.linked import FAST, Driven
from rigs.named_servers import Servers
from rigs.served import served
from rigs.small_models import EXPERTS, GATED_DELTA_NET, HYBRID, MAMBA2
from rigs.target import Target, target_of
from rigs.watched_states import watched

from deltaline_client import AsyncClient, Client
from deltaline_server.app import Server
from deltaline_server.config import Config

__all__ = ["watched"]


# The kinds of clients, and small models. What differs between them has tests of its own.
IN_TURNS = "driven", "each_small_model"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    for name in IN_TURNS:
        take_turns(own, name)


@pytest.fixture
def small_model() -> dict[str, Any]:
    """The config of the small model; a module may have a fixture of this name that gives several."""
    return GATED_DELTA_NET


@pytest.fixture(
    params=[
        pytest.param(GATED_DELTA_NET, marks=pytest.mark.sweep),
        MAMBA2,
        HYBRID,
        EXPERTS,
    ],  # a hybrid has those layers
    ids=["gated_delta_net", "mamba2", "hybrid", "experts"],
)
def each_small_model(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The config of a small model of every family."""
    model: dict[str, Any] = request.param
    return model


def server_of(model: dict[str, Any], directory: Path, device: str, /, **changes: Any) -> Server:
    """A server of a model with random weights; changes: options of Config. The directory gets its config.json."""
    config = directory / "config.json"
    config.write_text(json.dumps(model))
    values: dict[str, Any] = {
        "random_init": str(config),
        "seed": 7,
        "device": device,
        "dtype": "float32",
        "port": 0,
        "metrics_port": -1,
        "max_sequences": 64,
        "max_draft_tokens": 4,
        "chunk_tokens": 64,
        "log_level": "warning",
    }
    return Server(Config(**(values | changes)))


@pytest.fixture
def make_server(tmp_path: Path, device: str, small_model: dict[str, Any]) -> Callable[..., Server]:
    """A function that makes a server of the small model: `async with make_server(max_sequences=8) as server`."""
    return partial(server_of, small_model, tmp_path, device)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(tmp_path_factory: pytest.TempPathFactory, device: str) -> AsyncIterator[Target]:
    """A server of a module's tests, whose witness no bad input may touch; each test leaves it as it was.

    Tests that use it run in the module's event loop: `pytestmark = pytest.mark.asyncio(loop_scope="module")`.
    """
    options = {"inline_limit_bytes": 1 << 16, "drain_timeout_s": 600, "adapter_bytes": 1 << 20}
    async with target_of(server_of(GATED_DELTA_NET, tmp_path_factory.mktemp("target"), device, **options)) as target:
        yield target


@pytest.fixture(params=["sync", "async"])
def driven(request: pytest.FixtureRequest) -> Iterator[Driven]:
    if request.param == "sync":
        yield Driven(Client, lambda result: result)
        return
    loop = asyncio.new_event_loop()
    yield Driven(AsyncClient, lambda result: loop.run_until_complete(result))
    loop.close()


@pytest.fixture
def link_option(tmp_path: Path) -> str:
    return str(tmp_path / "run" / "link.sock")


@pytest.fixture
def linked(make_server: Callable[..., Server], link_option: str) -> Iterator[Server]:
    """A server with a link, on a thread; small messages are all that go by packets."""
    server = make_server(link=link_option, adapter_bytes=1 << 26)
    with served(server):
        yield server


@pytest.fixture
def start(make_server: Callable[..., Server]) -> Iterator[Callable[..., Servers]]:
    """A function that starts named servers on threads: `start(3)`; by default each is reached under its name."""
    with ExitStack() as stack:

        def start(num_servers: int, **options: Any) -> Servers:
            servers = [make_server(**({"advertise": "127.0.0.1", "link": "off"} | options)) for _ in range(num_servers)]
            for server in servers:
                stack.enter_context(served(server))
            return Servers(servers)

        yield start


@pytest.fixture
def clients(driven: Driven) -> Iterator[Callable[..., Any]]:
    """A function that makes clients of one kind, which are disconnected at the end."""
    made: list[Any] = []

    def make(address: str, **options: Any) -> Any:
        made.append(driven.make(address, **({"retry": FAST, "timeout": 60.0} | options)))
        return made[-1]

    yield make
    for client in made:
        driven.do(client.disconnect())
