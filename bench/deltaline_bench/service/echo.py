"""A bare grpc.aio echo of raw bytes: what a message costs without a service. A process of its own.

python -m deltaline_bench.service.echo PATH [--model CONFIG.json] [--cert FILE --key FILE]

It listens on a Unix socket, on a port of the loopback, and with a certificate on another by TLS, and says so on its
output.

Calls are `unary` or a `stream`; `sink` takes a stream one way, and answers how many bytes came. With the model of a
CPU's size there are also `unary-around-layer` and `stream-around-layer`: those compute a decode step of its layers
between request and reply, in a thread as the service does, and put the seconds that it took into the first eight bytes.
Such an echo finds caches and cores as the service finds them.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import torch

from deltaline_bench.service.size import CPU
from deltaline_kernels import Rows
from deltaline_server.config import Config
from deltaline_server.front.grpc_port import MESSAGE_SLACK_BYTES, grpc_options
from deltaline_server.front.trust.tls import Tls
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.config import Scope
from deltaline_server.models.model import ModelOptions, load_model

MAX_DRAFT = 8

Answer = Callable[[bytes, Any], Awaitable[bytes]]


async def echo(request: bytes, context: Any) -> bytes:
    """Answer with the same bytes."""
    return request


async def sink(requests: AsyncIterator[bytes], context: Any) -> bytes:
    """Take all that comes; answer how many bytes it was."""
    num_bytes = 0
    async for request in requests:
        num_bytes += len(request)
    return struct.pack("q", num_bytes)


def echo_around(work: Callable[[], float]) -> Answer:
    """Answer with the same bytes behind the seconds of the work."""
    device_thread = ThreadPoolExecutor(1)

    async def answer(request: bytes, context: Any) -> bytes:
        seconds = await asyncio.get_running_loop().run_in_executor(device_thread, work)
        return struct.pack("d", seconds) + request[8:]

    return answer


def layer_work(model_file: Path) -> Callable[[], float]:
    """A decode step of the layers, on state of its own; it returns the seconds that it took."""
    rows = CPU.decode_rows
    options = ModelOptions(torch.device("cpu"), random_init=model_file, scope=Scope(CPU.scope), dtype=torch.float32)
    model = load_model(options)
    pool = model.make_pool(StateOptions(num_lines=rows, max_draft=MAX_DRAFT))
    lines, ones, zeros = list(range(1, rows + 1)), [1] * rows, [0] * rows
    batch = Rows.build(ones, lines, lines, ones, zeros, zeros, max_short=MAX_DRAFT, device=model.device)
    hidden = torch.randn(rows, model.hidden_size)

    def work() -> float:
        begin_s = time.perf_counter()
        with torch.inference_mode():
            model.forward(0, hidden, batch, pool)
        return time.perf_counter() - begin_s

    return work


def handlers(name: str, answer: Answer) -> dict[str, Any]:
    """Both ways of calling."""

    async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield await answer(request, context)

    return {
        f"unary{name}": grpc.unary_unary_rpc_method_handler(answer),
        f"stream{name}": grpc.stream_stream_rpc_method_handler(stream),
    }


async def serve(path: str, model_file: Path | None = None, tls: Tls | None = None) -> None:
    """Serve until the process is ended. The options are the server's."""
    server = grpc.aio.server(options=grpc_options(Config.inline_limit_bytes + MESSAGE_SLACK_BYTES))
    served = handlers("", echo) | {"sink": grpc.stream_unary_rpc_method_handler(sink)}
    if model_file is not None:
        served |= handlers("-around-layer", echo_around(layer_work(model_file)))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", served),))
    server.add_insecure_port(f"unix:{path}")
    ports = [server.add_insecure_port("127.0.0.1:0")]
    if tls is not None:
        ports.append(server.add_secure_port("127.0.0.1:0", tls.credentials()))
    await server.start()
    print(f"echoes on unix:{path}", *(f"127.0.0.1:{port}" for port in ports), flush=True)
    try:
        await server.wait_for_termination()
    finally:
        await server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--model", type=Path)
    for flag in ("--cert", "--key"):
        parser.add_argument(flag)
    options = parser.parse_args()
    tls = None if options.cert is None else Tls(options.cert, options.key, None)
    asyncio.run(serve(options.path, options.model, tls))
