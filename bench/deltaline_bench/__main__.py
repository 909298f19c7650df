"""The command: `python -m deltaline_bench SUITE` measures, or `all` of the suites, one after the other, each in a
process of its own; `python -m deltaline_bench report FILE.json` reports again; `python -m deltaline_bench figures`
writes what the pages tell of the records under bench/results.

Exit status: 0 all bars met, 1 a needed bar missed or a side of ours wrong, 2 bad usage or no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from deltaline_bench.current.files import write_current
from deltaline_bench.plot import PlotUnavailable, write_plot
from deltaline_bench.record import PARTIAL, RunRecord
from deltaline_bench.report import summary, write_report

if TYPE_CHECKING:
    from deltaline_bench.case import Suite

# Each is a package of deltaline_bench, whose `cases` have a SUITE.
SUITES = ("attention", "conv1d", "gated_delta", "kda", "lora", "mamba1", "mamba2", "mhc", "moe")
ALL = "all"
NAME = "deltaline_bench"
ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in (*SUITES, ALL):
        command = commands.add_parser(name, help=f"measure {name}")
        if name != ALL:
            command.add_argument("--case", action="append", metavar="NAME", help="measure this case; may be repeated")
        command.add_argument("--output", type=Path, metavar="DIR", help="write JSON, table and plot into DIR")
        command.add_argument("--peers", type=Path, metavar="DIR", help="sources of peers beside their peer_loader.py")
        command.add_argument("--rounds", type=int, default=100, help="timed rounds (default 100)")
    command = commands.add_parser("report", help="write the table and the plot beside a JSON file")
    command.add_argument("file", type=Path, metavar="FILE.json")
    commands.add_parser("figures", help="write docs/figures.md, its picture and the README's table from bench/results")
    options = parser.parse_args(arguments)
    if options.command == ALL:
        return _measure_all(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.command == "figures":
            write_current(ROOT)
            return 0
        return _report(options.file) if options.command == "report" else _measure(options)
    except (OSError, ValueError) as error:
        return _refuse(str(error))


def _measure_all(arguments: Sequence[str]) -> int:
    """Measure every suite, whatever becomes of those before it; return the worst exit status."""
    statuses = []
    for name in SUITES:
        print(f"\n{name}", flush=True)
        command = [sys.executable, "-m", NAME, name, *arguments[1:]]
        statuses.append(subprocess.run(command, check=False).returncode)
    return max(statuses, key=abs)


def _measure(options: argparse.Namespace) -> int:
    """Measure a suite, case by case, and report."""
    # Here: a report is written without torch, and refused devices without Triton.
    import torch

    if options.rounds < 1:
        return _refuse(f"--rounds: expected at least 1, got {options.rounds}")
    if not torch.cuda.is_available():
        return _refuse("needs a CUDA device; torch finds none")

    from deltaline_bench.ceilings import measure_ceilings
    from deltaline_bench.cuda_timer import CudaTimer
    from deltaline_bench.device import describe_device
    from deltaline_bench.measurement import measure_case
    from deltaline_bench.peers import Peers

    suite: Suite = importlib.import_module(f"deltaline_bench.{options.command}.cases").SUITE
    names = options.case or list(suite.cases)
    unknown = [name for name in names if name not in suite.cases]
    if unknown:
        return _refuse(f"--case: expected names among {', '.join(suite.cases)}; got {', '.join(unknown)}")
    is_whole = set(names) == set(suite.cases)
    device = torch.device("cuda", torch.cuda.current_device())
    peers = Peers(options.peers)
    with torch.no_grad():
        timer = CudaTimer()
        ceilings = measure_ceilings(timer, device, options.rounds)
        run = RunRecord(
            suite=suite.name,
            date=datetime.now(UTC).date().isoformat(),
            rounds=options.rounds,
            device=describe_device(device),
            peers=dict(peers.versions),
            floor_us=ceilings.floor_us,
            copy_bytes_per_s=ceilings.copy_bytes_per_s,
            read_bytes_per_s=ceilings.read_bytes_per_s,
            cases=(),
        )
        print(
            f"{run.device['name']}: floor {run.floor_us:.2f} us, copy {run.copy_bytes_per_s / 1e12:.3f} TB/s, "
            f"read {run.read_bytes_per_s / 1e12:.3f} TB/s",
            flush=True,
        )
        for name in names:
            case = suite.cases[name](device, peers)
            record = measure_case(case, timer, ceilings.copy_bytes_per_s, options.rounds)
            del case
            run = replace(run, cases=(*run.cases, record), peers=dict(peers.versions))
            print(summary(record), flush=True)
            if options.output is not None:
                _json_path(run, options.output, is_whole).write_text(run.to_json(), encoding="utf-8")
    print("\n" + write_report(run))
    if options.output is not None:
        _write_beside(run, _json_path(run, options.output, is_whole))
    return 1 if run.failures() else 0


def _json_path(run: RunRecord, directory: Path, is_whole: bool) -> Path:
    """Name the file of a run, so that a few cases never replace all of them; makes the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{run.file_stem}{'' if is_whole else PARTIAL}.json"


def _report(path: Path) -> int:
    """Write the table and the plot of a kept run again."""
    run = RunRecord.from_json(path.read_text(encoding="utf-8"))
    print(write_report(run))
    _write_beside(run, path)
    return 0


def _write_beside(run: RunRecord, path: Path) -> None:
    """Write the table and, with matplotlib, the plot beside the JSON file."""
    path.with_suffix(".md").write_text(write_report(run), encoding="utf-8")
    try:
        write_plot(run, path.with_suffix(".svg"))
    except PlotUnavailable as reason:
        print(f"{NAME}: {reason}", file=sys.stderr)


def _refuse(why: str) -> int:
    print(f"{NAME}: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
