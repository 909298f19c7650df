"""Part `throughput`: many clients, each a process, in a closed loop through shared memory; beside the bare engine."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from deltaline_bench.service.engine_loop import rows_per_second
from deltaline_bench.service.figure import Figure
from deltaline_bench.service.host import Host, HostError
from deltaline_bench.service.size import Size

PART = "throughput"


async def measure(host: Host) -> list[Figure]:
    """Run `deltaline bench` inline and through shared memory, then the engine in this process."""
    size = host.size
    room_bytes = max(64 * size.decode_rows * size.token_bytes, 2**24)
    runs = {"inline": await _bench(host, 0), "shared memory": await _bench(host, room_bytes)}
    engine = await rows_per_second(size, host.model, size.clients * size.decode_rows)
    return judge(size, runs, engine)


def judge(size: Size, runs: dict[str, dict[str, Any]], engine: tuple[float, float]) -> list[Figure]:
    """Make the figures. runs: the records of `deltaline bench` by way; engine: rows per second, share computed."""
    engine_rows, engine_busy = engine
    clients = f"{size.clients} clients x {size.decode_rows} rows"
    figures = [
        Figure(PART, "the engine alone", engine_rows, "rows/s", "engine", note="batches of all rows, two deep"),
        Figure(PART, "the engine alone, device busy", engine_busy, "", "engine"),
    ]
    for way, record in runs.items():
        decode = record["kinds"]["decode"]
        figures += [
            Figure(PART, way, decode["rows_per_s"], "rows/s", "client", note=clients),
            Figure(PART, f"{way}, p50", decode["ms"]["total"][0] * 1e3, "us", "client"),
            Figure(
                PART,
                f"{way}, device busy",
                record["device_busy"],
                "",
                "metrics",
                note=record["device_busy_unknown"] or "",
            ),
        ]
    shared, bar = runs["shared memory"]["kinds"]["decode"]["rows_per_s"], size.bar(0.85, is_least=True)
    return [*figures, Figure(PART, "shared memory / the engine alone", shared / engine_rows, "", "client", bar)]


async def _bench(host: Host, shared_memory_bytes: int) -> dict[str, Any]:
    """Run the command in processes of its own and return its record. Raises HostError."""
    size, file = host.size, host.folder / "bench.json"
    options = {
        "clients": size.clients,
        "processes": size.clients,
        "rows": size.decode_rows,
        "mix": "decode=1",
        "duration": size.throughput_s,
        "shared-memory-bytes": shared_memory_bytes,
        "metrics-url": host.metrics_url,
        "output": file,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "deltaline_cli", "bench", host.address, *flags]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    if process.returncode:
        raise HostError(f"deltaline bench ended with {process.returncode}: {errors.decode()[-1000:]}")
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record
