"""Part `mixed`: decode steps while long prefills run without a pause, beside each of them alone."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection

from deltaline_bench.service.figure import Figure
from deltaline_bench.service.host import Host, HostError, connect, connect_shared, hidden_states, place
from deltaline_bench.service.raw import decoding, percentile_us
from deltaline_bench.service.size import Size

PART = "mixed"
# So many prefills are on their way at once: when one is done the next already waits.
PREFILLS = 2
WARM_UP = 20


async def measure(host: Host) -> list[Figure]:
    """Time decode steps alone, prefills alone, and both at once."""
    seconds = host.size.mixed_s
    alone_s = await _decode(host, seconds)
    async with _prefilling(host) as rate:
        await asyncio.sleep(seconds)
        prefill_alone = await rate()
    async with _prefilling(host) as rate:
        beside_s = await _decode(host, seconds)
        prefill_beside = await rate()
    return judge(host.size, alone_s, beside_s, prefill_alone, prefill_beside)


def judge(size: Size, alone_s: list[float], beside_s: list[float], alone: float, beside: float) -> list[Figure]:
    """Make the figures of decode steps in seconds, and of prefills in tokens per second."""
    p50, p99 = percentile_us(alone_s, 50), percentile_us(beside_s, 99)
    return [
        Figure(PART, "decode alone, p50", p50, "us", "raw", note=f"{size.decode_rows} rows, {len(alone_s)} steps"),
        Figure(PART, "decode alone, p99", percentile_us(alone_s, 99), "us", "raw"),
        Figure(PART, "decode beside prefills, p50", percentile_us(beside_s, 50), "us", "raw"),
        Figure(
            PART,
            "decode beside prefills, p99",
            p99,
            "us",
            "raw",
            size.bar(3 * p50),
            f"3 x p50 alone; {len(beside_s)} steps",
        ),
        Figure(
            PART,
            "prefills alone",
            alone,
            "tokens/s",
            "client",
            note=f"{size.mixed_tokens} tokens, last row; shared memory",
        ),
        Figure(PART, "prefills beside decode", beside, "tokens/s", "client"),
        Figure(PART, "prefills beside decode / alone", beside / alone, "", "client", size.bar(0.7, is_least=True)),
    ]


async def _decode(host: Host, seconds: float) -> list[float]:
    """Seconds of each decode step of a closed loop that runs for so long."""
    taken = []
    async with connect(host.address) as client, decoding(client, host.address, host.size.decode_rows) as stream:
        for _ in range(WARM_UP):
            await stream.step(stream.next_message())
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            taken.append((await stream.step(stream.next_message())).total_s)
    return taken


@asynccontextmanager
async def _prefilling(host: Host) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """Prefills in a process of their own; yields what ends the measuring and returns their tokens per second."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=prefill_loop, args=(host.address, host.size, theirs))
    process.start()
    theirs.close()

    async def word() -> object:
        try:
            return await asyncio.to_thread(mine.recv)
        except EOFError:
            raise HostError("the process that prefills ended") from None

    async def rate() -> float:
        mine.send(None)
        told = await word()
        assert isinstance(told, float)
        return told

    try:
        await word()
        yield rate
    finally:
        mine.close()
        await asyncio.to_thread(process.join, 60)
        if process.is_alive():
            process.kill()


def prefill_loop(address: str, size: Size, pipe: Connection) -> None:
    """A process: prefills until it is told to stop; says when it is warm, and at last tokens per second."""
    asyncio.run(_prefill_loop(address, size, pipe))


async def _prefill_loop(address: str, size: Size, pipe: Connection) -> None:
    room_bytes = 2 * PREFILLS * size.mixed_tokens * size.token_bytes
    done: list[float] = []
    async with connect_shared(address, room_bytes) as client:
        hidden = await place(client, await hidden_states(client, size.mixed_tokens))

        async def prefills() -> None:
            while True:
                async with await client.open() as sequence:
                    await sequence.prefill(hidden, output="last")
                done.append(time.perf_counter())

        async with await client.open() as sequence:
            await sequence.prefill(hidden, output="last")
        tasks = [asyncio.create_task(prefills()) for _ in range(PREFILLS)]
        begin_s = time.perf_counter()
        pipe.send("warm")
        stop = asyncio.create_task(asyncio.to_thread(pipe.recv))
        await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # raises what ended it
        seconds = (done[-1] if done else time.perf_counter()) - begin_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        pipe.send(len(done) * size.mixed_tokens / seconds)
