"""A server on a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from deltaline_server.app import Server


@contextmanager
def served(server: Server) -> Iterator[str]:
    """Run a server until the block ends, or a drain is over; gives its address."""
    is_ready, addresses, stops = threading.Event(), list[str](), list[Callable[[], object]]()

    async def serve() -> None:
        async with server:
            stop, loop = asyncio.Event(), asyncio.get_running_loop()
            addresses.append(server.address)
            stops.append(lambda: loop.call_soon_threadsafe(stop.set))
            is_ready.set()
            ends = [asyncio.ensure_future(end) for end in (stop.wait(), server.wait())]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert is_ready.wait(60)
        yield addresses[0]
    finally:
        with suppress(RuntimeError):  # its loop has ended by itself
            for stop in stops:
                stop()
        thread.join()
