"""`deltaline health`: asks whether a server is ready, or alive. For probes of containers: imports as little as it can.

Knows grpc.health.v1 alone, and its two messages as bytes: the package that has them comes with the server.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import grpc

from deltaline import link
from deltaline.address import PORT, link_path
from deltaline.tls import Tls, channel_of
from deltaline_cli.address import add_server, tls_of
from deltaline_cli.text import seconds_up_to

SERVICE = "deltaline.v1.LayerService"
_METHOD = "/grpc.health.v1.Health/Check"
_PORT_VARIABLE = "DELTALINE_PORT"
# HealthCheckRequest.service, and HealthCheckResponse.status with the names of its values.
_SERVICE_TAG, _STATUS_TAG = b"\x0a", b"\x08"
_STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
_ABOUT = """\
Asks a server once whether it is ready for new sequences, prints the answer in one line, and exits with 0 if it is, with
1 if it is not or can't be reached. With --liveness: whether it is alive, which it is through a drain as well. Without
an address it asks this host, at the port DELTALINE_PORT where that is set.
"""


def add_health(commands: Any) -> None:
    """Add `health` to the commands of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    _add_options(
        commands.add_parser("health", help="whether a server is ready", description=_ABOUT, formatter_class=raw)
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command alone, with the arguments behind its name; return 0 or 1, or 2 for wrong ones."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="deltaline health", description=_ABOUT, formatter_class=raw)
    _add_options(parser)
    options = parser.parse_args(arguments)
    try:
        return health(options)
    except ValueError as error:
        print(f"deltaline: error: {error}", file=sys.stderr)
        return 1


def health(options: argparse.Namespace) -> int:
    """Ask once and print the answer: 0 if the server serves, else 1."""
    answer = ask(options.server, "" if options.liveness else SERVICE, options.timeout, tls_of(options))
    print(f"{options.server}: {answer}")
    return int(answer != "SERVING")


def ask(address: str, service: str, timeout_s: float, tls: Tls | None = None) -> str:
    """Return the status of a service by its name in grpc.health.v1, or why there is none. A server that can't be
    reached is one line too."""
    request = _SERVICE_TAG + bytes([len(service)]) + service.encode() if service else b""
    path = link_path(address)
    try:
        if path is not None:
            answer = _ask_link(path, request, timeout_s)
        else:
            with channel_of(grpc, address, tls) as channel:
                call: Any = channel.unary_unary(_METHOD)
                answer = call(request, timeout=timeout_s)
    except grpc.RpcError as error:
        return f"{error.code().name}: {(error.details() or 'no reason given').splitlines()[0]}"
    except (OSError, link.LinkError) as error:
        return f"UNAVAILABLE: {error}"
    if not answer:
        return _STATUSES[0]
    known = len(answer) == 2 and answer[:1] == _STATUS_TAG and answer[1] < len(_STATUSES)
    return _STATUSES[answer[1]] if known else "an answer that is none of grpc.health.v1"


def _ask_link(path: str, request: bytes, timeout_s: float) -> bytes:
    """The answer by the local link. Raises OSError, LinkError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connected:
        connected.settimeout(timeout_s)
        connected.connect(path)
        kind, packet = link.WELCOME, connected.recv(link.MAX_PACKET_BYTES)
        if link.read(memoryview(packet)).kind == kind:
            connected.send(link.pack(link.CALL, 1, flags=link.LAST, method=_METHOD.encode()) + request)
            kind, packet = link.MESSAGE, connected.recv(link.MAX_PACKET_BYTES)
        envelope = link.read(memoryview(packet))
        if envelope.kind != kind:
            raise link.LinkError("the server turned the call away")
        return packet[envelope.body_at :]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=health)
    add_server(parser, default=_local_address())
    parser.add_argument("--liveness", action="store_true", help="ask whether it is alive, not whether it is ready")
    text = "seconds to wait for the answer [%(default)s]"
    parser.add_argument("--timeout", type=seconds_up_to(3600, "an hour"), default=3.0, metavar="SECONDS", help=text)


def _local_address() -> str:
    """Where a server with this environment listens. Kubernetes may have set the variable to something else."""
    port = os.environ.get(_PORT_VARIABLE, "")
    return f"127.0.0.1:{port if port.isascii() and port.isdecimal() else PORT}"
