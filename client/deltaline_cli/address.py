"""The argument that names a server, and what to say when no server is there.

Imports grpc alone: the probe's command uses it too.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypedDict

import grpc

from deltaline.address import PORT, link_path, with_port
from deltaline.tls import Tls, channel_of

_CONNECT_S = 2.0
_TLS = (
    ("--tls-ca", "FILE", "authorities that sign servers' certificates, PEM; default the public ones"),
    ("--tls-cert", "FILE", "certificate to show, PEM"),
    ("--tls-key", "FILE", "its key, PEM"),
    ("--tls-name", "NAME", "the name in the server's certificate; default the host of its address"),
)
# What gRPC says, and what to do about it.
_ADVICE = (
    ("Failed parsing HTTP/2", "What answers at {} is no deltaline server: is it an HTTP port?"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "The certificate of {} is not signed by one of --tls-ca, or has expired.",
    ),
    ("Hostname Verification", "The certificate of {} is for another name: give that as --tls-name."),
    ("WRONG_VERSION_NUMBER", "What answers at {} speaks no TLS: leave --tls-ca and its like out."),
)
# What it says of one that takes a connection and ends it, and of one that takes none.
_CUT, _REFUSED = "Socket closed", "Connection refused"


def add_server(parser: argparse.ArgumentParser, name: str = "server", default: str = "127.0.0.1") -> None:
    """Add the argument or the option that names the server."""
    what = {"metavar": "ADDRESS"} if name.startswith("-") else {"nargs": "?"}
    text = f"host, host:port, unix:/path or link:/path; without a port {PORT} [%(default)s]"
    parser.add_argument(name, default=default, type=_address, help=text, **what)  # type: ignore[arg-type]
    text = "file with the token that says who calls, where the server asks; default: the token in DELTALINE_TOKEN"
    parser.add_argument("--token-file", metavar="FILE", help=text)
    group = parser.add_argument_group(
        "TLS", "spoken where one of these is given, or is in the environment (DELTALINE_TLS_CA and so on)"
    )
    for flag, metavar, text in _TLS:
        variable = f"DELTALINE_{flag.removeprefix('--').replace('-', '_').upper()}"
        group.add_argument(flag, default=os.environ.get(variable) or None, metavar=metavar, help=text)


def add_actions(
    commands: Any, name: str, about: str, description: str, run: Callable[[argparse.Namespace], int]
) -> Callable[..., argparse.ArgumentParser]:
    """Add a command that has actions. What is returned adds one: its name, what it does, in a line and as text, the
    seconds of its --timeout, and how its help tells them."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=about, description=description, formatter_class=raw)
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    served = argparse.ArgumentParser(add_help=False)
    add_server(served, "--server")

    def add(
        action: str, about: str, description: str, timeout_s: float | None, default: str = "%(default)s"
    ) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(
            action, parents=[served], help=about, description=description, formatter_class=raw
        )
        text = f"seconds until the command gives up, its retries included [{default}]"
        added.add_argument("--timeout", default=timeout_s, type=float, metavar="SECONDS", help=text)
        return added

    return add


class TokenArguments(TypedDict):
    """Arguments of a Client."""

    token: str | None
    token_file: str | None


def token_of(options: argparse.Namespace) -> TokenArguments:
    """Who the command is to the server: --token-file, or DELTALINE_TOKEN."""
    given: str | None = options.token_file
    return {"token": None if given else os.environ.get("DELTALINE_TOKEN") or None, "token_file": given or None}


def tls_of(options: argparse.Namespace) -> Tls | None:
    """How the server is known, None without TLS. Raises ValueError."""
    given = (options.tls_ca, options.tls_cert, options.tls_key, options.tls_name)
    return Tls(*given) if any(given) else None


def _address(text: str) -> str:
    try:
        return with_port(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def advise(address: str, tls: Tls | None, error: Exception) -> None:
    """Tell on stderr what to do about an address that gave this error, unless a server listens there."""
    advice = [text.format(address) for said, text in _ADVICE if said in str(error)]
    if not advice and not _listens(address, tls):
        if _CUT in str(error) or (_REFUSED in str(error) and _takes_connections(address)):
            what = "Does it speak TLS? Give --tls-ca."
            if tls is not None and tls.cert is None:
                what = "Does it ask for a certificate? Give --tls-cert and --tls-key."
            elif tls is not None:
                what = (
                    "Has the certificate of --tls-cert expired, or been signed by an authority that it does not know?"
                )
            advice = [f"What answers at {address} ends the connection. {what}"]
        else:
            advice = [
                f"No server answers at {address}. Start one there: deltaline-server --model DIR",
                "Or see one at work on this host: deltaline demo --keep",
            ]
    for line in advice:
        print(line, file=sys.stderr)


def _takes_connections(address: str) -> bool:
    """Whether something does at a host and a port: of a host with several addresses gRPC tells the last one's error."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _listens(address: str, tls: Tls | None) -> bool:
    path = link_path(address)
    if path is not None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(path) == 0
    states: SimpleQueue[grpc.ChannelConnectivity] = SimpleQueue()
    ready, failed = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
    with channel_of(grpc, address, tls) as channel:
        channel.subscribe(states.put, try_to_connect=True)
        try:
            while (state := states.get(timeout=_CONNECT_S)) not in (ready, failed):
                pass
        except Empty:
            return False
    return state is ready
