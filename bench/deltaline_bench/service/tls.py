"""Part `tls`: what TLS adds to a step of rows, beside what it adds to a bare echo of the same bytes.

Both with and without it in turns, each one process with two ports; layers only copy, so that the rest of a step stays
the same. Judged are the clock's time, in which the host's other work counts too, and that of processors, client and
server together, in which it counts how much of a message is in their caches still: an echo touches nothing else.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from deltaline_bench.service.figure import Bar, Figure
from deltaline_bench.service.host import Host, HostError, running
from deltaline_bench.service.processor import cost_ns
from deltaline_bench.service.raw import Way, decoding, echoing, measured
from deltaline_cli.bench.loop import Step
from deltaline_client import Tls

PART = "tls"
# Most that TLS may add to a step, in what it adds to an echo.
BAR = Bar(1.3)
SIDES = "step", "bare echo"
# Calls of a side at a time, and how often all sides have theirs. Longer turns let the host's other work in between.
BLOCK, TURNS = 10, 150


async def measure(host: Host) -> list[Figure]:
    """Start a server and an echo that speak TLS on one port and none on another, and time steps and echoes in turns."""
    figures: list[Figure] = []
    with TemporaryDirectory(dir=host.folder) as folder:
        tls = certificate(Path(folder))
        async with running(host.size, Path(folder), "deltaline_bench.service.copying", tls=tls) as both:
            for way in host.size.ways:
                figures += await _in_turns(both, way, tls)
    return figures


def certificate(folder: Path) -> Tls:
    """A certificate of localhost, which both sides show and believe. Raises HostError."""
    cert, key = folder / "tls.crt", folder / "tls.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)]
    try:
        subprocess.run([*command.split(), *names], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise HostError(f"openssl made no certificate: {error}") from error
    return Tls(cert, cert, key)


async def _in_turns(host: Host, way: Way, tls: Tls) -> list[Figure]:
    """Take processor time and the clock's of steps and of echoes, each without TLS and with it, in turns."""
    rows = host.size.decode_rows
    plain = [_plain_address(host.folder / log) for log in ("server.log", "echo.log")]
    async with AsyncExitStack() as stack:
        sides: dict[str, tuple[int, Step]] = {}
        for by, known, (address, echo_address) in (
            ("", None, plain),
            (" by TLS", tls, (host.address, host.echo_address)),
        ):
            steps = await stack.enter_async_context(decoding(address, rows, way, known))
            echo = await stack.enter_async_context(echoing(echo_address, way, steps, tls=known))
            sides[f"step{by}"], sides[f"bare echo{by}"] = (host.server.pid, steps.step), (host.echo.pid, echo)
        samples = await measured(*(step for _, step in sides.values()), rounds=host.size.decode_steps)
        costs = [[await cost_ns(pid, step, BLOCK) for pid, step in sides.values()] for _ in range(TURNS)]
    clock_us = [one.stages_s("decode")["total"] * 1e6 for one in samples]
    cost_us = np.array(costs).T / 1e3
    return judge(way, dict(zip(sides, clock_us, strict=True)), dict(zip(sides, cost_us, strict=True)))


def _plain_address(log: Path) -> str:
    """The address without TLS that a process tells of. Raises HostError."""
    found = re.search(r"(?:plain on|echoes on \S+) (\S+)", log.read_text())
    if found is None:
        raise HostError(f"no address without TLS in {log.name}")
    return found[1]


def judge(
    way: Way, clock_us: Mapping[str, NDArray[np.float64]], cost_us: Mapping[str, NDArray[np.float64]]
) -> list[Figure]:
    """Make the figures of one way of calling. clock_us and cost_us: of turns, by side."""
    figures: list[Figure] = []
    for name, added, taken_us in (("p50", ", by the clock", clock_us), ("processors", "", cost_us)):
        figures += [
            Figure(PART, f"{way}, {side}, {name}", float(np.median(us)), "us", "raw") for side, us in taken_us.items()
        ]
        # Turn by turn: what else the host does is on both sides of one.
        by_step, by_echo = (float(np.median(taken_us[f"{side} by TLS"] - taken_us[side])) for side in SIDES)
        note = f"{by_step:.0f} us for {by_echo:.0f}"
        figures.append(Figure(PART, f"{way}, added to a step{added}", by_step / by_echo, "echoes'", "raw", BAR, note))
    return figures
