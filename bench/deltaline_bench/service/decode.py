"""Part `decode`: rows over StepStream in a closed loop of one client, in turns with echoes of the same bytes."""

from __future__ import annotations

import time

from deltaline_bench.service.figure import Bar, Figure
from deltaline_bench.service.host import Host, connect, hidden_states
from deltaline_bench.service.raw import Times, decoding, echoes, percentile_us
from deltaline_bench.service.size import Size
from deltaline_client import Row

PART = "decode"
WARM_UP = 20


async def measure(host: Host) -> list[Figure]:
    """Time steps and echoes, then steps through the Python client."""
    size = host.size
    times: list[Times] = []
    echo_s: list[float] = []
    client_s: list[float] = []
    async with connect(host.address) as client:
        async with decoding(client, host.address, size.decode_rows) as stream, echoes(host.echo_address) as echo:
            for _ in range(WARM_UP + size.decode_steps):
                message = stream.next_message()
                times.append(await stream.step(message))
                echo_s.append((await echo.exchange(message))[1])
        hidden = await hidden_states(client, size.decode_rows)
        sequences = await client.open_many(size.decode_rows)
        for _ in range(WARM_UP + size.client_steps):
            rows = [Row.decode(sequence, token) for sequence, token in zip(sequences, hidden, strict=True)]
            begin_s = time.perf_counter()
            await client.step(rows)
            client_s.append(time.perf_counter() - begin_s)
        await client.close(sequences)
    return judge(size, times[WARM_UP:], echo_s[WARM_UP:], client_s[WARM_UP:])


def judge(size: Size, times: list[Times], echo_s: list[float], client_s: list[float]) -> list[Figure]:
    """Make the figures of steps, echoes and steps through the client, in seconds."""

    def median(name: str) -> float:
        return percentile_us([getattr(step, name) for step in times], 50)

    total, compute, echo = median("total_s"), median("compute_s"), percentile_us(echo_s, 50)
    p99 = percentile_us([step.total_s for step in times], 99)
    rows = f"{size.decode_rows} rows, {len(times)} steps"
    return [
        Figure(PART, "end to end, p50", total, "us", "raw", note=rows),
        Figure(PART, "end to end, p90", percentile_us([step.total_s for step in times], 90), "us", "raw"),
        Figure(PART, "end to end, p99", p99, "us", "raw", size.bar(3 * total), "3 x p50"),
        Figure(PART, "queue, p50", median("queue_s"), "us", "raw"),
        Figure(PART, "copy in, p50", median("copy_in_s"), "us", "raw"),
        Figure(PART, "compute, p50", compute, "us", "raw"),
        Figure(PART, "copy out, p50", median("copy_out_s"), "us", "raw"),
        Figure(PART, "bare echo of the same bytes, p50", echo, "us", "raw"),
        Figure(PART, "bare echo of the same bytes, p99", percentile_us(echo_s, 99), "us", "raw"),
        Figure(
            PART,
            "added by the server, p50",
            median("outside_s") - echo,
            "us",
            "raw",
            size.bar(250.0),
            "end to end less its stages and the echo",
        ),
        Figure(
            PART,
            "end to end less compute, p50s",
            (total - compute) / echo,
            "echoes",
            "raw",
            Bar(size.max_echoes),
            "aim 1.4" if size.is_judged else "",
        ),
        Figure(PART, "end to end, p50", percentile_us(client_s, 50), "us", "client", note="a user's view"),
        Figure(PART, "end to end, p99", percentile_us(client_s, 99), "us", "client"),
    ]
