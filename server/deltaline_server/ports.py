"""What the server listens on: bound before the long load, so that one in use is reported at once; calls wait."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from deltaline_server.config import Config
from deltaline_server.front.ends.processes import FrontEnds
from deltaline_server.front.grpc_port import add_port, system_reason, why_not_bound
from deltaline_server.front.link.listener import Listener
from deltaline_server.front.link.socket_file import SocketFileError, open_link
from deltaline_server.front.trust.principals import Principals
from deltaline_server.front.trust.tls import Tls, TlsError
from deltaline_server.telemetry.http_port import HttpPort
from deltaline_server.telemetry.metrics_pages import MetricsPages


class PortError(RuntimeError):
    """The server can't listen as it is told to; the message is one line for the operator."""


def open_tls(config: Config) -> Tls | None:
    """What protects the ports, None where nothing does. Raises PortError."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    try:
        return Tls(config.tls_cert, config.tls_key, config.tls_client_ca)
    except TlsError as error:
        raise PortError(str(error)) from error


def ways_in(config: Config, link: Listener, principals: Principals) -> dict[str, Any]:
    """What the log says of a server's ways in besides its ports, and of what guards them."""
    tls = "none" if config.tls_cert is None else "server" if config.tls_client_ca is None else "mutual"
    known = "none" if principals.file is None else len(principals.names)
    return {"uds": config.uds or "none", "link": link.path or "none", "tls": tls, "principals": known}


def bind_grpc(config: Config, server: grpc.aio.Server, front_ends: FrontEnds, tls: Tls | None) -> tuple[str, int]:
    """Bind gRPC's port, and its Unix socket; return the host as in an address, and the port. Raises PortError."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        if config.front_ends:
            port = front_ends.take_port(config.host, config.port)
        else:
            port = add_port(server, f"{host}:{config.port}", None if tls is None else tls.credentials())
    except (OSError, RuntimeError) as error:
        why = system_reason(error) if isinstance(error, OSError) else why_not_bound(config.host, config.port)
        raise PortError(f"--host, --port: can't listen on {host}:{config.port}{why}") from error
    if config.uds is not None:
        if _answers(config.uds):
            raise PortError(f"--uds: another process listens on {config.uds}")
        try:
            add_port(server, f"unix:{config.uds}", None)
        except RuntimeError as error:
            raise PortError(f"--uds: can't listen on {config.uds}") from error
    return host, port


def bind_link(config: Config, port: int) -> Listener:
    """Bind the local link of a server whose port of gRPC this is. Raises PortError."""
    try:
        return Listener(open_link(config.link, config.link_group, port))
    except SocketFileError as error:
        raise PortError(f"--link: {error}") from error


def bind_http(
    config: Config,
    registry: CollectorRegistry,
    tls: Tls | None,
    *,
    is_live: Callable[[], bool],
    is_ready: Callable[[], bool],
) -> HttpPort | None:
    """Serve metrics and probes, where that is wanted. To be called on the event loop. Raises PortError."""
    if config.metrics_port < 0:
        return None
    context = None if tls is None else tls.context
    try:
        pages = MetricsPages(registry)
        return HttpPort(config.host, config.metrics_port, pages, context, is_live=is_live, is_ready=is_ready)
    except OSError as error:
        host = f"[{config.host}]" if ":" in config.host else config.host
        why = system_reason(error, "--metrics-port")
        raise PortError(f"--metrics-port: can't listen on {host}:{config.metrics_port}{why}") from error


def _answers(path: str) -> bool:
    """Whether a process listens on a Unix socket; gRPC would take the socket of one that does."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0
