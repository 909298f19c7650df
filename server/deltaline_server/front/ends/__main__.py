"""A front end, as the core starts it: `python -m deltaline_server.front.ends ADDRESS BYTES LEVEL FORMAT TLS... AGE FD`.

ADDRESS is where it listens beside others, BYTES the most of a request, LEVEL and FORMAT the log's. TLS... is paths of a
certificate, its key and the clients' authorities, each empty for none; AGE the seconds that a connection lasts, 0 for
ever; FD its end of a socket to the core. It says a word on standard output when it serves, then in lines of JSON how
many calls it refused for which reason, and ends when the core does.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import grpc
from google.rpc import code_pb2, status_pb2

from deltaline import link
from deltaline.conversation import Conversation
from deltaline.link_socket import LinkSocket
from deltaline_server import log
from deltaline_server.front.ends.forward import Forward
from deltaline_server.front.ends.memory import most_bytes
from deltaline_server.front.grpc_port import SERVICES, add_port, grpc_options
from deltaline_server.front.port.descriptors import connections
from deltaline_server.front.port.gate import Gate
from deltaline_server.front.trust.tls import Tls
from deltaline_server.garbage import settle
from deltaline_server.ranks.parent import end_with_parent

# Time for the last replies to leave when the core has ended.
GRACE_S = 0.5
TELL_S = 0.5
# gRPC would else let each call that nobody reads yet fill a window of megabytes, where a client's link is fast.
_NO_PROBE = ("grpc.http2.bdp_probe", 0)


def main() -> int:
    """Serve until the core ends."""
    address, message_bytes, level, log_format, cert, key, client_ca, max_age_s, fd = sys.argv[1:]
    # It ends with the core, whose drain it is to serve: signals to the whole group are the core's.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    limit = most_bytes(int(message_bytes))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    log.configure(level, log_format)
    tls = Tls(cert, key, client_ca or None) if cert else None
    most = connections(1, 0)
    options = grpc_options(int(message_bytes), connections=most, shares_port=True, max_age_s=int(max_age_s) or None)
    with socket.socket(fileno=int(fd)) as core:
        asyncio.run(_serve(core, address, int(message_bytes), options, tls))
    return 0


def _fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A callback failed. Without memory packets are lost, and calls would wait for them: they end with the process."""
    if isinstance(context.get("exception"), MemoryError):
        os.abort()
    loop.default_exception_handler(context)


async def _serve(
    core: socket.socket, address: str, message_bytes: int, options: list[tuple[str, int]], tls: Tls | None
) -> None:
    asyncio.get_running_loop().set_exception_handler(_fault)
    core.recv(link.MAX_PACKET_BYTES)  # the welcome of who started this process: it tells nothing new
    core.setblocking(False)
    conversation: Conversation[status_pb2.Status] = Conversation(message_bytes, _told)
    connection = LinkSocket(core, conversation)
    server = grpc.aio.server(options=[*options, _NO_PROBE])
    forward = Forward(connection, SERVICES, Gate())
    server.add_generic_rpc_handlers((forward,))
    add_port(server, address, None if tls is None else tls.credentials())
    settle()
    await server.start()
    _say("serving")
    telling = asyncio.create_task(_tell(forward))
    await connection.ended.wait()
    telling.cancel()
    await server.stop(GRACE_S)


async def _tell(forward: Forward) -> None:
    """Tell the core what is refused here, which counts it."""
    while True:
        await asyncio.sleep(TELL_S)
        if forward.refused:
            _say(json.dumps(forward.refused))
            forward.refused.clear()


def _say(line: str) -> None:
    """Tell the core, unless it is gone: this process ends then."""
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


def _told(status: status_pb2.Status) -> status_pb2.Status:
    """What clients are told: a fault of the link is a lost answer to them."""
    if status.code == code_pb2.UNKNOWN:
        return status_pb2.Status(code=code_pb2.UNAVAILABLE, message=status.message)
    return status


if __name__ == "__main__":
    sys.exit(main())
