"""Part `floods`: decode steps of one principal while another floods with calls: refused in each way, and accepted.

A refused flood is judged beside nothing, an accepted one beside a peer, who makes one such call at a time. The judged
server has two front ends. The clock's ratio is for a host with processors to spare; how many refusals reach the core,
and its processor time, mean the same on a busy one.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_bench.service.figure import Figure
from deltaline_bench.service.host import Host, running
from deltaline_bench.service.processor import cpu_ns
from deltaline_bench.service.raw import MAX_MESSAGE_BYTES, DecodeSteps, decoding, percentile_us, window
from deltaline_cli.bench.loop import closed_loop
from deltaline_client import AsyncClient

PART = "floods"
FRONT_ENDS = 2
# Processes that flood, and calls of each on their way.
FLOODERS, CALLS = 3, 128
# How long a flood goes on before its time counts: until what is refused at once is spent.
SETTLE_S = 3.0
MAX_RATIO = 1.2
TOKENS = ("token-of-mallory", "token-of-victim")
LAYER = "/deltaline.v1.LayerService/"


class Flood(NamedTuple):
    """What is called, and by whom."""

    method: str
    body: bytes
    token: str = TOKENS[0]


class Seen(NamedTuple):
    """What was measured: seconds of each step, refusals a second that reached the core, and its processors' share."""

    steps_s: list[float]
    refusals_per_s: float
    busy: float


def floods(server_epoch: int) -> Mapping[str, Flood]:
    """The ways to be refused."""
    guesses = [(number << 24) | number for number in range(1, 65)]
    unknown = pb.DescribeSequencesRequest(server_epoch=server_epoch, sequence=guesses)
    return {
        "quota": Flood(f"{LAYER}OpenSequences", pb.OpenSequencesRequest(count=2).SerializeToString()),
        "role": Flood("/deltaline.v1.AdminService/Drain", b""),
        "token": Flood(f"{LAYER}Step", b"", "unknown"),
        "invalid": Flood(f"{LAYER}Step", b"\xff"),
        "handles": Flood(f"{LAYER}DescribeSequences", unknown.SerializeToString()),
    }


def accepted(server_epoch: int, handle: int, hidden_size: int, dtype: str) -> Mapping[str, Flood]:
    """Calls that end well however often they come, and a sequence's first step, which is done once."""
    describe = pb.DescribeSequencesRequest(server_epoch=server_epoch, sequence=[handle])
    step = pb.StepRequest(
        server_epoch=server_epoch,
        sequence=[handle],
        kind=[pb.ROW_KIND_DECODE],
        step=[1],
        position=[0],
        accepted=[-1],
        query_start_loc=[0, 1],
        hidden=wire.encode(np.zeros((1, hidden_size), dtype)),
        max_reply_bytes=MAX_MESSAGE_BYTES,
    )
    return {
        "describes": Flood(f"{LAYER}DescribeSequences", describe.SerializeToString()),
        "retries": Flood(f"{LAYER}Step", step.SerializeToString()),
    }


def principals(path: Path) -> Path:
    """Write who may do what."""
    digests = [sha256(token.encode()).hexdigest() for token in TOKENS]
    path.write_text(
        f'[[principal]]\nname = "mallory"\nroles = ["step"]\ntokens = ["{digests[0]}"]\nquotas.sequences = 1\n'
        f'[[principal]]\nname = "victim"\nroles = ["step"]\ntokens = ["{digests[1]}"]\n',
        encoding="utf-8",
    )
    return path


async def measure(host: Host) -> list[Figure]:
    """Time decode steps alone, beside each flood, and beside a peer of each that is accepted."""
    with TemporaryDirectory(dir=host.folder) as folder:
        known = principals(Path(folder) / "principals.toml")
        async with (
            running(host.size, Path(folder), host.server_module, front_ends=FRONT_ENDS, principals=known) as judged,
            decoding(judged.address, host.size.decode_rows, "unary", token=TOKENS[1]) as steps,
            AsyncClient(judged.address, token=TOKENS[0]) as other,
        ):
            await _see(judged, steps, host.size.flood_s / 4)
            alone, beside, peers = [await _see(judged, steps, host.size.flood_s)], {}, {}

            async def see_beside(flood: Flood, processes: int, calls: int) -> Seen:
                with _flooding(judged.address, flood, processes, calls):
                    await asyncio.sleep(SETTLE_S)
                    return await _see(judged, steps, host.size.flood_s)

            for name, flood in floods(steps.server_epoch).items():
                beside[name] = await see_beside(flood, FLOODERS, CALLS)
                alone.append(await _see(judged, steps, host.size.flood_s))
            async with await other.open() as sequence:
                info = await other.info()
                calls = accepted(steps.server_epoch, sequence.handle, info.hidden_size, str(info.dtype))
                for name, flood in calls.items():
                    peers[name] = await see_beside(flood, 1, 1)
                    beside[name] = await see_beside(flood, FLOODERS, CALLS)
    return judge(host, alone, beside, peers)


def judge(host: Host, alone: list[Seen], beside: Mapping[str, Seen], peers: Mapping[str, Seen]) -> list[Figure]:
    """Make the figures. alone: before the first flood, and behind each that is refused. peers: beside one call at a
    time of each flood that is accepted."""
    busy = sum(one.busy for one in alone) / len(alone)
    quiet = Seen([step_s for one in alone for step_s in one.steps_s], 0.0, busy)
    figures = _figures("alone", quiet)
    for name, seen in beside.items():
        figures += _figures(f"beside {name}", seen)
        least, than = (quiet, "alone") if name not in peers else (peers[name], "beside a peer")
        if name in peers:
            figures += _figures(f"beside a peer's {name}", least)
        ratio = percentile_us(seen.steps_s, 99) / percentile_us(least.steps_s, 99)
        figures.append(Figure(PART, f"beside {name} / {than}, p99", ratio, "", "raw", host.size.bar(MAX_RATIO)))
        told = f"beside {name}, refusals that reach the core"
        figures.append(Figure(PART, told, seen.refusals_per_s, "/s", "metrics"))
    return figures


def _figures(name: str, seen: Seen) -> list[Figure]:
    note = f"{len(seen.steps_s)} steps"
    return [
        Figure(PART, f"decode {name}, p50", percentile_us(seen.steps_s, 50), "us", "raw", note=note),
        Figure(PART, f"decode {name}, p99", percentile_us(seen.steps_s, 99), "us", "raw"),
        Figure(PART, f"core {name}", seen.busy, "processors", "process"),
    ]


async def _see(host: Host, steps: DecodeSteps, seconds: float) -> Seen:
    """Make decode steps for so long."""
    begin_s, begin_ns, begin = time.monotonic(), cpu_ns(host.server.pid), _num_refused(host)
    rows = [sample async for [sample] in closed_loop([steps.step], lambda: time.monotonic() < begin_s + seconds)]
    took_s = time.monotonic() - begin_s
    busy = (cpu_ns(host.server.pid) - begin_ns) * 1e-9 / took_s
    total_s = window(rows).stages_s("decode")["total"].tolist()
    return Seen(total_s, (_num_refused(host) - begin) / took_s, busy)


def _num_refused(host: Host) -> float:
    return sum(value for name, value in host.metrics().items() if name.startswith("deltaline_refused_total"))


@contextmanager
def _flooding(address: str, flood: Flood, processes: int, calls: int) -> Iterator[None]:
    """Flood from processes of their own, from when each had an answer."""
    command = [sys.executable, "-m", "deltaline_bench.service.flooder", address, flood.method, flood.body.hex()]
    with ExitStack() as stack:
        made = [
            stack.enter_context(subprocess.Popen([*command, flood.token, str(calls)], stdout=subprocess.PIPE))
            for _ in range(processes)
        ]
        for process in made:
            stack.callback(process.kill)
        for process in made:
            assert process.stdout is not None
            process.stdout.readline()
        yield
