"""The file tier beside the same bytes by plain calls, and digests beside each other, in one run.

    python bench/tiers.py FOLDER [--turns 8]

FOLDER is on the disk that is meant, and gets a few files of 154 MB, one at a time. The state is that of a model of 27
billion parameters without its pages. A turn writes the bytes with os.write and fsync, then as a state; each is removed
before the next. Reads are cold: the kernel is told to forget the pages. Digests of packages that are not installed are
left out; times of digests are of the thread, the least of five. Where there is a GPU, the host tier comes first: the
same state between its memory and pinned memory, beside one copy of as many bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import os
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltaline_server.layers.shapes import GatedDeltaNetShape
from deltaline_server.layers.state_pool import StateOptions, StatePool
from deltaline_server.memory.pinning import CudaPinning
from deltaline_server.snapshots.device.transfer import StatePlace, StateTransfer
from deltaline_server.snapshots.directory import StateDirectory, name_of
from deltaline_server.snapshots.header import StateHeader
from deltaline_server.snapshots.host import HostTier
from deltaline_server.snapshots.layout import Bytes, SpanProgress, StateLayer, StateLayout, state_bytes

PIECE = 1 << 20
LAYERS = tuple(StateLayer(i, 0, GatedDeltaNetShape(16, 48, 128, 128, 4)) for i in range(48))
LAYOUT = StateLayout(LAYERS, num_spans=1, itemsize=2, state_itemsize=4, max_draft=8)
HEADER = StateHeader(bytes(16), bytes(32), "bench", (SpanProgress(step=1, position=8192),))
SECTIONS = LAYOUT.sections(HEADER.spans)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=8)
    arguments = parser.parse_args()
    memory = np.random.default_rng(0).integers(0, 256, state_bytes(SECTIONS), dtype=np.uint8)
    print(f"{len(memory):,} bytes in {len(SECTIONS)} sections; load {os.getloadavg()[0]:.1f}")
    for name, digest in digests().items():
        seconds = min(thread_time(lambda digest=digest: digest(memory.data)) for _ in range(5))  # type: ignore[misc]
        print(f"{name:<18} {len(memory) / seconds / 1e9:6.2f} GB/s")
    if torch.cuda.is_available():
        host_tier(arguments.turns)
    arguments.folder.mkdir(mode=0o700, exist_ok=True)
    directory = StateDirectory(arguments.folder / "states")
    plain = arguments.folder / "plain"
    back = np.empty_like(memory)
    times: dict[str, list[float]] = {name: [] for name in ("write + fsync", "a state", "read", "a state's read")}
    for _ in range(arguments.turns):
        times["write + fsync"].append(clock_time(lambda: write_plain(plain, memory)))
        times["read"].append(read_cold(plain, lambda: read_plain(plain, back)))
        plain.unlink()
        times["a state"].append(clock_time(lambda: directory.write(HEADER, SECTIONS, memory, 0)))
        stored, _ = directory.read_header(name_of(HEADER.id), LAYOUT, HEADER.fingerprint)
        path = arguments.folder / "states" / name_of(HEADER.id)
        times["a state's read"].append(
            read_cold(path, lambda stored=stored: directory.read(stored.remembered, LAYOUT, back, 0))  # type: ignore[misc]
        )
        assert (back == memory).all()
        directory.remove(name_of(HEADER.id))
    directory.close()
    for name, seconds_of in times.items():
        rates = [len(memory) / seconds / 1e6 for seconds in seconds_of]
        print(f"{name:<18} {statistics.median(rates):7.0f} MB/s, {min(rates):.0f} .. {max(rates):.0f}")
    for ours, plainly in (("a state", "write + fsync"), ("a state's read", "read")):
        ratios = [one / other for one, other in zip(times[plainly], times[ours], strict=True)]
        print(f"{ours} / {plainly}: {statistics.median(ratios):.2f}, {min(ratios):.2f} .. {max(ratios):.2f}")


def host_tier(turns: int) -> None:
    """Measure the way between the device and pinned memory, and print."""
    device = torch.device("cuda")
    shapes, options = [layer.shape for layer in LAYERS], StateOptions(num_lines=2, max_draft=LAYOUT.max_draft)
    pool = StatePool(shapes, options, dtype=torch.bfloat16, device=device)
    transfer = StateTransfer(LAYOUT, [layer.number for layer in LAYERS], pool)
    tier = HostTier(LAYOUT, 2 * state_bytes(SECTIONS), CudaPinning(device))
    asyncio.run(tier.store(HEADER, nothing))
    spans, no_pages, no_commits = HEADER.spans, np.zeros(0, np.int32), np.zeros((0, 3), np.int64)
    with tier.use(HEADER.id) as memory, torch.inference_mode():
        assert memory is not None
        place, pinned = StatePlace((1,), no_pages), torch.from_numpy(memory)
        plain = torch.empty(len(memory), dtype=torch.uint8, device=device)
        works: dict[str, Callable[[], object]] = {
            "one copy out": lambda: pinned.copy_(plain, non_blocking=True),
            "gather": lambda: transfer.gather(spans, place, no_commits, memory),
            "one copy in": lambda: plain.copy_(pinned, non_blocking=True),
            "scatter": lambda: transfer.scatter(spans, place, memory),
        }
        for name, work in works.items():
            times = [clock_time(lambda work=work: done(work)) for _ in range(turns + 2)][2:]  # type: ignore[misc]
            seconds = statistics.median(times)
            print(f"{name:<18} {len(memory) / seconds / 1e9:6.2f} GB/s, {seconds * 1e3:.2f} ms")
    tier.close()


def done(work: Callable[[], object]) -> None:
    """Do what the device is asked for, to its end."""
    work()
    torch.cuda.synchronize()


async def nothing(memory: Bytes) -> None:
    """Leave a state's memory as it is."""


def digests() -> dict[str, Callable[[memoryview], object]]:
    """Digests of this Python and of packages that are installed, each over a megabyte at a time."""
    found: dict[str, Callable[[memoryview], object]] = {"zlib.crc32": checksum(zlib.crc32)}
    for name in ("blake2b", "sha256"):
        found[f"hashlib.{name}"] = hashed(lambda name=name: hashlib.new(name))  # type: ignore[misc]
    for module, name in (("xxhash", "xxh3_128"), ("xxhash", "xxh3_64"), ("blake3", "blake3")):
        if (package := installed(module)) is not None:
            found[f"{module}.{name}"] = hashed(getattr(package, name))
    for module, name in (("isal.isal_zlib", "crc32"), ("crc32c", "crc32c")):
        if (package := installed(module)) is not None:
            found[f"{module}.{name}"] = checksum(getattr(package, name))
    return found


def installed(module: str) -> Any:
    """A module, None where its package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def hashed(make: Callable[[], Any]) -> Callable[[memoryview], object]:
    """Hash with what `make` makes."""

    def digest(content: memoryview) -> object:
        state = make()
        for at in range(0, len(content), PIECE):
            state.update(content[at : at + PIECE])
        return state.digest()

    return digest


def checksum(add: Callable[[memoryview, int], int]) -> Callable[[memoryview], object]:
    """Sum with a function that goes on from a value."""

    def digest(content: memoryview) -> object:
        value = 0
        for at in range(0, len(content), PIECE):
            value = add(content[at : at + PIECE], value)
        return value

    return digest


def write_plain(path: Path, memory: Bytes) -> None:
    """The same bytes with no more than what makes them lasting."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    done = 0
    while done < len(memory):
        done += os.write(descriptor, memory[done:].data)
    os.fsync(descriptor)
    os.close(descriptor)


def read_plain(path: Path, memory: Bytes) -> None:
    """The same bytes, believed as they are."""
    descriptor = os.open(path, os.O_RDONLY)
    done = 0
    while done < len(memory):
        done += os.preadv(descriptor, [memory[done:].data], done)
    os.close(descriptor)


def read_cold(path: Path, read: Callable[[], object]) -> float:
    """How long a read takes once the kernel has forgotten the file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return clock_time(read)


def clock_time(work: Callable[[], object]) -> float:
    """Seconds by the clock."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def thread_time(work: Callable[[], object]) -> float:
    """Seconds of this thread."""
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


if __name__ == "__main__":
    main()
