"""A whole server of a model in this process, and random steps by a client of its own.

Knows the server by its configuration, its address and its metrics.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deltaline_bench.model.served import server_config
from deltaline_bench.model.shapes import Shape
from deltaline_bench.service import memory
from deltaline_bench.service.random_steps import DECODE, PREFILL, VERIFY, Walk, Walked
from deltaline_cli.bench.busy import read_metrics
from deltaline_client import AsyncClient
from deltaline_server.app import Server

# Of requests that wait and of replies that are kept: prefills of many rows at once.
WAITING_BYTES = 2**31


@dataclass(frozen=True)
class Steps:
    """What became of random steps. ready_s: until the server was ready. grown: by how much what must stand still has
    grown since, None where the server does not tell."""

    shape: str
    device: str
    ready_s: float
    walked: Walked
    grown: dict[str, float | None]

    @property
    def is_steady(self) -> bool:
        """Whether all stood still."""
        return all(value == 0 for value in self.grown.values())

    def __str__(self) -> str:
        walked, rows = self.walked, self.walked.rows
        seconds = sorted(walked.seconds)
        grown = ", ".join(
            f"{what} {'unknown' if value is None else f'{value:g}'}" for what, value in self.grown.items()
        )
        return (
            f"{self.shape}, {self.device}: {len(seconds)} random steps in {sum(seconds):.1f} s "
            f"(median {statistics.median(seconds) * 1e3:.1f} ms, longest {seconds[-1] * 1e3:.1f}), all answered, all "
            f"finite: {rows[PREFILL]} prefills, {rows[DECODE]} decodes, {rows[VERIFY]} verifies of {walked.tokens} "
            f"tokens in all, {walked.commits} commits of {walked.accepted} drafts, {walked.closed} sequences closed; "
            f"ready after {self.ready_s:.1f} s; since then: {grown}: {'met' if self.is_steady else 'MISSED'} (bar: 0)"
        )


def walk(shape: Shape, rows: Sequence[int], tokens: int, steps: int, seed: int) -> Steps:
    """Serve a model with all graphs, and make steps of up to the most of `rows` rows, with prefills of up to `tokens`.

    Raises ConfigError, ModelError, StartError; WrongAnswerError and DeltalineError where an answer is wrong or none.
    """
    return asyncio.run(_walk(shape, rows, tokens, steps, seed))


async def _walk(shape: Shape, rows: Sequence[int], tokens: int, steps: int, seed: int) -> Steps:
    with tempfile.TemporaryDirectory(prefix="deltaline-bench-") as folder:
        socket = Path(folder) / "server.sock"
        config = replace(
            server_config(shape, rows, tokens),
            uds=str(socket),
            link="off",
            port=0,
            metrics_port=0,
            reply_bytes=WAITING_BYTES,
            queue_bytes=WAITING_BYTES,
        )
        print("the server starts ...", file=sys.stderr, flush=True)
        begin_s = time.monotonic()
        async with Server(config) as server:
            ready_s = time.monotonic() - begin_s
            print(f"ready after {ready_s:.1f} s; random steps ...", file=sys.stderr, flush=True)
            url = f"http://127.0.0.1:{server.metrics_port}/metrics"
            before = await asyncio.to_thread(read_metrics, url)
            async with AsyncClient(f"unix:{socket}") as client:
                walked = await Walk(client, await client.info(), max(rows), tokens, seed).run(steps)
            after = await asyncio.to_thread(read_metrics, url)
            grown = {what: value for what, (_, value) in memory.growths(before, after).items()}
            return Steps(shape.name, server.runtime.device_name, ready_s, walked, grown)
