"""Parts `waypoints` and `hits`: what it costs a prefill to leave states on its way, and what that is worth later."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from deltaline_bench.service.figure import Figure
from deltaline_bench.service.host import Host
from deltaline_bench.service.raw import measured, percentile_us
from deltaline_cli.bench.samples import Sample, sample
from deltaline_client import AsyncClient, Prefix, Waypoints

WAYPOINTS, HITS = "waypoints", "hits"
EVERY = 512
MAX_WAYPOINTS, MAX_HIT = 1.03, 0.15
# Of the prompt, so much is stored.
STORED = 0.9


async def measure_waypoints(host: Host) -> list[Figure]:
    """Time prefills of new prompts, with waypoints and without, in turns; medians."""
    size = host.size
    async with _client(host) as client:
        hidden = await _prompt(client, size.reuse_tokens)

        async def prefill(waypoints: Waypoints | None) -> Sample:
            sequence = await client.open()
            sent_s = time.monotonic()
            await sequence.prefill(hidden, output="last", waypoints=waypoints)
            done_s = time.monotonic()
            if waypoints is not None:
                kept = [place.snapshot_id for place in sequence.waypoints if place.snapshot_id is not None]
                assert len(kept) == size.reuse_tokens // EVERY, sequence.waypoints
                await client.snapshots.release(await client.snapshots.list())
            await sequence.close()
            return sample("prefill", 1, sent_s, done_s)

        plain, placed = await measured(
            lambda: prefill(None), lambda: prefill(Waypoints(every=EVERY)), rounds=size.reuse_rounds, warm_up=2
        )
    without, with_them = (percentile_us(one.stages_s("prefill")["total"], 50) / 1e3 for one in (plain, placed))
    note = f"every {EVERY}, {size.reuse_rounds} times"
    return [
        Figure(WAYPOINTS, "prefill, p50", without, "ms", "client", note=f"{size.reuse_tokens} tokens"),
        Figure(WAYPOINTS, "prefill with waypoints, p50", with_them, "ms", "client", note=note),
        Figure(WAYPOINTS, "with / without", with_them / without, "", "client", size.bar(MAX_WAYPOINTS)),
    ]


async def measure_hits(host: Host) -> list[Figure]:
    """Time an open and the prefill of a prompt of which most is stored, and of one of which nothing is, in turns."""
    size = host.size
    stored, tokens = int(STORED * size.reuse_tokens), size.reuse_tokens
    async with _client(host) as client:
        hidden = await _prompt(client, tokens)
        known = Prefix.of_tokens(np.arange(tokens), every=EVERY, at=(stored,))
        first = await client.open()
        await first.prefill(hidden[:stored], output="none")
        await first.snapshot(key=known.keys[known.positions.index(stored)])
        await first.close()

        async def answer(prefix: Prefix, position: int) -> Sample:
            sent_s = time.monotonic()
            sequence = await client.open(prefix=prefix)
            assert sequence.position == position, sequence
            await sequence.prefill(hidden[position:], output="last")
            done_s = time.monotonic()
            await sequence.close()
            return sample("prefill", 1, sent_s, done_s)

        other = replace(known, keys=tuple(key[::-1] for key in known.keys))
        cold, hit = await measured(
            lambda: answer(other, 0), lambda: answer(known, stored), rounds=size.reuse_rounds, warm_up=2
        )
    cold_ms, hit_ms = (percentile_us(one.stages_s("prefill")["total"], 50) / 1e3 for one in (cold, hit))
    return [
        Figure(HITS, "first output, nothing stored, p50", cold_ms, "ms", "client", note=f"{tokens} tokens"),
        Figure(HITS, "first output at a hit, p50", hit_ms, "ms", "client", note=f"of {stored} tokens"),
        Figure(HITS, "hit / cold", hit_ms / cold_ms, "", "client", size.bar(MAX_HIT)),
    ]


def _client(host: Host) -> AsyncClient:
    """A client whose prompts are one step each, in memory that it shares with the server."""
    memory = host.size.shared_bytes(host.size.reuse_tokens)
    return AsyncClient(host.link_address or host.address, shared_memory_bytes=memory)


async def _prompt(client: AsyncClient, tokens: int) -> Any:
    """Hidden states of a prompt."""
    info = await client.info()
    drawn = np.random.default_rng(0).standard_normal((tokens, *info.input_shape()), dtype=np.float32)
    return drawn.astype(info.dtype)
