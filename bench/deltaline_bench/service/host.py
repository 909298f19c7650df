"""The processes that are judged: a server and a bare echo, and what can be read of them.

On Unix sockets; where front ends speak gRPC, on ports of the loopback, which is where they listen.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deltaline_bench.service.size import Size
from deltaline_cli.bench.busy import read_metrics
from deltaline_cli.bench.command import measured
from deltaline_cli.bench.options import BenchOptions
from deltaline_cli.bench.report import Report
from deltaline_client import Tls

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
SHARED_BYTES = 2**31


class HostError(RuntimeError):
    """A process did not start, or does not tell what it should; the message says what."""


def server_options(size: Size, model: Path, folder: Path, has_link: bool, front_ends: int) -> dict[str, Any]:
    """The options of the server that is judged, by the names of its configuration."""
    return {
        "random_init": str(model),
        "scope": size.scope,
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
        "link": str(folder / "run" / "link.sock") if has_link else "off",
        "link_memory_bytes": SHARED_BYTES,
        "front_ends": front_ends,
    }


@dataclass(frozen=True)
class Host:
    """What runs. model: the config.json that is served. has_layer_echo: the echo computes the same layers too.
    server_module: what is run as the server."""

    size: Size
    model: Path
    folder: Path
    server: subprocess.Popen[bytes]
    address: str
    echo_address: str
    metrics_url: str
    has_layer_echo: bool
    echo: subprocess.Popen[bytes]
    link_address: str | None
    """None where there is no link. Where there is one, loads go by it."""
    server_module: str

    async def load(self, **options: Any) -> Report:
        """Load the server as `deltaline bench` does: with decode steps, unless the options of BenchOptions say more.

        Raises HostError for a load that is no measurement.
        """
        report = await asyncio.to_thread(
            measured, self.link_address or self.address, BenchOptions(**{"mix": {"decode": 1.0}} | options)
        )
        if report.verdict.refusal:
            raise HostError(f"the load tells nothing: {report.verdict.refusal}")
        return report

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
async def running(
    size: Size,
    folder: Path,
    server_module: str = "deltaline_server",
    has_link: bool = False,
    front_ends: int = 0,
    tls: Tls | None = None,
    principals: Path | None = None,
) -> AsyncIterator[Host]:
    """Start server and echo, wait until both answer, and end them after the block. Raises HostError.

    server_module: the server, or one whose layers are others; the echo then has none. has_link: clients go by it.
    front_ends: how many speak gRPC. tls: the certificate that both show on the port that they are then reached by.
    principals: the file of them, None where calls are everybody's.
    """
    has_layer_echo = size.is_beside_layer and server_module == "deltaline_server"
    model = folder / "config.json"
    model.write_text(json.dumps(size.model()), encoding="utf-8")
    options = server_options(size, model, folder, has_link, front_ends)
    if tls is not None:
        options |= {"tls_cert": tls.cert, "tls_key": tls.key}
    if principals is not None:
        options |= {"principals": principals}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    log = folder / "server.log"
    log.unlink(missing_ok=True)
    echo_log = folder / "echo.log"
    echo_command = ["deltaline_bench.service.echo", str(folder / "echo.sock")]
    echo_command += [f"--model={model}"] if has_layer_echo else []
    echo_command += [] if tls is None else [f"--cert={tls.cert}", f"--key={tls.key}"]
    with (
        process_of([server_module, *flags], log) as server,
        process_of(echo_command, echo_log) as echo,
    ):
        is_ready, echoes = (
            re.compile(r" ready .*address=(\S+) metrics_port=(\d+)"),
            re.compile(r"echoes on (\S+) .*?(\S+)\n"),
        )
        found = echo_found = None
        begin_s = time.monotonic()
        while found is None or echo_found is None:
            if server.poll() is not None or echo.poll() is not None or time.monotonic() - begin_s > START_TIMEOUT_S:
                raise HostError(f"the server or the echo did not start:\n{log.read_text()[-2000:]}")
            await asyncio.sleep(0.1)
            found, echo_found = is_ready.search(log.read_text()), echoes.search(echo_log.read_text())
        url = f"http://127.0.0.1:{found[2]}/metrics"
        address, echo_address = f"unix:{options['uds']}", echo_found[1]
        if front_ends or tls:
            address, echo_address = found[1], echo_found[2]
        link_address = f"link:{options['link']}" if has_link else None
        addresses = address, echo_address, url
        yield Host(size, model, folder, server, *addresses, has_layer_echo, echo, link_address, server_module)


@contextmanager
def process_of(
    command: Sequence[str], log: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module as a process of its own, ended after the block. variables: beside those of this process."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=output, stderr=output, env=os.environ | variables
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
