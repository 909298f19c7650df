"""Ranks on the GPUs of one host, each part in processes of its own, within a time of its own.

orders     what rank 0 tells, until another rank has it
stack      decode and prefill of layers of 27B shape over ranks beside one GPU
large      a server of 80B-A3B shape, which one GPU can't hold: random steps, and decodes beside their bytes' time
families   small models of every family over ranks beside one GPU: errors, bits, states that go there and back
serving    servers beside one of a GPU, whose ranks are killed and stopped under load, and that serve again
sums       the ranks' sum in graphs: by NCCL and by symmetric memory, alone, and with residual and norm behind it

What judges no times is measured at once. A part that fails does not keep the others from being measured.

    python bench/ranks.py [--ranks N] [--part NAME]... [--within SECONDS]

Exit status: 0; 1 where a check failed or a part did not end in time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import torch

from deltaline_bench.ranks import large, serving
from deltaline_bench.ranks.models import MODELS
from deltaline_server.ranks.group import Group
from deltaline_server.ranks.launcher import launch
from deltaline_server.ranks.parent import end_with_parent
from deltaline_server.ranks.place import Place

# Seconds of each part, the start of its processes included; parts of a line at once.
STAGES: Sequence[Mapping[str, float]] = (
    {"orders": 40},
    {"stack": 150},
    {"large": 180},
    {"families": 220, "serving": 220},
    {"sums": 75},
)
PARTS = [part for stage in STAGES for part in stage]
WITHIN_S, FAMILY_S = 900.0, 150.0
# What processes of a part are alone with their own: measured by none of them.
SERVERS: Mapping[str, Callable[[int], int]] = {"large": large.measure, "serving": serving.measure}


def main() -> int:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--within", type=float, default=WITHIN_S, help="seconds of all parts together")
    parser.add_argument("--of-part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--name", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    part, names = asked.of_part, () if asked.name is None else (asked.name,)
    if part:
        end_with_parent()
    if asked.is_rank:
        return _measure(part, *names)
    if part in SERVERS:
        return int(SERVERS[part](asked.ranks) > 0)
    if part == "families" and not names:
        return _measure_families(asked.ranks)
    if part:
        return launch(asked.ranks, _command(asked.ranks, part, *names, is_rank=True), os.environ)
    return _measure_all(asked.ranks, asked.part or PARTS, time.monotonic() + asked.within)


def _measure_all(world_size: int, parts: Sequence[str], end_s: float) -> int:
    failed: list[str] = []
    for stage in STAGES:
        wanted = [part for part in stage if part in parts]
        if not wanted:
            continue
        begin_s = time.monotonic()
        with ThreadPoolExecutor(len(wanted)) as pool:
            limits = (min(stage[part], end_s - begin_s) for part in wanted)
            codes = pool.map(_run, (_command(world_size, part) for part in wanted), limits)
            failed += [f"{part} ({code})" for part, code in zip(wanted, codes, strict=True) if code]
        print(f"{', '.join(wanted)}: {time.monotonic() - begin_s:.0f} s", flush=True)
    print("failed: " + ", ".join(failed) if failed else "all checks hold", flush=True)
    return int(bool(failed))


def _measure_families(world_size: int) -> int:
    """Measure as many families at a time as there are processors for: most of it is compiling."""
    at_once = max(1, (os.cpu_count() or 1) // (2 * world_size))
    with ThreadPoolExecutor(at_once) as pool:
        commands = [_command(world_size, "families", name) for name in MODELS]
        codes = dict(zip(MODELS, pool.map(lambda command: _run(command, FAMILY_S), commands), strict=True))
    for name, code in codes.items():
        if code:
            print(f"  {name}: {code}", flush=True)
    return int(any(codes.values()))


def _command(world_size: int, part: str, *names: str, is_rank: bool = False) -> list[str]:
    command = [sys.executable, __file__, "--ranks", str(world_size), "--of-part", part]
    return [*command, *(f"--name={name}" for name in names), *(["--is-rank"] if is_rank else [])]


def _run(command: Sequence[str], limit_s: float) -> int | str:
    """Run a command; its exit code, or that it was killed with all that it has started: servers are in its session,
    and what measures ends with its parent."""
    if limit_s <= 0:
        return "no time was left"
    with subprocess.Popen(command, start_new_session=True) as running:
        try:
            return running.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return f"no end within {limit_s:.0f} s"


def _measure(part: str, *names: str) -> int:
    """A rank's part of a measurement."""
    place = Place.find(os.environ)
    assert place is not None
    device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    code = 1
    try:
        group = Group(place, device)
        measure: Callable[..., int] = import_module(f"deltaline_bench.ranks.{part}").measure
        with torch.inference_mode():
            code = int(measure(group, device, *names) > 0)
    except Exception:
        print(f"{part} {' '.join(names)}, rank {place.rank}: {traceback.format_exc()}", flush=True)
    sys.stdout.flush()
    os._exit(code)  # a rank that waits for one that has failed waits for ever


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]
    sys.exit(main())
