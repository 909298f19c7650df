"""All servers are replaced in turn, each emptied by the command first: no sequence is lost, stepped or idle."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from e2e.conftest import server_of
from e2e.test_state_files import HOST, folder_of
from rigs.linked import FAST, tokens
from rigs.routers import free_port
from rigs.small_models import GATED_DELTA_NET
from rigs.until import until

from deltaline_cli import drain
from deltaline_cli.address import add_server
from deltaline_client import AsyncClient
from deltaline_server.app import Server

NUM_SERVERS, OF_EACH = 3, 4
TIMEOUT_S = 600.0


class Pods:
    """Servers, each of which has a name and a folder that its successor gets."""

    def __init__(self, tmp_path: Path) -> None:
        ports = [free_port() for _ in range(NUM_SERVERS)]
        self.names = [f"127.0.0.1:{port}" for port in ports]
        self._folders = [folder_of(tmp_path, f"pod{port}") for port in ports]
        self._options: dict[str, Any] = {"link": "off", "move_peers": ",".join(self.names), "state_dir_bytes": 1 << 22}
        self.servers = [self.make(number) for number in range(NUM_SERVERS)]

    def make(self, number: int) -> Server:
        name, folder = self.names[number], self._folders[number]
        own = {"port": int(name.rpartition(":")[2]), "advertise": name, "state_dir": str(folder / "files")}
        return server_of(GATED_DELTA_NET, folder, "cpu", **HOST, **self._options, **own)

    async def replace(self, number: int) -> None:
        """Empty a server by the command as a pod does, which names all, and put its successor in its place."""
        name, targets = self.names[number], [f"--to={one}" for one in self.names]
        command = ["drain", name, f"--timeout={TIMEOUT_S}", *targets]
        parser, served = argparse.ArgumentParser(), argparse.ArgumentParser(add_help=False)
        add_server(served)
        drain.add_drain(parser.add_subparsers(), served)
        assert await asyncio.to_thread(drain.drain, parser.parse_args(command)) == 0
        # Its time would end it: nobody asks it for idle sequences.
        await until(lambda: not self.servers[number].runtime.table.num_open)
        await self.servers[number].stop()
        self.servers[number] = self.make(number)
        await self.servers[number].start()


async def test_a_rolling_update_loses_nothing(tmp_path: Path) -> None:
    pods = Pods(tmp_path)
    for server in pods.servers:
        await server.start()
    try:
        async with AsyncExit(pods) as clients:
            sequences = [one for client in clients for one in await client.open_many(OF_EACH)]
            idle, stepped = sequences[::2], sequences[1::2]
            expected = [await each.prefill(tokens(5)) for each in sequences]
            is_over, outputs = False, {each: list[Any]() for each in sequences}

            async def step(sequence: Any, count: int | None = None) -> None:
                while len(outputs[sequence]) < count if count is not None else not is_over:
                    outputs[sequence].append(await sequence.decode(tokens(1, len(outputs[sequence]))))

            stepping = [asyncio.create_task(step(each)) for each in stepped]
            for number in reversed(range(NUM_SERVERS)):
                await pods.replace(number)
            is_over = True
            await asyncio.gather(*stepping)
            most = max(len(outputs[each]) for each in stepped)
            assert min(len(outputs[each]) for each in stepped) > 2 * NUM_SERVERS
            await asyncio.gather(*(step(each, most) for each in sequences))
            for each in (*idle, *stepped):
                assert each.position == 5 + most
                np.testing.assert_allclose(outputs[each], outputs[idle[0]], rtol=1e-3, atol=1e-4)
            assert np.allclose(expected, expected[0], rtol=1e-3, atol=1e-4)
            assert sum(server.runtime.table.num_open for server in pods.servers) == len(sequences)
    finally:
        for server in pods.servers:
            await server.stop()


class AsyncExit:
    """A client of each server, which may follow to all."""

    def __init__(self, pods: Pods) -> None:
        self._clients = [AsyncClient(name, servers=pods.names, retry=FAST) for name in pods.names]

    async def __aenter__(self) -> list[AsyncClient]:
        return self._clients

    async def __aexit__(self, *exception: object) -> None:
        for client in self._clients:
            await client.disconnect()
