"""A bare grpc.aio echo of raw bytes on a Unix socket: what a message costs without a service. A process of its own.

python -m deltaline_bench.service.echo PATH
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from deltaline_server.app import grpc_options
from deltaline_server.config import Config

METHOD = "/bare.Echo/Stream"


async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    """Answer each message with itself."""
    async for request in requests:
        yield request


async def serve(path: str) -> None:
    """Serve until the process is ended. The options are the server's."""
    server = grpc.aio.server(options=grpc_options(Config(random_init="none")))
    handlers: dict[str, Any] = {"Stream": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", handlers),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        await server.wait_for_termination()
    finally:
        await server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
