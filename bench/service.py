"""The service as its users meet it, judged: server, bare echo and clients are processes of this host, on UNIX sockets.

  decode      a decode step beside a bare echo of the same bytes, and by its stages
  throughput  many clients in closed loops, beside the engine driven in this process
  prefill     a long prefill, inline and through shared memory, beside an echo and a copy of its bytes
  mixed       decode steps while long prefills run, beside each alone
  steady      random steps: nothing compiles, is captured or allocated after readiness
  soak        decode rows for a long time: memory stays flat
  floods      decode steps of a principal while another's calls are refused, many at a time, by two front ends
  forks       a fork and the children's first decode, beside a plain decode
  waypoints   a prefill that leaves states on its way, beside one that leaves none
  hits        the first output of a prompt of which most is stored, beside one of which nothing is
  tls         what TLS adds to a decode step, beside what it adds to a bare echo; of the size cpu

Each figure says who saw it: "raw" sends bytes that were made before the clock started, "client" is the Python client.

    python bench/service.py [--part NAME]... [--size SIZE] [--link] [--front-ends N] [--pretend]
                            [--soak-seconds N] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import grpc
import numpy as np
import torch

from deltaline_bench.device import name_device, provenance
from deltaline_bench.service import (
    decode,
    floods,
    forks,
    mixed,
    prefill,
    pretending,
    reuse,
    soak,
    steady,
    throughput,
    tls,
)
from deltaline_bench.service.figure import Bar, Figure, missed, to_json, write_table
from deltaline_bench.service.host import Host, HostError, running
from deltaline_bench.service.size import SIZES, Size

Measure = Callable[[Host], Awaitable[list[Figure]]]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARTS: Mapping[str, Measure] = {
    part.PART: part.measure for part in (decode, throughput, prefill, mixed, steady, soak, floods, forks, tls)
} | {reuse.WAYPOINTS: reuse.measure_waypoints, reuse.HITS: reuse.measure_hits}


async def run(
    size: Size,
    parts: Sequence[str],
    measures: Mapping[str, Measure] = PARTS,
    output: Path | None = None,
    has_link: bool = False,
    front_ends: int = 0,
    pretends: bool = False,
) -> list[Figure]:
    """Measure parts one after the other on one server; a part that fails is a miss. Raises HostError.

    has_link: the server has a local link, which steps then go by. front_ends: how many speak gRPC. pretends: the device
    only waits, here too.

    Figures are told, and written to `output`, after each part: a run that is cut short leaves those it had.
    """
    figures: list[Figure] = []
    module = pretending.__name__ if pretends else "deltaline_server"
    if pretends:
        pretending.pretend()
    print("the server starts ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="deltaline-bench-") as folder:
        async with running(size, Path(folder), module, has_link=has_link, front_ends=front_ends) as host:
            for part in parts:
                print(f"{part} ...", file=sys.stderr, flush=True)
                new = await measure_part(part, measures[part], host)
                print(write_table(new) + "\n", flush=True)
                figures += new
                if output is not None:
                    write_record(size, figures, output)
    return figures


async def measure_part(part: str, measure: Measure, host: Host) -> list[Figure]:
    """Measure one part. Whatever ends it, the others still run: its figure then has no value, and misses its bar."""
    try:
        return await measure(host)
    except Exception as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Figure(part, "runs to its end", None, "", "", Bar(1, is_least=True), why)]


def report(size: Size, figures: Sequence[Figure]) -> int:
    """Say what was missed; return 1 when something was."""
    print(f"{size.name}: {size.layers} layers, hidden {size.hidden}, {size.dtype}, on {name_device(DEVICE)}")
    failures = missed(figures)
    if failures:
        print("missed: " + "; ".join(f"{figure.part}, {figure.name}" for figure in failures))
    return 1 if failures else 0


def write_record(size: Size, figures: Sequence[Figure], output: Path) -> None:
    """Write the figures with what they were measured on."""
    record = provenance(name_device(DEVICE), torch, np, grpc) | {
        "size": asdict(size),
        "figures": to_json(figures),
        "missed": [f"{figure.part}, {figure.name}" for figure in missed(figures)],
    }
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 0 when every bar is met, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "what to measure, may be repeated (default: all parts of the size)"
    parser.add_argument("--part", action="append", choices=PARTS, help=text)
    text = (
        "h200: the sizes that are judged; reuse, linear: layers of a model of 27 billion parameters, for forks; small: "
        "all parts in less than a minute on two cores; cpu: what a decode step of a CPU's layer costs beside echoes "
        "(default h200)"
    )
    parser.add_argument("--size", choices=SIZES, default="h200", help=text)
    parser.add_argument("--soak-seconds", type=float, help="how long the soak takes (default 600; 2 for small)")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    text = "give the server a local link: clients and raw decode steps go by it"
    parser.add_argument("--link", action="store_true", help=text)
    text = "give the server so many front ends that speak gRPC (default 0: it does itself)"
    parser.add_argument("--front-ends", type=int, default=0, metavar="N", help=text)
    text = "without a GPU: the device only waits, as long as an H200 computes; what it takes to launch is left out"
    parser.add_argument("--pretend", action="store_true", help=text)
    options = parser.parse_args(arguments)
    size = SIZES[options.size]
    if options.soak_seconds is not None:
        size = replace(size, soak_s=options.soak_seconds)
    try:
        parts = options.part or size.parts
        ways = {"has_link": options.link, "front_ends": options.front_ends, "pretends": options.pretend}
        figures = asyncio.run(run(size, parts, output=options.output, **ways))
    except HostError as error:
        print(f"service bench: error: {error}", file=sys.stderr)
        return 1
    return report(size, figures)


if __name__ == "__main__":
    sys.exit(main())
