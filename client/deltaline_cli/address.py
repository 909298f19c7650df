"""The argument that names a server, and what to say when no server is there.

Imports grpc alone: the probe's command uses it too.
"""

from __future__ import annotations

import argparse
import socket
import sys
from queue import Empty, SimpleQueue

import grpc

from deltaline.address import PORT, link_path, with_port

_CONNECT_S = 2.0
# What gRPC says of a port that something else listens on.
_NOT_HTTP2 = "Failed parsing HTTP/2"


def add_server(parser: argparse.ArgumentParser, name: str = "server", default: str = "127.0.0.1") -> None:
    """Add the argument or the option that names the server."""
    what = {"metavar": "ADDRESS"} if name.startswith("-") else {"nargs": "?"}
    text = f"host, host:port, unix:/path or link:/path; without a port {PORT} [%(default)s]"
    parser.add_argument(name, default=default, type=_address, help=text, **what)  # type: ignore[arg-type]


def _address(text: str) -> str:
    try:
        return with_port(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def advise(address: str, error: Exception) -> None:
    """Tell on stderr what to do about an address that gave this error, unless a server listens there."""
    if _NOT_HTTP2 in str(error):
        print(f"What answers at {address} is no deltaline server: is it an HTTP port?", file=sys.stderr)
    elif not _listens(address):
        print(f"No server answers at {address}. Start one there: deltaline-server --model DIR", file=sys.stderr)
        print("Or see one at work on this host: deltaline demo --keep", file=sys.stderr)


def _listens(address: str) -> bool:
    path = link_path(address)
    if path is not None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(path) == 0
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
