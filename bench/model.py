"""A whole model on this device: decodes and a prefill beside the bytes that they must move and their products alone.

SHAPE is 27b (Qwen3.5 of 27 billion parameters), 35b-a3b (Qwen3.5-35B-A3B), one of these with -fp8 behind it, whose
weights are in FP8, the path of a config.json, whose weights are drawn, or of a model directory. Model, state and graphs
are built as a server builds them. Computation is the time between the engine's own events around it. Bytes are all
weights once (of experts those that are touched, on average, if tokens choose evenly), the states of the rows in and
out, and the keys and values of one page a row; their time is that of a copy of as many bytes in the same run. Products
alone are torch's, one after the other in one graph, with weights of their own, which are gone before the model comes.
Times are medians.

With --random-steps N nothing is measured by itself: a whole server of the same sizes starts in this process, kernels
tested and all graphs captured, and a client makes N steps of it: prefills, decodes and verifies of random rows and
lengths, with commits, and sequences that come and go. Every row must be answered, all outputs must be finite, and
nothing may compile, be captured or be allocated on the device once the server is ready.

    python bench/model.py 27b [--rows 1,16,64,256] [--tokens 8192] [--layers N] [--all-graphs] [--profile N]...
                              [--output DIR]
    python bench/model.py 27b --random-steps 1000 [--seed N] [--rows 64] [--tokens 2048] [--layers N]

Exit status: 0 all bars met, or the device is none that they are for; 1 a bar missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from deltaline_bench.device import name_device, provenance
from deltaline_bench.model.figures import Decode, Prefill, Run, judge, write_plot, write_table
from deltaline_bench.model.served import ServedModel
from deltaline_bench.model.shapes import Shape
from deltaline_bench.model.walk import walk
from deltaline_bench.model.work import Work
from deltaline_bench.plot import PlotUnavailable
from deltaline_bench.service.random_steps import WrongAnswerError
from deltaline_client import DeltalineError
from deltaline_server.app import StartError
from deltaline_server.batch import StepBatch
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.config import ConfigError
from deltaline_server.log import Progress
from deltaline_server.models.config import ModelConfig

JUDGED_DEVICE = "H200"
ROUNDS, PREFILL_ROUNDS = 50, 5


def measure_limits(work: Work, dtype: torch.dtype, sizes: Sequence[int]) -> tuple[float, dict[int, float]]:
    """The bandwidth of a copy, bytes per second, and the milliseconds of a model's products for so many tokens."""
    from deltaline_bench.ceilings import measure_ceilings  # these need triton
    from deltaline_bench.cuda_timer import CudaTimer
    from deltaline_bench.model.products import Products

    device, timer = torch.device("cuda"), CudaTimer()
    with torch.no_grad():
        copy_bytes_per_s = measure_ceilings(timer, device, ROUNDS).copy_bytes_per_s
        products = Products(work, dtype, device)
        rounds = {size: PREFILL_ROUNDS if size == max(sizes) else ROUNDS for size in sizes}
        return copy_bytes_per_s, {
            size: products.measure(size, timer, rounds[size]).median_us / 1e3 for size in dict.fromkeys(sizes)
        }


def run(shape: Shape, rows: Sequence[int], tokens: int, *, all_graphs: bool, profiled: Sequence[int]) -> Run:
    """Measure a model, and print where the time of some batches goes. Raises ModelError.

    profiled: those, by their rows, or the prefill by its tokens.
    """
    config = ModelConfig.from_file(shape.config_path)
    dtype = getattr(torch, config.dtype or "float32")
    work, has_gpu = Work(config, dtype.itemsize, shape.num_layers), torch.cuda.is_available()
    copy_bytes_per_s, products_ms = None, dict[int, float]()
    progress = Progress()
    if has_gpu:
        print("products alone ...", file=sys.stderr, flush=True)
        copy_bytes_per_s, products_ms = measure_limits(work, dtype, [*rows, tokens])
        gc.collect()
        torch.cuda.empty_cache()
    print("the model ...", file=sys.stderr, flush=True)
    served = ServedModel.build(shape, rows, tokens, progress, all_graphs=all_graphs)
    print("batches ...", file=sys.stderr, flush=True)
    compute_ms = {count: served.measure(served.decode(count), ROUNDS) * 1e3 for count in rows}
    prefill_ms = served.measure(served.prefill(tokens), PREFILL_ROUNDS) * 1e3
    for count in profiled:
        is_prefill = count == tokens
        batch = served.prefill(count) if is_prefill else served.decode(count)
        print_profile(served, f"{count} {'tokens' if is_prefill else 'rows'}", batch)
    decodes = []
    for count in rows:
        num_bytes = work.decode_bytes(count, served.context)
        bytes_ms = num_bytes / copy_bytes_per_s * 1e3 if copy_bytes_per_s else None
        decodes.append(Decode(count, compute_ms[count], num_bytes, bytes_ms, products_ms.get(count)))
    served.executor.close()
    return Run(
        shape=shape.name,
        device=name_device(torch.device("cuda" if has_gpu else "cpu")),
        date=datetime.now(UTC).date().isoformat(),
        context=served.context,
        decodes=tuple(decodes),
        prefill=Prefill(tokens, prefill_ms, work.flops(tokens), products_ms.get(tokens)),
        stages=progress.seconds,
        is_whole=all_graphs,
        is_drawn=not shape.is_checkpoint,
        copy_bytes_per_s=copy_bytes_per_s,
    )


def print_profile(served: ServedModel, what: str, batch: StepBatch) -> None:
    """Print where the time of a batch goes."""
    from deltaline_bench.model.profile import trace, write_profile

    print(f"{what}, by kernel:\n{write_profile(trace(lambda: served.compute(batch)))}\n", flush=True)


def report(result: Run, shape: Shape, output: Path | None) -> int:
    """Print tables and bars, and write the record; return 1 where a bar is missed that counts on this device."""
    print(write_table(result))
    verdicts = list(judge(result, shape.bars)) if JUDGED_DEVICE in result.device else []
    for verdict in verdicts:
        print(verdict)
    if output is not None:
        write_record(result, [str(verdict) for verdict in verdicts], output)
    return int(any(not verdict.is_met and not verdict.is_aim for verdict in verdicts))


def write_record(result: Run, verdicts: Sequence[str], folder: Path) -> None:
    """Write JSON, table and, with matplotlib, the plot into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub("[^a-z0-9]+", "-", result.device.lower().removeprefix("nvidia ")).strip("-")
    path = folder / f"{result.date}-{device}-model-{result.shape}.json"
    record = provenance(result.device, torch) | {"run": result.to_json(), "verdicts": list(verdicts)}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".txt").write_text("\n".join((write_table(result), *verdicts)) + "\n", encoding="utf-8")
    try:
        write_plot(result, path.with_suffix(".svg"))
    except PlotUnavailable as reason:
        print(f"model bench: {reason}", file=sys.stderr)


def positive(text: str) -> int:
    """A number of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def row_counts(text: str) -> list[int]:
    """Numbers of rows, separated by commas."""
    return [positive(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; 0 when every bar is met, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "shape", metavar="SHAPE", help="27b, 35b-a3b, 27b-fp8, 35b-a3b-fp8, a config.json or a model directory"
    )
    parser.add_argument(
        "--rows", type=row_counts, default=[1, 16, 64, 256], help="rows of decodes (default 1,16,64,256)"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the prefill (default 8192)")
    parser.add_argument("--layers", type=positive, metavar="N", help="the first N layers alone, without bars")
    text = "capture all graphs that a server of these sizes has, and judge the time until it is ready"
    parser.add_argument("--all-graphs", action="store_true", help=text)
    text = "print where the time of a decode of N rows goes, or of the prefill of N tokens, by kernel; needs a GPU"
    parser.add_argument("--profile", type=int, action="append", default=[], metavar="N", help=text)
    parser.add_argument("--output", type=Path, metavar="DIR", help="write JSON, table and plot into DIR")
    text = (
        "serve N random steps instead, of up to the most of --rows and with prefills of up to --tokens, and judge them"
    )
    parser.add_argument("--random-steps", type=positive, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random steps (default 0)")
    options = parser.parse_args(arguments)
    if options.random_steps and (options.profile or options.output):
        parser.error("--random-steps: expected neither --profile nor --output beside it")
    known = [*options.rows, options.tokens]
    if options.profile and not (set(options.profile) <= set(known) and torch.cuda.is_available()):
        parser.error(f"--profile: expected numbers among {known} and a GPU, got {options.profile}")
    with tempfile.TemporaryDirectory(prefix="deltaline-bench-") as folder:
        try:
            shape = Shape.find(options.shape, Path(folder), options.layers)
            if options.random_steps:
                steps = walk(shape, options.rows, options.tokens, options.random_steps, options.seed)
                print(steps)
                return int(not steps.is_steady)
            result = run(shape, options.rows, options.tokens, all_graphs=options.all_graphs, profiled=options.profile)
        except (ConfigError, ModelError, StartError, WrongAnswerError, DeltalineError) as error:
            print(f"model bench: error: {error}", file=sys.stderr)
            return 1
    return report(result, shape, options.output)


if __name__ == "__main__":
    sys.exit(main())
