"""The service on the CPU: one mixer beside transformers' torch path, and a step beside a bare gRPC echo.

Both sides of a ratio are timed in this run, on this machine, in turns, on the same weights and bytes; medians are
reported. What a step costs besides its layer is the wall time of the client's call less the compute time that the
reply tells.

    python bench/cpu.py [--rounds N] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM

from deltaline_client import AsyncClient, Row
from deltaline_kernels import Rows
from deltaline_server.app import Server
from deltaline_server.config import Config
from deltaline_server.model import Model, ModelOptions, load_model
from deltaline_server.model_config import Scope
from deltaline_server.state_pool import StateOptions

HIDDEN, HEADS, HEAD_DIM = 1024, 16, 64
DECODE_ROWS, PREFILL_TOKENS, STEP_ROWS = 16, 2048, 64
MAX_DRAFT = 8
# The bars of this benchmark: how much faster the mixer is than transformers', and a step's overhead in echoes.
DECODE_BAR, PREFILL_BAR, OVERHEAD_BAR = 1.5, 1.8, 2.0


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
    pool = model.make_pool(StateOptions(num_lines=STEP_ROWS, max_draft=MAX_DRAFT))
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


async def _serve(directory: str, pipe: Connection) -> None:
    config = Config(
        model=directory,
        scope="mixer",
        device="cpu",
        port=0,
        metrics_port=-1,
        max_sequences=STEP_ROWS,
        log_level="warning",
    )
    async with Server(config) as server:
        reply = bytes(STEP_ROWS * HIDDEN * 4 + 1024)

        async def echo(request: bytes, context: object) -> bytes:
            return reply[: len(request)]

        bare = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 26), ("grpc.so_reuseport", 0)])
        handler: Any = grpc.unary_unary_rpc_method_handler(echo)
        bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", {"Echo": handler}),))
        port = bare.add_insecure_port("127.0.0.1:0")
        await bare.start()
        pipe.send((server.address, f"127.0.0.1:{port}"))
        await asyncio.to_thread(pipe.recv)
        await bare.stop(None)


def serve(directory: str, pipe: Connection) -> None:
    """A process with the server, and with a bare echo beside it."""
    asyncio.run(_serve(directory, pipe))


async def _bench_overhead(address: str, echo_address: str, rounds: int) -> dict[str, float]:
    options = [("grpc.max_receive_message_length", 1 << 26), ("grpc.max_send_message_length", 1 << 26)]
    hidden = np.random.default_rng(0).standard_normal((STEP_ROWS, HIDDEN)).astype(np.float32)
    payload = bytes(hidden.nbytes + 64 * STEP_ROWS)
    echoes: list[float] = []
    walls: list[float] = []
    computes: list[float] = []
    async with AsyncClient(address) as client, grpc.aio.insecure_channel(echo_address, options=options) as channel:
        echo: Any = channel.unary_unary("/bare.Echo/Echo")
        sequences = await client.open_many(STEP_ROWS)
        for turn in range(rounds + 10):
            begin = time.perf_counter()
            await echo(payload)
            middle = time.perf_counter()
            result = await client.step([Row.decode(s, h) for s, h in zip(sequences, hidden, strict=True)])
            end = time.perf_counter()
            if turn >= 10 and result.timing is not None:
                echoes.append((middle - begin) * 1e3)
                walls.append((end - middle) * 1e3)
                computes.append(result.timing.compute_s * 1e3)
        await client.close(sequences)
    overheads = [wall - compute for wall, compute in zip(walls, computes, strict=True)]
    return {
        "echo": statistics.median(echoes),
        "step": statistics.median(walls),
        "layer": statistics.median(computes),
        "overhead": statistics.median(overheads),
    }


def bench_overhead(directory: Path, rounds: int) -> dict[str, float]:
    """A decode step of 64 rows through the client and the server, less its layer; and a bare echo of the same bytes."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(str(directory), theirs))
    process.start()
    try:
        address, echo_address = mine.recv()
        return asyncio.run(_bench_overhead(address, echo_address, rounds))
    finally:
        mine.send(None)
        process.join()


def main() -> int:
    """Run, print the table, and return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="calls of each side, at least (default 200)")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        print("writing a checkpoint of one layer ...", flush=True)
        oracle = write_checkpoint(directory)
        model = load_model(ModelOptions(torch.device("cpu"), model=directory, scope=Scope.MIXER))
        print("timing the mixer beside transformers ...", flush=True)
        mixer = bench_mixer(oracle, model, arguments.rounds)
        print("timing steps beside a bare echo ...", flush=True)
        overhead = bench_overhead(directory, arguments.rounds)
    ratios = {
        "decode": mixer["decode"]["transformers"] / mixer["decode"]["deltaline"],
        "prefill": mixer["prefill"]["transformers"] / mixer["prefill"]["deltaline"],
        "overhead": overhead["overhead"] / overhead["echo"],
    }
    met = {
        "decode": ratios["decode"] >= DECODE_BAR,
        "prefill": ratios["prefill"] >= PREFILL_BAR,
        "overhead": ratios["overhead"] <= OVERHEAD_BAR,
    }
    print(f"\none mixer, hidden {HIDDEN}, {HEADS}/{HEADS} heads of {HEAD_DIM}, fp32, {torch.get_num_threads()} threads")
    print(f"{'':26}{'transformers':>14}{'deltaline':>12}{'floor':>10}{'ratio':>8}{'bar':>8}{'error':>10}")
    for name, label, bar in (
        ("decode", f"decode, {DECODE_ROWS} sequences", DECODE_BAR),
        ("prefill", f"prefill, {PREFILL_TOKENS} tokens", PREFILL_BAR),
    ):
        row = mixer[name]
        print(
            f"{label:26}{row['transformers']:>11.2f} ms{row['deltaline']:>9.2f} ms{row['projections']:>7.2f} ms"
            f"{ratios[name]:>7.2f}x{bar:>7.1f}x{row['error']:>10.1e}"
        )
    kibibytes = STEP_ROWS * HIDDEN * 4 // 1024
    print(f"\na decode step of {STEP_ROWS} rows, {kibibytes} KiB each way, client and server on this machine")
    print(f"{'bare echo':>14}{'whole step':>14}{'its layer':>14}{'overhead':>14}{'in echoes':>12}{'bar':>8}")
    print(
        f"{overhead['echo']:>11.2f} ms{overhead['step']:>11.2f} ms{overhead['layer']:>11.2f} ms"
        f"{overhead['overhead']:>11.2f} ms{ratios['overhead']:>11.2f}x{OVERHEAD_BAR:>7.1f}x"
    )
    if arguments.output:
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "grpcio": grpc.__version__,
        }
        record = {
            "command": "python " + " ".join(sys.argv),
            "date": datetime.now(UTC).date().isoformat(),
            "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
            "versions": versions,
            "milliseconds": mixer | {"step": overhead},
            "ratios": ratios,
        }
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    for name, is_met in met.items():
        if not is_met:
            print(f"{name}: the bar is missed", file=sys.stderr)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
