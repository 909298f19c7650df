"""Moves of a sequence between two servers of this host, by gRPC and by the local link, stepped or not.

    python bench/moves.py [--size h200|small] [--layers N] [--moves 20] [--output FILE.json]

Two servers have the same random weights: layers of a model of 27 billion parameters, every fourth of them attention
(size h200). Each has a GPU of its own where this host has two, else they share one. A sequence with a prompt goes back
and forth between them. Of each way are judged

  freeze   how much longer than the median step the slowest one took while a move was under way, as the client saw it:
           at most 20 ms and what stood still at the rate of that way; the median of so many moves
  rate     of what goes ahead, digests and all, while nobody steps: of gRPC at least 0.7 of a bare one-way grpc.aio
           stream of as many bytes between two processes, in pieces as large, in turns with the moves; of the link at
           least 5 GB/s
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from deltaline_bench.device import name_device, provenance
from deltaline_bench.service.figure import Figure, missed, to_json, write_table
from deltaline_bench.service.host import START_TIMEOUT_S, HostError, process_of
from deltaline_bench.service.size import REUSE, SMALL, Size
from deltaline_cli.bench.busy import read_metrics
from deltaline_client import AsyncClient, AsyncSequence
from deltaline_server.moving.ways import CHUNK_BYTES

NUM_GPUS = torch.cuda.device_count()
DEVICE = torch.device("cuda" if NUM_GPUS else "cpu")
MAX_FREEZE_S, MIN_OF_BARE, MIN_LINK_RATE = 0.020, 0.7, 5e9
WAYS = GRPC, LINK = "gRPC", "link"
# Decode steps before the first move, of which the median is taken, and between two moves.
STEPS_BEFORE, STEPS_BETWEEN = 200, 20
SIZES = {
    "h200": replace(REUSE, name="h200", prefill_tokens=16_384),
    "small": replace(SMALL, name="small", layers=4, attention_every=2, prefill_tokens=2_048, head_dim=32),
}
READY = re.compile(r" ready .*address=(\S+) metrics_port=(\d+)")
ECHOES = re.compile(r"echoes on \S+ (\S+)\n")
Array = NDArray[Any]
COUNTED = "moved_bytes_ahead", "moved_bytes_frozen", "moved_ahead_seconds", "moved_frozen_seconds"


@dataclass(frozen=True)
class Move:
    """What one move took, seconds and bytes. slowest_s: of the client's steps meanwhile; the others but whole_s are
    what the source has counted, in the order of COUNTED."""

    whole_s: float
    slowest_s: float
    bytes_ahead: float
    bytes_frozen: float
    ahead_s: float
    frozen_s: float

    @property
    def rate(self) -> float:
        """Bytes a second of what went ahead."""
        return self.bytes_ahead / self.ahead_s


@dataclass(frozen=True)
class Served:
    """A server that runs: where it speaks gRPC, its link, and its metrics."""

    address: str
    link: str
    metrics_url: str

    def counted(self) -> list[float]:
        """What it has counted of moves."""
        found = read_metrics(self.metrics_url)
        return [found[f"deltaline_{name}_total"] for name in COUNTED]


def main() -> int:
    """Measure, and print; 1 where a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="h200")
    parser.add_argument("--layers", type=int, help="of each server (default 16; 4 for small)")
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    size = SIZES[options.size]
    size = replace(size, is_judged=DEVICE.type == "cuda", layers=options.layers or size.layers)
    figures = asyncio.run(measure(size, options.moves))
    print(write_table(figures))
    device = name_device(DEVICE) if NUM_GPUS < 2 else f"{name_device(DEVICE)}, one for each server"
    print(f"{size.layers} layers, hidden {size.hidden}, {size.prefill_tokens} tokens, on {device}")
    if options.output is not None:
        record = provenance(device, torch, np, grpc) | {"size": asdict(size), "figures": to_json(figures)}
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if failures := missed(figures):
        print("missed: " + "; ".join(figure.name for figure in failures))
    return int(bool(failures))


async def measure(size: Size, num_moves: int) -> list[Figure]:
    """The figures of so many moves of each kind, back and forth. Raises HostError."""
    with tempfile.TemporaryDirectory(prefix="deltaline-bench-") as folder:
        async with (
            pair(size, Path(folder)) as servers,
            sink_of(Path(folder)) as sink,
            AsyncClient(servers[0].address, servers=[one.address for one in servers]) as client,
        ):
            sequence, token = await prefilled(client, size)
            plain = [await step_s(sequence, token) for _ in range(STEPS_BEFORE)]
            figures = [Figure("moves", "decode step, p50", 1e3 * statistics.median(plain), "ms", "client")]
            for way in WAYS:
                stepped, still, bare = list[Move](), list[Move](), list[float]()
                for number in range(2 * num_moves):
                    source, target = servers[number % 2], servers[1 - number % 2]
                    is_stepped = number >= num_moves
                    move = await moved(client, sequence, token if is_stepped else None, source, target, way)
                    (stepped if is_stepped else still).append(move)
                    if not is_stepped:
                        bare.append(await bare_rate(sink, round(move.bytes_ahead)))
                    for _ in range(STEPS_BETWEEN):
                        await step_s(sequence, token)
                figures += judge(size, way, statistics.median(plain), stepped, still, bare)
    return figures


@asynccontextmanager
async def pair(size: Size, folder: Path) -> AsyncIterator[list[Served]]:
    """Two servers that may move sequences to each other, ended behind the block. Raises HostError."""
    model = folder / "config.json"
    model.write_text(json.dumps(size.model()), encoding="utf-8")
    ports = free_ports(2)
    async with AsyncExitStack() as running:
        logs = []
        links = {port: folder / "run" / f"{port}.sock" for port in ports}
        for number, (port, other) in enumerate((ports, ports[::-1])):
            options: Mapping[str, Any] = {
                "random_init": model,
                "dtype": size.dtype,
                "port": port,
                "metrics_port": 0,
                "link": links[port],
                "advertise": "127.0.0.1",
                "max_sequences": 4,
                "max_context": 2 * size.prefill_tokens,
                "chunk_tokens": size.chunk_tokens,
                "host_state_bytes": 2**31 if size.is_judged else 2**29,
                "state_bytes": 2**33 if size.is_judged else 2**29,
                "move_peers": f"127.0.0.1:{other},link:{links[other]}",
                "log_level": "info",
                "drain_timeout_s": 1.0,
            }
            log = folder / f"{port}.log"
            flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
            gpu = {"CUDA_VISIBLE_DEVICES": str(number)} if NUM_GPUS > 1 else {}
            logs.append((running.enter_context(process_of(["deltaline_server", *flags], log, gpu)), log))
        found = [await asyncio.to_thread(said, READY, *one) for one in logs]
        yield [
            Served(one[1], f"link:{links[port]}", f"http://127.0.0.1:{one[2]}/metrics")
            for port, one in zip(ports, found, strict=True)
        ]


def said(pattern: re.Pattern[str], process: subprocess.Popen[bytes], log: Path) -> re.Match[str]:
    """What a process that starts says of itself, once it does. Raises HostError."""
    until_s = time.monotonic() + START_TIMEOUT_S
    while (found := pattern.search(log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > until_s:
            raise HostError(f"a process did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)
    return found


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody has."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


async def prefilled(client: AsyncClient, size: Size) -> tuple[AsyncSequence, Array]:
    """A sequence with its prompt, and a token for its steps."""
    info = await client.info()
    sequence, rng = await client.open(), np.random.default_rng(0)

    def tokens(count: int) -> Array:
        return rng.standard_normal((count, *info.input_shape()), dtype=np.float32).astype(info.dtype)

    at_once = min(size.prefill_tokens, (info.inline_limit_bytes // size.token_bytes) // 2)
    for begin in range(0, size.prefill_tokens, at_once):
        await sequence.prefill(tokens(min(at_once, size.prefill_tokens - begin)))
    return sequence, tokens(1)[0]


async def step_s(sequence: AsyncSequence, token: Array) -> float:
    """How long a decode step took, wherever the sequence lives."""
    begun_s = time.perf_counter()
    await sequence.decode(token)
    return time.perf_counter() - begun_s


async def moved(
    client: AsyncClient, sequence: AsyncSequence, token: Array | None, source: Served, target: Served, way: str
) -> Move:
    """Move a sequence; token: of the steps that are taken meanwhile, None for none."""
    before, begun_s, whole = source.counted(), time.perf_counter(), list[float]()
    address = target.address if way == GRPC else target.link
    moving, steps = asyncio.create_task(client.move([sequence], address)), [0.0]
    moving.add_done_callback(lambda _: whole.append(time.perf_counter() - begun_s))
    while token is not None and not moving.done():
        steps.append(await step_s(sequence, token))
    await moving
    if token is not None:
        steps.append(await step_s(sequence, token))
    counted = [now - then for now, then in zip(source.counted(), before, strict=True)]
    return Move(whole[0], max(steps), *counted)


@asynccontextmanager
async def sink_of(folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a process that takes bytes by a bare stream, by the way that the servers have."""
    log = folder / "sink.log"
    with process_of(["deltaline_bench.service.echo", str(folder / "sink.sock")], log) as process:
        found = await asyncio.to_thread(said, ECHOES, process, log)
        async with grpc.aio.insecure_channel(found[1]) as channel:
            yield channel


async def bare_rate(channel: grpc.aio.Channel, num_bytes: int) -> float:
    """Bytes a second of a bare one-way stream of so many, whole pieces."""
    piece, count = bytes(CHUNK_BYTES), max(1, num_bytes // CHUNK_BYTES)
    begun_s = time.perf_counter()
    call: Any = channel.stream_unary("/bare.Echo/sink")()
    for _ in range(count):
        await call.write(piece)
    await call.done_writing()
    [taken] = struct.unpack("q", await call)
    assert taken == count * CHUNK_BYTES
    return float(taken / (time.perf_counter() - begun_s))


def judge(
    size: Size, way: str, step: float, stepped: Sequence[Move], still: Sequence[Move], bare: Sequence[float]
) -> list[Figure]:
    """Make the figures of a way."""
    rate = statistics.median(one.rate for one in still)
    freezes = [max(one.slowest_s - step, 0.0) for one in stepped]
    frozen_bytes = p50(stepped, "bytes_frozen")
    bar_ms = 1e3 * (MAX_FREEZE_S + frozen_bytes / rate)
    of_bare = statistics.median(one.rate / other for one, other in zip(still, bare, strict=True))
    of_rate, of_ratio = size.bar(MIN_LINK_RATE / 1e9, is_least=True), size.bar(MIN_OF_BARE, is_least=True)
    return [
        Figure(way, "freeze, p50", 1e3 * statistics.median(freezes), "ms", "client", size.bar(bar_ms)),
        Figure(way, "freeze, p99", 1e3 * float(np.percentile(freezes, 99)), "ms", "client"),
        Figure(way, "freeze as the source says, p50", 1e3 * p50(stepped, "frozen_s"), "ms", "metrics"),
        Figure(way, "a whole move, p50", 1e3 * p50(stepped, "whole_s"), "ms", "client", note="stepped"),
        Figure(way, "sent ahead, p50", p50(stepped, "bytes_ahead") / 1e6, "MB", "metrics"),
        Figure(way, "sent while it stood still, p50", frozen_bytes / 1e6, "MB", "metrics"),
        Figure(way, "rate while stepped, p50", statistics.median(one.rate for one in stepped) / 1e9, "GB/s", "metrics"),
        Figure(way, "rate, p50", rate / 1e9, "GB/s", "metrics", None if way == GRPC else of_rate),
        Figure(way, "a bare stream of as many bytes, p50", statistics.median(bare) / 1e9, "GB/s", "raw"),
        Figure(way, "of a bare stream, p50", of_bare, "", "raw", of_ratio if way == GRPC else None),
    ]


def p50(moves: Sequence[Move], name: str) -> float:
    """The median of a number of moves."""
    return float(statistics.median(getattr(one, name) for one in moves))


if __name__ == "__main__":
    sys.exit(main())
