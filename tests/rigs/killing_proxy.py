"""A proxy of TCP connections that kills them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress


class KillingProxy:
    """Forwards TCP connections to a server, and kills each after some bytes. kills: how many so far."""

    def __init__(self, server_address: str, lives_bytes: Iterable[int]) -> None:
        """lives_bytes: how many bytes of both ways each connection lasts; those after the last one are not killed."""
        self._server_address, self._lives_bytes = server_address, iter(lives_bytes)
        self._serving: set[asyncio.Task[None]] = set()
        self.address = ""
        self.kills = 0

    async def __aenter__(self) -> KillingProxy:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._listener.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        far_reader, far_writer = await asyncio.open_connection(*self._server_address.rsplit(":", 1))
        left = float(next(self._lives_bytes, "inf"))

        async def forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal left
            while left > 0 and (data := await source.read(1024)):
                left -= len(data)
                sink.write(data)
                await sink.drain()

        ways = [asyncio.create_task(forward(reader, far_writer)), asyncio.create_task(forward(far_reader, writer))]
        with suppress(asyncio.CancelledError):
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        self.kills += left <= 0
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, far_writer):
            end.transport.abort()
            with suppress(OSError):
                await end.wait_closed()
