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
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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

from deltaline import wire
from deltaline.v1 import layer_service_pb2
from deltaline_client import AsyncClient, AsyncSequence, Row
from deltaline_kernels import Rows
from deltaline_server.app import Server
from deltaline_server.config import Config
from deltaline_server.model import Model, ModelOptions, load_model
from deltaline_server.model_config import Scope
from deltaline_server.state_pool import StateOptions

HIDDEN, HEADS, HEAD_DIM = 1024, 16, 64
DECODE_ROWS, PREFILL_TOKENS, STEP_ROWS = 16, 2048, 64
MAX_DRAFT = 8
OPTIONS = [(f"grpc.max_{way}_message_length", 1 << 26) for way in ("send", "receive")]
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


def layer_work(server: Server) -> Callable[[], float]:
    """A decode step of the served layer on state of its own; returns the seconds that it took."""
    model = server.runtime.model
    pool = model.make_pool(StateOptions(num_lines=STEP_ROWS, max_draft=MAX_DRAFT))
    lines, ones, zeros = list(range(1, STEP_ROWS + 1)), [1] * STEP_ROWS, [0] * STEP_ROWS
    rows = Rows.build(ones, lines, lines, ones, zeros, zeros, max_short=MAX_DRAFT, device=model.device)
    hidden = torch.randn(STEP_ROWS, HIDDEN)

    def work() -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            model.forward(0, hidden, rows, pool)
        return time.perf_counter() - begin

    return work


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
        work, device_thread = layer_work(server), ThreadPoolExecutor(1)

        async def echo(request: bytes, context: object) -> bytes:
            return request

        async def echo_with_layer(request: bytes, context: object) -> bytes:
            seconds = await asyncio.get_running_loop().run_in_executor(device_thread, work)
            return struct.pack("d", seconds) + request[8:]

        bare = grpc.aio.server(options=OPTIONS)
        handlers: dict[str, Any] = {
            "Echo": grpc.unary_unary_rpc_method_handler(echo),
            "EchoWithLayer": grpc.unary_unary_rpc_method_handler(echo_with_layer),
        }
        bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", handlers),))
        port = bare.add_insecure_port("127.0.0.1:0")
        await bare.start()
        pipe.send((server.address, f"127.0.0.1:{port}"))
        await asyncio.to_thread(pipe.recv)
        await bare.stop(None)
        device_thread.shutdown()


def serve(directory: str, pipe: Connection) -> None:
    """A process with the server, and with bare echoes beside it."""
    asyncio.run(_serve(directory, pipe))


def step_request(sequences: list[AsyncSequence], hidden: np.ndarray[Any, Any], step: int) -> bytes:
    """A serialised decode step of all sequences."""
    request = layer_service_pb2.StepRequest(
        server_epoch=sequences[0].server_epoch,
        sequence=[sequence.handle for sequence in sequences],
        kind=[layer_service_pb2.ROW_KIND_DECODE] * len(sequences),
        step=[step] * len(sequences),
        position=[step - 1] * len(sequences),
        query_start_loc=range(len(sequences) + 1),
        hidden=wire.encode(hidden),
    )
    return request.SerializeToString()


async def _bench_overhead(address: str, echo_address: str, rounds: int) -> dict[str, float]:
    hidden = np.random.default_rng(0).standard_normal((STEP_ROWS, HIDDEN)).astype(np.float32)
    times: dict[str, list[float]] = {name: [] for name in ("echo", "echo around the layer", "service", "with client")}
    async with (
        AsyncClient(address) as client,
        grpc.aio.insecure_channel(address, options=OPTIONS) as raw,
        grpc.aio.insecure_channel(echo_address, options=OPTIONS) as channel,
    ):
        echo: Any = channel.unary_unary("/bare.Echo/Echo")
        echo_with_layer: Any = channel.unary_unary("/bare.Echo/EchoWithLayer")
        call: Any = raw.unary_unary("/deltaline.v1.LayerService/Step")
        sequences = await client.open_many(STEP_ROWS)
        for turn in range(rounds + 10):
            request = step_request(sequences, hidden, turn + 1)
            begin = time.perf_counter()
            await echo(request)
            echoed = time.perf_counter()
            reply = await echo_with_layer(request)
            layered = time.perf_counter()
            answer = await call(request)
            answered = time.perf_counter()
            response = layer_service_pb2.StepResponse.FromString(answer)
            if turn >= 10:
                times["echo"].append(echoed - begin)
                times["echo around the layer"].append(layered - echoed - struct.unpack("d", reply[:8])[0])
                times["service"].append(answered - layered - response.timing.compute_ns * 1e-9)
        await client.close(sequences)
        sequences = await client.open_many(STEP_ROWS)
        for turn in range(rounds + 10):
            begin = time.perf_counter()
            result = await client.step([Row.decode(s, h) for s, h in zip(sequences, hidden, strict=True)])
            if turn >= 10:
                times["with client"].append(time.perf_counter() - begin - result.timing.compute_s)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def bench_overhead(directory: Path, rounds: int) -> dict[str, float]:
    """Milliseconds of a decode step of 64 rows besides its layer, and of bare echoes of the same bytes, in turns.

    The plain echo runs in warm caches. The echo around the layer computes the same layer, in a thread, between request
    and reply, and its layer is taken off too: caches and cores are as the service finds them.
    """
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
        "overhead": overhead["service"] / overhead["echo around the layer"],
        "overhead in plain echoes": overhead["service"] / overhead["echo"],
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
    for name, value in overhead.items():
        print(f"{name:26}{value:>11.2f} ms")
    print(f"service / echo around the layer {ratios['overhead']:.2f}x, bar {OVERHEAD_BAR:.1f}x")
    print(f"service / plain echo            {ratios['overhead in plain echoes']:.2f}x")
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
