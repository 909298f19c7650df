"""The processes that are judged: a server and a bare echo on Unix sockets, and what can be read of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltaline_bench.service.size import Size
from deltaline_cli.bench.busy import read_metrics
from deltaline_cli.bench.load import InlineNotes
from deltaline_client import AsyncClient

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
SHARED_BYTES = 2**31


class HostError(RuntimeError):
    """A process did not start, or does not tell what it should; the message says what."""


def connect(address: str) -> AsyncClient:
    """Make the Python client without shared memory."""
    return AsyncClient(address)


@asynccontextmanager
async def connect_shared(address: str, size_bytes: int) -> AsyncIterator[AsyncClient]:
    """A Python client with shared memory. Raises HostError when tensors went inline."""
    with InlineNotes() as notes:
        async with AsyncClient(address, shared_memory_bytes=size_bytes) as client:
            yield client
    if notes.texts:
        raise HostError(f"not all tensors went through shared memory: {notes.texts[0]}")


async def hidden_states(client: AsyncClient, tokens: int) -> Any:
    """Random hidden states [tokens, hidden size] in the server's type, the same in every run."""
    info = await client.info()
    rng = np.random.default_rng(0)
    return rng.standard_normal((tokens, info.hidden_size), dtype=np.float32).astype(info.dtype)


async def place(client: AsyncClient, hidden: Any) -> Any:
    """Hidden states in the client's shared memory, from where a step takes them without a copy."""
    room = await client.empty(hidden.shape)
    room[...] = hidden
    return room


def server_options(size: Size, model: Path, folder: Path) -> dict[str, Any]:
    """The options of the server that is judged, by the names of its configuration."""
    return {
        "random_init": str(model),
        "dtype": size.dtype,
        "max_sequences": size.max_sequences,
        "batch_rows": size.batch_rows,
        "chunk_tokens": size.chunk_tokens,
        "reply_bytes": 2**31,
        "queue_bytes": 2**31,
        "uds": str(folder / "server.sock"),
        "port": 0,
        "metrics_port": 0,
        "log_level": "info",
        "drain_timeout_s": 1.0,
        "shared_memory_bytes": SHARED_BYTES,
    }


@dataclass(frozen=True)
class Host:
    """What runs. model: the config.json that is served."""

    size: Size
    model: Path
    folder: Path
    server: subprocess.Popen[bytes]
    address: str
    echo_address: str
    metrics_url: str

    def metrics(self) -> dict[str, float]:
        """The samples of the server's metrics page, by name with labels."""
        return read_metrics(self.metrics_url)

    def resident_bytes(self) -> int:
        """Resident memory of the server's process."""
        status = Path(f"/proc/{self.server.pid}/status").read_text(encoding="utf-8")
        found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.M)
        if found is None:
            raise HostError("the server's process is gone")
        return int(found[1]) * 1024


@asynccontextmanager
async def running(size: Size, folder: Path) -> AsyncIterator[Host]:
    """Start server and echo, wait until both answer, and end them after the block. Raises HostError."""
    model = folder / "config.json"
    model.write_text(json.dumps(size.model()), encoding="utf-8")
    options = server_options(size, model, folder)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    log = folder / "server.log"
    log.unlink(missing_ok=True)
    echo_path = folder / "echo.sock"
    with (
        _process(["deltaline_server", *flags], log) as server,
        _process(["deltaline_bench.service.echo", str(echo_path)], folder / "echo.log") as echo,
    ):
        port = re.compile(r" ready .*metrics_port=(\d+)")
        found = None
        begin_s = time.monotonic()
        while found is None or not echo_path.exists():
            if server.poll() is not None or echo.poll() is not None or time.monotonic() - begin_s > START_TIMEOUT_S:
                raise HostError(f"the server or the echo did not start:\n{log.read_text()[-2000:]}")
            await asyncio.sleep(0.1)
            found = port.search(log.read_text())
        url = f"http://127.0.0.1:{found[1]}/metrics"
        yield Host(size, model, folder, server, f"unix:{options['uds']}", f"unix:{echo_path}", url)


class _process:
    """A Python module as a process of its own, ended after the block."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = command, log

    def __enter__(self) -> subprocess.Popen[bytes]:
        with self._log.open("w") as output:
            command = [sys.executable, "-m", *self._command]
            self._popen = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
        return self._popen

    def __exit__(self, *exception: object) -> None:
        self._popen.terminate()
        try:
            self._popen.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
