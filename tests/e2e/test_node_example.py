"""The client in examples/node, which has nothing of Python's, against a server with default limits."""

from __future__ import annotations

import asyncio
import json
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


ASTRAY = """
import { Client } from './client.js';
const [right, wrong] = process.argv.slice(1).map((address) => new Client(address));
const told = [];
for (const client of [right, wrong]) {
  const close = client.layers.CloseSequences.bind(client.layers);
  client.layers.CloseSequences = (request, metadata, ...rest) => {
    told.push(metadata.get('deltaline-affinity')[0]);
    return close(request, metadata, ...rest);
  };
}
const [sequence] = await right.open();
const [child] = await right.fork(sequence, 1);
const astray = [...await wrong.close([sequence]), ...await wrong.close([child])];
const states = [...astray, ...await right.close([sequence, child])];
console.log(JSON.stringify({ states, told }));
[right, wrong].forEach((client) => client.disconnect());
"""


async def test_a_call_that_a_router_brings_to_another_server_is_told_so(make_server: Callable[..., Server]) -> None:
    async with make_server(advertise="right:1") as right, make_server(advertise="wrong:1") as wrong:
        status, output = await run("--input-type=module", "-e", ASTRAY, right.address, wrong.address)
    assert status == 0, output
    result = json.loads(output)
    assert result["states"] == ["SEQUENCE_STATE_ELSEWHERE"] * 2 + ["SEQUENCE_STATE_CLOSED"] * 2
    first, again, other = result["told"]
    assert first == again != other and len(first) == 32
