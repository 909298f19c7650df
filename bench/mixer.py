"""One Gated DeltaNet mixer on the CPU beside transformers' torch path, on the same weights.

Both are timed in turns in this run; medians are reported, with the projections alone in between as the floor that plain
torch.nn.functional.linear sets. The outputs are compared first.

    python bench/mixer.py [--rounds N] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM

from deltaline_bench.device import describe_cpu, provenance
from deltaline_kernels import Rows
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.config import Scope
from deltaline_server.models.model import Model, ModelOptions, load_model

HIDDEN, HEADS, HEAD_DIM = 1024, 16, 64
DECODE_ROWS, PREFILL_TOKENS = 16, 2048
MAX_DRAFT = 8
# How many times faster than transformers the mixer is to be, and how far their outputs may differ (relative norm).
BARS = {"decode": 1.5, "prefill": 1.8}
MAX_ERROR = 1e-4


def write_checkpoint(directory: Path) -> Any:
    """Write a one-layer checkpoint; return transformers' model."""
    config = transformers.Qwen3NextConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        num_experts=0,
        mlp_only_layers=[0],
    )
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(config).float().eval()
    model.save_pretrained(directory)
    return model


def medians(rounds: int, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each call, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn >= 3:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def bench_mixer(oracle: Any, model: Model, rounds: int) -> dict[str, dict[str, float]]:
    """Decode of 16 sequences and prefill of 2,048 tokens: transformers, ours, and the projections alone (the floor)."""
    mixer = oracle.model.layers[0].linear_attn
    pool = model.make_pool(StateOptions(num_lines=DECODE_ROWS, max_draft=MAX_DRAFT))
    lines = list(range(1, DECODE_ROWS + 1))

    def rows(lengths: list[int], read: list[int]) -> Rows:
        zeros = [0] * len(lengths)
        write = list(range(1, len(lengths) + 1))
        return Rows.build(lengths, read, write, lengths, zeros, zeros, max_short=MAX_DRAFT, device=model.device)

    def projections(hidden: torch.Tensor) -> None:
        F.linear(hidden, mixer.in_proj_qkvz.weight)
        F.linear(hidden, mixer.in_proj_ba.weight)
        F.linear(hidden[..., : HEADS * HEAD_DIM], mixer.out_proj.weight)

    with torch.inference_mode():
        prompt = torch.randn(DECODE_ROWS, 8, HIDDEN)
        cache = transformers.DynamicCache(config=oracle.config)
        mixer(prompt, cache_params=cache)
        model.forward(0, prompt.reshape(-1, HIDDEN), rows([8] * DECODE_ROWS, [0] * DECODE_ROWS), pool)
        token, long = torch.randn(DECODE_ROWS, 1, HIDDEN), torch.randn(1, PREFILL_TOKENS, HIDDEN)
        flat = token[:, 0].contiguous()
        expected = mixer(token, cache_params=cache)[:, 0]
        actual = model.forward(0, flat, rows([1] * DECODE_ROWS, lines), pool)
        decode_error = float((actual - expected).norm() / expected.norm())
        expected = mixer(long)[0]
        actual = model.forward(0, long[0], rows([PREFILL_TOKENS], [0]), pool)
        prefill_error = float((actual - expected).norm() / expected.norm())
        decode_rows, prefill_rows = rows([1] * DECODE_ROWS, lines), rows([PREFILL_TOKENS], [0])
        decode = medians(
            rounds,
            {
                "transformers": lambda: mixer(token, cache_params=cache),
                "deltaline": lambda: model.forward(0, flat, decode_rows, pool),
                "projections": lambda: projections(flat),
            },
        )
        prefill = medians(
            max(5, rounds // 10),
            {
                "transformers": lambda: mixer(long),
                "deltaline": lambda: model.forward(0, long[0], prefill_rows, pool),
                "projections": lambda: projections(long[0]),
            },
        )
    return {"decode": decode | {"error": decode_error}, "prefill": prefill | {"error": prefill_error}}


def main() -> int:
    """Run, print the table, and return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150, help="decode calls of each side (default 150)")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print("writing a checkpoint of one layer ...", flush=True)
        oracle = write_checkpoint(Path(name))
        model = load_model(ModelOptions(torch.device("cpu"), model=Path(name), scope=Scope.MIXER))
    print("timing the mixer beside transformers ...", flush=True)
    times = bench_mixer(oracle, model, arguments.rounds)
    machine = f"{describe_cpu()}, {torch.get_num_threads()} threads"
    print(f"\n{machine}\none mixer, hidden {HIDDEN}, {HEADS}/{HEADS} heads of {HEAD_DIM}, fp32")
    print(f"{'':26}{'transformers':>14}{'deltaline':>12}{'projections':>13}{'ratio':>8}{'bar':>8}{'error':>10}")
    ratios = {}
    labels = {"decode": f"decode, {DECODE_ROWS} sequences", "prefill": f"prefill, {PREFILL_TOKENS} tokens"}
    for name, label in labels.items():
        row = times[name]
        ratios[name] = row["transformers"] / row["deltaline"]
        print(
            f"{label:26}{row['transformers']:>11.2f} ms{row['deltaline']:>9.2f} ms{row['projections']:>10.2f} ms"
            f"{ratios[name]:>7.2f}x{BARS[name]:>7.1f}x{row['error']:>10.1e}"
        )
    if arguments.output:
        record = provenance(machine, torch, transformers) | {"milliseconds": times, "ratios": ratios}
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    right = all(row["error"] <= MAX_ERROR for row in times.values())
    return 0 if right and all(ratios[name] >= bar for name, bar in BARS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
