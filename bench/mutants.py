"""Mutants of the server: small changes of its code, each run against the tests of its own room; survivors are printed.

    python bench/mutants.py --count 60 --seed 1
    python bench/mutants.py --count 60 --seed 1 --skip 25   # when the first 25 are done

The mutants are cosmic-ray's: an operator, a comparison, a number, a constant or a keyword replaced, a loop left out. Of
all that there are in the rooms a sample is drawn from the seed. Nothing is changed in place: every worker has a copy of
the repository. A survivor is a missing test, or computes the same; which of them is for a reader to say.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("front", "scheduling", "tables")
COPIED = ("proto", "kernels", "server", "client", "bench", "tests", "docs", "pyproject.toml")
# A mutant that runs so many times as long as the tests do, and so many seconds, is caught.
PATIENCE, PATIENCE_S = 5, 30.0


def mutants_of(path: Path) -> Iterator[MutationSpec]:
    """Every mutant of a module; annotations are not changed, since nothing evaluates them."""
    tree, hints = get_ast_from_path(path), list(annotations_in(path))
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments() or name.endswith("/NoOp"):
            continue
        changes = ((begin, end) for node in ast_nodes(tree) for begin, end in operator().mutation_positions(node))
        for occurrence, (begin, end) in enumerate(changes):
            if not any(first <= begin < last for first, last in hints):
                yield MutationSpec(path, name, occurrence, begin, end)


def annotations_in(path: Path) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a module's annotations begin and end: lines from 1, columns from 0."""
    for node in ast.walk(ast.parse(path.read_text())):
        for hint in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(hint, ast.expr):
                assert hint.end_lineno is not None and hint.end_col_offset is not None
                yield (hint.lineno, hint.col_offset), (hint.end_lineno, hint.end_col_offset)


def drawn(rooms: list[str], count: int, seed: int) -> list[tuple[str, MutationSpec]]:
    """A sample of the rooms' mutants, the same for the same code and seed."""
    found = [
        (room, mutant)
        for room in rooms
        for path in sorted((ROOT / "server/deltaline_server" / room).rglob("*.py"))
        for mutant in mutants_of(path)
    ]
    print(f"{len(found)} mutants in {', '.join(rooms)}; {min(count, len(found))} drawn from seed {seed}", flush=True)
    return random.Random(seed).sample(found, min(count, len(found)))


def make_copy(folder: Path) -> Path:
    """Copy what the tests need; return the folder."""
    for name in COPIED:
        copy: Any = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def tests_of(room: str, copy: Path, module: Path | None = None) -> list[str]:
    """The command that runs a room's tests on a copy, whose packages the processes that they start import too.

    module: in the copy; the tests nearest to it run first, since they see most of what is wrong with it.
    """
    packages = ":".join(str(copy / name) for name in ("proto", "kernels", "server", "client", "bench"))
    options = ("-x", "-q", "-p", "no:cacheprovider", "-n", "0", "-c", str(copy / "pyproject.toml"))
    tests, files = copy / "tests/server", sorted((copy / "tests/server" / room).rglob("test_*.py"))
    if module is not None:
        mirror = tests / module.relative_to(copy / "server/deltaline_server").with_name(f"test_{module.name}")
        files.sort(key=lambda path: (path != mirror, path.parent != mirror.parent))
    return ["env", f"PYTHONPATH={packages}", sys.executable, "-m", "pytest", *options, *map(str, files)]


def timed(room: str, copy: Path) -> float:
    """Seconds that a room's tests take as they are. Exits where they fail."""
    began_s = time.monotonic()
    done = subprocess.run(tests_of(room, copy), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the tests of {room} fail without a mutant:\n{done.stdout[-2000:]}")
    return time.monotonic() - began_s


def main() -> int:
    """Run the sample and print what became of each and how many of each room were caught; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="mutants to draw [%(default)s]")
    parser.add_argument(
        "--skip", type=int, default=0, help="of them, the first, which an earlier run tried [%(default)s]"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample [%(default)s]")
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS), help="of the server [all three]")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="copies of the tree [one per core]")
    options = parser.parse_args()
    caught, run = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.workers) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.workers):
            free.put(make_copy(Path(scratch, str(number))))
        first = Path(scratch, "0")
        limits_s = {room: PATIENCE_S + PATIENCE * timed(room, first) for room in options.rooms}

        def judge(room: str, mutant: MutationSpec) -> str:
            """Run one: its change, or nothing where it was caught."""
            copy = free.get()
            place = copy / mutant.module_path.relative_to(ROOT)
            placed = MutationSpec(place, mutant.operator_name, mutant.occurrence, mutant.start_pos, mutant.end_pos)
            result = mutate_and_test([placed], " ".join(tests_of(room, copy, place)), limits_s[room])
            free.put(copy)
            is_caught = result.test_outcome is TestOutcome.KILLED
            return "" if is_caught else f"{result.diff or result.output}\n".replace(f"{copy}/", "")

        sample = drawn(options.rooms, options.count, options.seed)[options.skip :]
        told = pool.map(judge, *zip(*sample, strict=True))
        try:
            for number, ((room, mutant), change) in enumerate(zip(sample, told, strict=True), options.skip):
                run[room] += 1
                caught[room] += not change
                place = f"{mutant.module_path.relative_to(ROOT)}:{mutant.start_pos[0]}"
                print(number, "survived" if change else "caught", mutant.operator_name, place, flush=True)
                print(end=change, flush=True)
        finally:  # --skip goes on behind an interrupted run
            for room in options.rooms:
                print(f"{room}: {caught[room]} of {run[room]} were caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
