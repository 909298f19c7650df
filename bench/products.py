"""The products of a model's layers with few rows: every algorithm that cuBLASLt offers, beside torch's own choice.

SHAPE is 27b, 35b-a3b or the path of a config.json, as for bench/model.py. Times are medians of graphs that multiply by
several weights one behind the other, more than the L2 holds, with a small launch between. With --write those that beat
torch's by more than 1.5% become the table of kernels/deltaline_kernels/linear, in place of what it has.

With --ranks N also those of a rank's share among so many.

    python bench/products.py SHAPE... [--rows 1,2,4,8,16,32,64,128,256] [--ranks N]... [--write]

Exit status: 0; 2 without a Hopper GPU or with a SHAPE that is none.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from deltaline_bench.device import name_device
from deltaline_bench.model.shapes import Shape
from deltaline_bench.model.work import Work
from deltaline_kernels.linear import fastest
from deltaline_kernels.linear.cublaslt import Problem, library_of
from deltaline_kernels.linear.plan import Offer
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.models.config import ModelConfig

ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
CHAIN_BYTES, ROUNDS, WON = 400_000_000, 9, 0.985
TABLE = Path(fastest.__file__)


def main() -> int:
    """Measure and print; write the table if told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", metavar="SHAPE")
    parser.add_argument("--rows", type=numbers, default=ROWS, help="numbers of rows (default: those of graphs)")
    text = "also the products of one of N ranks"
    parser.add_argument("--ranks", type=int, action="append", default=[1], metavar="N", help=text)
    parser.add_argument("--write", action="store_true", help="make the fastest ones those that are chosen")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("products: expected a Hopper GPU, which the table is for, got none", file=sys.stderr)
        return 2
    try:
        sizes = sorted({size for name in args.shapes for ranks in args.ranks for size in sizes_of(name, ranks)})
    except (ModelError, OSError, ValueError) as error:
        print(f"products: {error}", file=sys.stderr)
        return 2
    table: dict[tuple[int, int, int], Offer] = {}
    for num_rows in args.rows:
        for outputs, inputs in sizes:
            found = measure(num_rows, outputs, inputs)
            if found is not None:
                table[num_rows, outputs, inputs] = found
    if args.write:
        write(table)
    return 0


def numbers(text: str) -> list[int]:
    """Parse numbers with commas between."""
    return [int(one) for one in text.split(",")]


def sizes_of(name: str, world_size: int = 1) -> set[tuple[int, int]]:
    """Return outputs and inputs of each product that all tokens have, of one of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig.from_file(Shape.find(name, Path(folder)).config_path)
    return {size for layer in Work(config, itemsize=2).layers(world_size) for size in layer.dense}


@torch.inference_mode()
def measure(num_rows: int, outputs: int, inputs: int) -> Offer | None:
    """Print how long a product takes by each algorithm; return the fastest if it is worth a line of the table."""
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    weight_bytes = 2 * outputs * inputs
    weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(2 + CHAIN_BYTES // weight_bytes)]
    x, small = torch.randn(num_rows, inputs, device=device, dtype=dtype), torch.zeros(64, device=device)
    library = library_of(device)
    assert library is not None, "torch has brought no cuBLASLt"
    problem = Problem(library, num_rows, outputs, inputs, inputs)

    def chain(multiply: Callable[[Any, Any], Any]) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                multiply(x, weight)
                small.add_(1.0)

        return run

    products = [problem.product(i) for i in range(len(problem.offers))]
    graphs = [captured(chain(F.linear)), *(captured(chain(one.multiply)) for one in products)]
    torchs, *times = [time / len(weights) for time in times_in_turns(graphs)]
    # An offer is found again by its tile and splits: of several alike the first.
    known = dict(reversed(list(zip(problem.offers, times, strict=True))))
    fastest_first = sorted(known, key=known.__getitem__)
    told = ", ".join(f"{known[one]:.2f} tile {one.tile} splits {one.splits}" for one in fastest_first[:4])
    best = fastest_first[0]
    rate = weight_bytes / known[best] / 1e6
    print(f"{num_rows:4} x {outputs} x {inputs}: torch {torchs:.2f} us; {told}; {rate:.2f} TB/s", flush=True)
    return best if known[best] < WON * torchs else None


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a graph of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    return graph


def times_in_turns(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    """Return the median time of each graph, us."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for own, graph in zip(times, graphs, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            own.append(1e3 * begin.elapsed_time(end))
    return [statistics.median(own) for own in times]


def write(table: Mapping[tuple[int, int, int], tuple[int, int]]) -> None:
    """Write the table as a module."""
    head, _, _ = TABLE.read_text().partition("\n# ")
    lines = [f"    {key}: {tuple(table[key])},\n" for key in sorted(table)]
    device = name_device(torch.device("cuda"))
    where = f"# {device}, torch {torch.__version__}: those that were faster by more than 1.5% than torch's.\n"
    kind = "FASTEST: dict[tuple[int, int, int], tuple[int, int]] = {\n"
    TABLE.write_text(head + "\n" + where + kind + "".join(lines) + "}\n")


if __name__ == "__main__":
    sys.exit(main())
