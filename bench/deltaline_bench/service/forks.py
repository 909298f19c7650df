"""Part `forks`: one call that forks a sequence, with the first decode of the children, beside a plain decode."""

from __future__ import annotations

import time

import numpy as np

from deltaline_bench.service.figure import Figure
from deltaline_bench.service.host import Host
from deltaline_bench.service.raw import measured, percentile_us
from deltaline_bench.service.size import Size
from deltaline_cli.bench.samples import Sample, Samples, sample
from deltaline_client import AsyncClient, AsyncSequence

PART = "forks"
# Tokens of the parent: with attention layers its last page is not full, and is copied for each child.
PARENT_TOKENS = 1000
# What a fork may add to the first decode of its children.
MAX_ADDED_US = 1000.0


async def measure(host: Host) -> list[Figure]:
    """Time forks with a decode of the children, and decodes of as many sequences that go on, in turns."""
    size = host.size
    async with AsyncClient(host.link_address or host.address) as client:
        info = await client.info()
        rng = np.random.default_rng(0)
        prompt, hidden = (
            rng.standard_normal((tokens, *info.input_shape()), dtype=np.float32).astype(info.dtype)
            for tokens in (PARENT_TOKENS, size.decode_rows)
        )
        parent = await client.open()
        await parent.prefill(prompt)
        others = await client.open_many(size.decode_rows)
        children: list[AsyncSequence] = []

        async def decode() -> Sample:
            sent_s = time.monotonic()
            await client.decode(others, hidden)
            return sample("decode", size.decode_rows, sent_s, time.monotonic())

        async def fork() -> Sample:
            sent_s = time.monotonic()
            children.extend(await parent.fork(size.decode_rows))
            forked_s = time.monotonic()
            await client.decode(children, hidden)
            done = sample("decode", size.decode_rows, sent_s, time.monotonic())
            forks_s.append(forked_s - sent_s)
            await client.close(children)
            children.clear()
            return done

        forks_s: list[float] = []
        plain, forked = await measured(decode, fork, rounds=size.fork_rounds)
    return judge(size, plain, forked, forks_s)


def judge(size: Size, plain: Samples, forked: Samples, forks_s: list[float]) -> list[Figure]:
    """Make the figures of both, and of the calls alone."""
    plain_us, forked_us = (percentile_us(one.stages_s("decode")["total"], 50) for one in (plain, forked))
    note = f"{size.decode_rows} children of {PARENT_TOKENS} tokens, {size.fork_rounds} times"
    return [
        Figure(PART, "decode, p50", plain_us, "us", "client", note=f"{size.decode_rows} rows"),
        Figure(PART, "fork, p50", percentile_us(forks_s, 50), "us", "client", note=note),
        Figure(PART, "fork, p99", percentile_us(forks_s, 99), "us", "client"),
        Figure(PART, "fork and the children's first decode, p50", forked_us, "us", "client"),
        Figure(
            PART,
            "more than a plain decode",
            forked_us - plain_us,
            "us",
            "client",
            size.bar(MAX_ADDED_US),
            "by the link",
        ),
    ]
