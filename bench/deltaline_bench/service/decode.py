"""Part `decode`: rows in a closed loop of one client, in turns with echoes of the same bytes.

On the GPU's host over StepStream. On a CPU, whose layers leave caches and cores in another state than an idle echo
finds, as unary calls too, and three times: beside a bare echo, beside one around the same layer, and with a layer that
only copies.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from deltaline_bench.service.figure import Bar, Figure
from deltaline_bench.service.host import Host, running
from deltaline_bench.service.raw import Way, besides_compute, decoding, echoing, measured, percentile_us
from deltaline_bench.service.raw_link import decoding_by_link
from deltaline_bench.service.size import Size
from deltaline_cli.bench.samples import SERVER_STAGES, Sample, Samples, sample
from deltaline_client import AsyncClient, Client, Row

PART = "decode"
# Most that a step by the link may take besides its computation, in bare unary echoes by gRPC.
MAX_LINK_ECHOES = 1.1


async def measure(host: Host) -> list[Figure]:
    """Time steps and echoes in turns, then steps through the Python client."""
    size = host.size
    figures = []
    for way in size.ways:
        figures += judge(size, way, *await _beside_echoes(host, way))
    if host.link_address is not None:
        figures += judge_link(size, *await _link_beside_echo(host, host.link_address))
    client = await host.load(clients=1, rows=size.decode_rows, steps=size.client_steps, ramp_up_s=0.2)
    figures += judge_client(client.samples)
    if size.is_beside_layer:
        return figures + await _measure_copying(host)
    return figures + judge_beside_raw(size, *await _beside_raw(host))


async def _measure_copying(host: Host) -> list[Figure]:
    """Time steps of a server whose layers only copy, in turns with bare echoes."""
    figures = []
    with TemporaryDirectory(dir=host.folder) as folder:
        async with running(host.size, Path(folder), "deltaline_bench.service.copying") as copying:
            for way in host.size.ways:
                steps, echo, _ = await _beside_echoes(copying, way)
                ratio = percentile_us(besides_compute(steps), 50) / percentile_us(besides_compute(echo), 50)
                figures.append(Figure(PART, f"{way}, a layer that only copies", ratio, "echoes", "raw"))
            # Here the client is not lost in what a CPU's layers take now more, now less.
            figures += judge_beside_raw(host.size, *await _beside_raw(copying))
    return figures


async def _beside_raw(host: Host) -> list[Samples]:
    """Samples of raw steps with their outputs, and of the Python clients': for asyncio as one array, and as rows, then
    for threads as one array."""
    size = host.size
    address = host.link_address or host.address
    steps = decoding_by_link if host.link_address else decoding
    async with steps(address, size.decode_rows) as raw, AsyncClient(address) as client:
        blocking, info = Client(address), await client.info()
        hidden = np.zeros((size.decode_rows, *info.input_shape()), info.dtype)
        sequences, others = await client.open_many(size.decode_rows), blocking.open_many(size.decode_rows)

        async def decode() -> Sample:
            sent_s = time.monotonic()
            await client.decode(sequences, hidden)
            return sample("decode", size.decode_rows, sent_s, time.monotonic())

        async def step() -> Sample:
            sent_s = time.monotonic()
            rows = [Row.decode(sequence, own) for sequence, own in zip(sequences, hidden, strict=True)]
            _ = (await client.step(rows)).outputs
            return sample("decode", size.decode_rows, sent_s, time.monotonic())

        async def decode_in_thread() -> Sample:
            sent_s = time.monotonic()
            blocking.decode(others, hidden)  # nothing else runs meanwhile
            return sample("decode", size.decode_rows, sent_s, time.monotonic())

        sides = raw.step_with_outputs, decode, step, decode_in_thread
        with blocking:
            samples = await measured(*sides, rounds=size.client_steps)
            blocking.close(others)
        await client.close(sequences)
    return samples


async def _beside_echoes(host: Host, way: Way) -> tuple[Samples, Samples, Samples | None]:
    """Samples of steps, of bare echoes, and of echoes around the layer where there are some."""
    size = host.size
    async with AsyncExitStack() as stack:
        steps = await stack.enter_async_context(decoding(host.address, size.decode_rows, way))
        sides = [steps.step, await stack.enter_async_context(echoing(host.echo_address, way, steps))]
        if host.has_layer_echo:
            around = echoing(host.echo_address, way, steps, around_layer=True)
            sides.append(await stack.enter_async_context(around))
        service, echo, *others = await measured(*sides, rounds=size.decode_steps)
    return service, echo, others[0] if others else None


async def _link_beside_echo(host: Host, address: str) -> tuple[Samples, Samples]:
    """Samples of steps by the link, and of bare unary echoes by gRPC: of the bytes that a step by gRPC has."""
    size = host.size
    async with (
        decoding(host.address, size.decode_rows, "unary") as inline,
        decoding_by_link(address, size.decode_rows) as steps,
        echoing(host.echo_address, "unary", inline) as echo,
    ):
        await inline.step()  # its message is what is echoed
        service, bare = await measured(steps.step, echo, rounds=size.decode_steps)
    return service, bare


def judge_link(size: Size, steps: Samples, echo: Samples) -> list[Figure]:
    """Make the figures of steps by the local link."""
    total, rest = steps.stages_s("decode")["total"], besides_compute(steps)
    echo_p50 = percentile_us(besides_compute(echo), 50)
    ratio = percentile_us(rest, 50) / echo_p50
    p50, rest_p50 = percentile_us(total, 50), percentile_us(rest, 50)
    return [
        Figure(PART, "link, end to end, p50", p50, "us", "raw"),
        Figure(PART, "link, end to end, p99", percentile_us(total, 99), "us", "raw", size.bar(2 * p50), "2 x p50"),
        Figure(PART, "link, end to end less compute, p50", rest_p50, "us", "raw", size.bar(450.0), "aim 250"),
        *(
            Figure(PART, f"link, {stage}, p50", percentile_us(steps.stages_s("decode")[stage], 50), "us", "raw")
            for stage in SERVER_STAGES
        ),
        Figure(PART, "link, bare unary echo by gRPC, p50", echo_p50, "us", "raw"),
        Figure(PART, "link, less compute beside it", ratio, "echoes", "raw", Bar(MAX_LINK_ECHOES), "aim 0.8"),
    ]


def judge(size: Size, way: Way, steps: Samples, echo: Samples, around: Samples | None) -> list[Figure]:
    """Make the figures of one way of calling."""
    stages = steps.stages_s("decode")
    total, rest, echo_s = stages["total"], besides_compute(steps), besides_compute(echo)
    p50, echo_p50 = percentile_us(total, 50), percentile_us(echo_s, 50)
    outside = total - sum(stages[stage] for stage in SERVER_STAGES)

    def figure(name: str, value: float, unit: str = "us", bar: Bar | None = None, note: str = "") -> Figure:
        return Figure(PART, f"{way}, {name}", value, unit, "raw", bar, note)

    figures = [
        figure("end to end, p50", p50, note=f"{size.decode_rows} rows, {len(total)} steps"),
        figure("end to end, p90", percentile_us(total, 90)),
        figure("end to end, p99", percentile_us(total, 99), "us", size.bar(3 * p50), "3 x p50"),
        *(figure(f"{stage}, p50", percentile_us(stages[stage], 50)) for stage in SERVER_STAGES),
        figure("bare echo of the same bytes, p50", echo_p50),
        figure("bare echo of the same bytes, p99", percentile_us(echo_s, 99)),
        figure(
            "added by the server, p50",
            percentile_us(outside, 50) - echo_p50,
            "us",
            size.bar(250.0),
            "end to end less its stages and the echo",
        ),
        figure(
            "end to end less compute, p50",
            percentile_us(rest, 50) / echo_p50,
            "echoes",
            Bar(size.max_echoes),
            "aim 1.4" if size.is_judged else "",
        ),
    ]
    if around is not None:
        value = percentile_us(rest, 50) / percentile_us(besides_compute(around), 50)
        figures.append(figure("the same, the echo around the same layer", value, "echoes around it"))
    return figures


def judge_client(samples: Samples) -> list[Figure]:
    """Make the figures of steps through the Python client."""
    total, rest = samples.stages_s("decode")["total"], besides_compute(samples)
    return [
        Figure(PART, "end to end, p50", percentile_us(total, 50), "us", "client", note="a user's view"),
        Figure(PART, "end to end, p99", percentile_us(total, 99), "us", "client"),
        Figure(PART, "end to end less compute, p50", percentile_us(rest, 50), "us", "client"),
    ]


def judge_beside_raw(size: Size, raw: Samples, decode: Samples, step: Samples, blocking: Samples) -> list[Figure]:
    """Make the figures of what the Python clients add to raw steps, in turns with them on one kind of stream."""
    raw_us, decode_us, step_us, blocking_us = (
        percentile_us(one.stages_s("decode")["total"], 50) for one in (raw, decode, step, blocking)
    )
    note = f"to a raw step's {raw_us:,.0f} us, its outputs taken"
    return [
        Figure(PART, "added by the Python client, p50", decode_us - raw_us, "us", "client", size.bar(150.0), note),
        Figure(PART, "the same, rows made one by one, p50", step_us - raw_us, "us", "client"),
        Figure(PART, "the same, the client for threads, p50", blocking_us - raw_us, "us", "client", size.bar(150.0)),
    ]
