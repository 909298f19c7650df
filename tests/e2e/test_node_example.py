"""The client in examples/node, which has nothing of Python's, against a server with default limits."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.small_models import GATED_DELTA_NET, HYBRID, MAMBA2

from deltaline_server.app import Server

EXAMPLE = Path(__file__).parents[2] / "examples" / "node"
# Of the development extra, or any other.
NODE = shutil.which("node", path=str(Path(sys.executable).parent)) or shutil.which("node")

pytestmark = [
    pytest.mark.skipif(NODE is None, reason="node is not installed"),
    pytest.mark.skipif(
        not (EXAMPLE / "node_modules" / "@grpc").is_dir(), reason="`make node` has not installed what the example needs"
    ),
]


@pytest.fixture(params=[GATED_DELTA_NET, MAMBA2, HYBRID], ids=["gated_delta_net", "mamba2", "hybrid"])
def small_model(request: pytest.FixtureRequest) -> dict[str, Any]:
    model: dict[str, Any] = request.param
    return model


async def run(*arguments: str) -> tuple[int | None, str]:
    """Run the example; its exit status and what it prints."""
    assert NODE is not None
    node = await asyncio.create_subprocess_exec(
        NODE, *arguments, cwd=EXAMPLE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(node.communicate(), 100)
    finally:
        if node.returncode is None:
            node.kill()
            await node.wait()
    return node.returncode, output.decode()


async def test_the_node_example_opens_steps_commits_forks_and_closes(make_server: Callable[..., Server]) -> None:
    async with make_server(chunk_tokens=1024) as server:
        status, output = await run("example.js", server.address)
        assert status == 0 and output.endswith("all as expected\n"), output
        server.runtime.scheduler.settle()
        assert server.runtime.table.num_open == 0
