"""Ranks on the GPUs of one host, each part in processes of its own, within a time of its own.

sums       the ranks' sum in graphs: by NCCL and by symmetric memory, alone, and with residual and norm behind it
orders     what rank 0 tells, until another rank has it
families   small models over ranks beside one GPU: errors and bits
stack      decode and prefill of layers of 27B shape over ranks beside one GPU

  python bench/ranks.py [--ranks N] [--part NAME]...
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import torch

from deltaline_bench.ranks import serving
from deltaline_server.ranks.group import Group
from deltaline_server.ranks.launcher import launch
from deltaline_server.ranks.place import Place

# Seconds of each part, the start of its processes included.
PARTS: Mapping[str, int] = {"orders": 40, "sums": 75, "families": 110, "stack": 130, "serving": 240}


def main() -> int:
    """Measure; 1 where a check failed or a part did not end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--group", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        return _measure(asked.rank)
    if asked.group == "serving":
        return int(serving.measure(asked.ranks) > 0)
    if asked.group:
        return launch(asked.ranks, [sys.executable, __file__, "--rank", asked.group], os.environ)
    failed = []
    for part in asked.part or PARTS:
        command = [sys.executable, __file__, "--ranks", str(asked.ranks), "--group", part]
        print(f"{part}:", flush=True)
        try:
            code: object = subprocess.run(command, timeout=PARTS[part], check=False).returncode
        except subprocess.TimeoutExpired:  # which kills the launcher, and so its ranks
            code = f"no end within {PARTS[part]} s"
        if code:
            failed.append(f"{part} ({code})")
    print("failed: " + ", ".join(failed) if failed else "all checks hold", flush=True)
    return 1 if failed else 0


def _measure(part: str) -> int:
    """A rank's part of a measurement."""
    from deltaline_server.ranks.parent import end_with_parent

    end_with_parent()
    place = Place.find(os.environ)
    assert place is not None
    device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    code = 1
    try:
        group = Group(place, device)
        measure: Callable[[Group, torch.device], int] = import_module(f"deltaline_bench.ranks.{part}").measure
        with torch.inference_mode():
            code = int(measure(group, device) > 0)
    except Exception:
        print(f"rank {place.rank}: ", traceback.format_exc(), flush=True)
    sys.stdout.flush()
    os._exit(code)  # a rank that waits for one that has failed waits for ever


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]
    sys.exit(main())
