"""What the service adds to its layer: a decode step of 64 rows beside bare gRPC echoes of the same bytes.

The layer is one Gated DeltaNet mixer on the CPU. Client and server are two processes of this machine; every figure is a
median of this run, the calls taken in turns. What a step costs besides its layer is the time of the raw call less the
compute time that its reply tells.

  echo                    a bare grpc.aio echo, raw bytes on both sides, the same options, between the other calls
  echo around the layer   the same, which computes the same layer in a thread between request and reply, its time taken
                          off: it finds caches and cores as the service does
  service                 LayerService.Step with bytes that were serialised before
  with client             the same through the Python client, its arrays and objects included
  service, no layer       LayerService.Step of a layer that only copies
  echo, no layer          bare echoes in turns with that
  stream ...              the same four over streams that stay open: StepStream beside a bare echo of the same kind

The bar is for each kind of call: what the service costs besides its layer, its own queue and copies included, in bare
echoes of the same kind and run.

    python bench/overhead.py [--rounds N] [--output FILE.json]
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
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch

from deltaline import wire
from deltaline.v1 import layer_service_pb2
from deltaline_client import AsyncClient, AsyncSequence, Row
from deltaline_kernels import Rows
from deltaline_server.app import Server, grpc_options
from deltaline_server.config import Config
from deltaline_server.layers.state_pool import StateOptions

HIDDEN, HEADS, HEAD_DIM, ROWS = 1024, 16, 64, 64
MAX_DRAFT, WARM_UP = 8, 10
# Most echoes that the service may cost.
BAR = 1.5
# Before the names of figures: unary calls, and messages of streams.
KINDS = ("", "stream ")
MODEL = {
    "model_type": "qwen3_next",
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}


def make_config(model: str) -> Config:
    """The server under test: one mixer with random weights."""
    return Config(
        random_init=model,
        scope="mixer",
        device="cpu",
        dtype="float32",
        port=0,
        metrics_port=-1,
        max_sequences=ROWS,
        max_draft_tokens=MAX_DRAFT,
        log_level="warning",
    )


def layer_work(server: Server) -> Callable[[], float]:
    """A decode step of the served layer on state of its own; returns the seconds that it took."""
    model = server.runtime.model
    pool = model.make_pool(StateOptions(num_lines=ROWS, max_draft=MAX_DRAFT))
    lines, ones, zeros = list(range(1, ROWS + 1)), [1] * ROWS, [0] * ROWS
    rows = Rows.build(ones, lines, lines, ones, zeros, zeros, max_short=MAX_DRAFT, device=model.device)
    hidden = torch.randn(ROWS, HIDDEN)

    def work() -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            model.forward(0, hidden, rows, pool)
        return time.perf_counter() - begin

    return work


async def _serve(model: str, pipe: Connection) -> None:
    config = make_config(model)
    async with Server(config) as server:
        work, device_thread = layer_work(server), ThreadPoolExecutor(1)

        async def echo(request: bytes, context: object) -> bytes:
            return request

        async def echo_around_layer(request: bytes, context: object) -> bytes:
            seconds = await asyncio.get_running_loop().run_in_executor(device_thread, work)
            return struct.pack("d", seconds) + request[8:]

        async def echo_stream(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
            async for request in requests:
                yield request

        async def echo_stream_around_layer(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
            async for request in requests:
                yield await echo_around_layer(request, context)

        bare = grpc.aio.server(options=grpc_options(config))
        handlers: dict[str, Any] = {
            "Echo": grpc.unary_unary_rpc_method_handler(echo),
            "EchoAroundLayer": grpc.unary_unary_rpc_method_handler(echo_around_layer),
            "EchoStream": grpc.stream_stream_rpc_method_handler(echo_stream),
            "EchoStreamAroundLayer": grpc.stream_stream_rpc_method_handler(echo_stream_around_layer),
        }
        bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", handlers),))
        port = bare.add_insecure_port("127.0.0.1:0")
        await bare.start()
        pipe.send((server.address, f"127.0.0.1:{port}"))
        await asyncio.to_thread(pipe.recv)
        server.runtime.model.forward = lambda span, hidden, *_: hidden.clone()  # type: ignore[method-assign]
        pipe.send("the layer only copies from here on")
        await asyncio.to_thread(pipe.recv)
        await bare.stop(None)
        device_thread.shutdown()


def serve(model: str, pipe: Connection) -> None:
    """A process with the server, and with bare echoes beside it."""
    asyncio.run(_serve(model, pipe))


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


# Sends a message and returns the seconds until the answer was there, and the answer.
Call = Callable[[bytes], Awaitable[tuple[float, bytes]]]


def unary(method: Any) -> Call:
    """Calls of a unary method of raw bytes."""

    async def call(message: bytes) -> tuple[float, bytes]:
        begin = time.perf_counter()
        answer = await method(message)
        return time.perf_counter() - begin, answer

    return call


def streamed(stream: Any) -> Call:
    """Messages over a stream of raw bytes that stays open, one at a time."""

    async def call(message: bytes) -> tuple[float, bytes]:
        begin = time.perf_counter()
        await stream.write(message)
        answer = await stream.read()
        return time.perf_counter() - begin, answer

    return call


def streamed_steps(stream: Any) -> Call:
    """Steps over StepStream; their messages are put together and taken apart outside the time."""
    send, request, response = (
        streamed(stream),
        layer_service_pb2.StepStreamRequest,
        layer_service_pb2.StepStreamResponse,
    )

    async def call(message: bytes) -> tuple[float, bytes]:
        head = request(correlation_id=1).SerializeToString()
        seconds, answer = await send(b"".join([head, *wire.field_pieces(request.STEP_FIELD_NUMBER, [message])]))
        answered = response.FromString(answer)
        if not answered.HasField("step"):
            raise RuntimeError(f"a step was refused: {answered.status}")
        return seconds, answered.step.SerializeToString()

    return call


class Bench:
    """The client's side: raw calls to echoes and server, and the times of each."""

    def __init__(self, address: str, echo_address: str, rounds: int) -> None:
        options = [(f"grpc.max_{way}_message_length", 1 << 26) for way in ("send", "receive")]
        self.raw: Any = grpc.aio.insecure_channel(address, options=options)
        self.bare: Any = grpc.aio.insecure_channel(echo_address, options=options)
        self.client = AsyncClient(address)
        self.rounds = rounds
        self.hidden = np.random.default_rng(0).standard_normal((ROWS, HIDDEN)).astype(np.float32)
        self.times: dict[str, list[float]] = {}

    def add(self, turn: int, name: str, seconds: float) -> None:
        """Note a time once warm."""
        if turn >= WARM_UP:
            self.times.setdefault(name, []).append(seconds)

    def calls(self, kind: str) -> tuple[Call, Call, Call]:
        """Echo, echo around the layer and step, as calls of a kind: "" for unary ones, "stream "."""
        if kind:
            stream = self.bare.stream_stream
            step = self.raw.stream_stream("/deltaline.v1.LayerService/StepStream")
            echo, around = stream("/bare.Echo/EchoStream"), stream("/bare.Echo/EchoStreamAroundLayer")
            return streamed(echo()), streamed(around()), streamed_steps(step())
        echo, around = (self.bare.unary_unary(f"/bare.Echo/{name}") for name in ("Echo", "EchoAroundLayer"))
        return unary(echo), unary(around), unary(self.raw.unary_unary("/deltaline.v1.LayerService/Step"))

    async def beside_echoes(self, kind: str) -> None:
        """Echo, echo around the layer and service, in turns."""
        echo, around, step = self.calls(kind)
        sequences = await self.client.open_many(ROWS)
        for turn in range(self.rounds + WARM_UP):
            request = step_request(sequences, self.hidden, turn + 1)
            self.add(turn, f"{kind}echo", (await echo(request))[0])
            seconds, answer = await around(request)
            self.add(turn, f"{kind}echo around the layer", seconds - struct.unpack("d", answer[:8])[0])
            await self._step(turn, f"{kind}service", step, request)
        await self.client.close(sequences)

    async def through_client(self) -> None:
        """Steps through the Python client."""
        sequences = await self.client.open_many(ROWS)
        for turn in range(self.rounds + WARM_UP):
            begin = time.perf_counter()
            result = await self.client.step([Row.decode(s, h) for s, h in zip(sequences, self.hidden, strict=True)])
            self.add(turn, "with client", time.perf_counter() - begin - result.timing.compute_s)
        await self.client.close(sequences)

    async def without_layer(self, kind: str) -> None:
        """Bare echoes and raw steps of a layer that only copies, in turns: nothing has cooled the caches."""
        echo, _, step = self.calls(kind)
        sequences = await self.client.open_many(ROWS)
        for turn in range(self.rounds + WARM_UP):
            request = step_request(sequences, self.hidden, turn + 1)
            self.add(turn, f"{kind}echo, no layer", (await echo(request))[0])
            await self._step(turn, f"{kind}service, no layer", step, request)
        await self.client.close(sequences)

    async def _step(self, turn: int, name: str, step: Call, request: bytes) -> None:
        seconds, answer = await step(request)
        response = layer_service_pb2.StepResponse.FromString(answer)
        if len(response.outcome) != ROWS or response.row_status:
            raise RuntimeError(f"a step was refused: {response.row_status}")
        self.add(turn, name, seconds - response.timing.compute_ns * 1e-9)

    async def close(self) -> None:
        """Close the channels."""
        await self.client.disconnect()
        await self.raw.close()
        await self.bare.close()


async def _run(pipe: Connection, rounds: int) -> dict[str, float]:
    address, echo_address = pipe.recv()
    bench = Bench(address, echo_address, rounds)
    for kind in KINDS:
        await bench.beside_echoes(kind)
    await bench.through_client()
    pipe.send(None)
    pipe.recv()
    for kind in KINDS:
        await bench.without_layer(kind)
    await bench.close()
    return {name: statistics.median(values) * 1e3 for name, values in bench.times.items()}


def measure(rounds: int) -> dict[str, float]:
    """Median milliseconds of each line of the table."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "config.json"
        model.write_text(json.dumps(MODEL))
        process = spawn.Process(target=serve, args=(str(model), theirs))
        process.start()
        try:
            return asyncio.run(_run(mine, rounds))
        finally:
            mine.send(None)
            process.join()


def main() -> int:
    """Run, print the table, and return 1 when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="calls of each kind (default 200)")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    print("timing steps beside bare echoes ...", flush=True)
    times = measure(arguments.rounds)
    kibibytes = ROWS * HIDDEN * 4 // 1024
    print(f"\na decode step of {ROWS} rows, {kibibytes} KiB each way, {torch.get_num_threads()} threads")
    print(f"{'besides the layer':33}{'median':>11}{'in echoes':>12}")
    for name, value in times.items():
        kind = "stream " if name.startswith("stream ") else ""
        echo = times[f"{kind}echo, no layer" if name.endswith("no layer") else f"{kind}echo"]
        print(f"{name:33}{value:>8.2f} ms{value / echo:>11.2f}x")
    is_met = True
    for kind in KINDS:
        ratio = times[f"{kind}service"] / times[f"{kind}echo"]
        is_met &= ratio <= BAR
        print(f"{kind}service in echoes: {ratio:.2f}x, bar {BAR:.1f}x {'met' if ratio <= BAR else 'MISSED'}")
        around = times[f"{kind}service"] / times[f"{kind}echo around the layer"]
        print(f"{kind}service in echoes around the layer: {around:.2f}x")
        bare = times[f"{kind}service, no layer"] / times[f"{kind}echo, no layer"]
        print(f"{kind}service without layer in echoes: {bare:.2f}x")
    if arguments.output:
        record = {
            "command": "python " + " ".join(sys.argv),
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "grpcio": grpc.__version__,
            },
            "milliseconds": times,
        }
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
