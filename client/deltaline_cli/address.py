"""The address of a server as a person writes it, and what to say when no server is there.

Imports grpc alone: the probe's command uses it too.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import sys
from queue import Empty, SimpleQueue

import grpc

PORT = 50051
"""Where a server listens unless it is told otherwise."""
HELP = f"host, host:port or unix:/path; without a port {PORT}"
_HOST = re.compile(r"[\w.-]+|\[[^\]\s]+\]")  # a name, 10.0.0.1 or [::1], without a port
_CONNECT_S = 2.0


def add_server(parser: argparse.ArgumentParser, name: str = "server", default: str = "127.0.0.1") -> None:
    """Add the argument or the option that names the server."""
    what = {"metavar": "ADDRESS"} if name.startswith("-") else {"nargs": "?"}
    parser.add_argument(name, default=default, type=with_port, help=f"{HELP} [%(default)s]", **what)  # type: ignore[arg-type]


def with_port(text: str) -> str:
    """Return the address with the default port if it is a host alone; whatever else as it is."""
    try:
        host = f"[{ipaddress.IPv6Address(text)}]"
    except ValueError:
        host = text
    return f"{host}:{PORT}" if _HOST.fullmatch(host) else host


def advise(address: str) -> None:
    """Tell on stderr how to start a server, if none listens there."""
    if not _listens(address):
        print(f"No server answers at {address}. Start one there: deltaline-server --model DIR", file=sys.stderr)
        print("Or see one at work on this host: deltaline demo --keep", file=sys.stderr)


def _listens(address: str) -> bool:
    states: SimpleQueue[grpc.ChannelConnectivity] = SimpleQueue()
    ready, failed = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
    with grpc.insecure_channel(address) as channel:
        channel.subscribe(states.put, try_to_connect=True)
        try:
            while (state := states.get(timeout=_CONNECT_S)) not in (ready, failed):
                pass
        except Empty:
            return False
    return state is ready
