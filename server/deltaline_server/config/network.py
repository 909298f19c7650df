"""Options about who reaches the server, and how: addresses, sockets, and what a message may hold."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

from deltaline_server import errors, local_socket
from deltaline_server.config.option import MAX_BYTES, ConfigError, Options, setting

# Linux's sun_path, without the zero at its end.
MAX_UDS_BYTES = 107
# gRPC reads unix:PATH as a URI: it decodes %41, and a client ends the path at the others.
URI_CHARACTERS = "%?#"
# A host's name of at most as many characters as DNS has, or an address, an IPv6 one in brackets, and perhaps a port.
NAME = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True)
class NetworkOptions(Options):
    """Where the server listens."""

    host: str = setting("127.0.0.1", "network", "address to listen on, for steps and metrics")
    port: int = setting(50051, "network", "port of gRPC; 0 for any", low=0, high=65535)
    front_ends: int = setting(0, "network", "processes that speak gRPC; 0: this one does", low=0, high=64)
    advertise: str | None = setting(
        None,
        "network",
        "HOST or HOST:PORT at which clients go on with what they opened here, and by which they tell this server from "
        "others; default where it listens, unless that is loopback or every address",
        metavar="NAME",
    )
    uds: str | None = setting(None, "network", "listen on this Unix socket as well", metavar="PATH")
    link: str | None = setting(None, "network", local_socket.LINK, metavar="PATH")
    link_group: str | None = setting(None, "network", local_socket.GROUP, metavar="NAME")
    link_memory_bytes: int = setting(2**28, "network", local_socket.MEMORY, low=0, high=2**50)
    metrics_port: int = setting(
        9464, "network", "port of the Prometheus metrics; 0 for any, -1 for none", low=-1, high=65535
    )
    inline_limit_bytes: int = setting(2**22, "network", "bytes of a tensor in a message, at most", low=1024, high=2**30)
    shared_memory_bytes: int = setting(
        0,
        "network",
        "bytes of memory shared with clients of this user on this host, at most; 0 for none",
        low=0,
        high=MAX_BYTES,
    )

    def __post_init__(self) -> None:
        """Check what this system has, and that it may listen there."""
        super().__post_init__()
        if self.shared_memory_bytes and not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"--shared-memory-bytes: expected 0, as only Linux has it, got {self.shared_memory_bytes}"
            )
        if self.front_ends and not local_socket.has_link():
            raise ConfigError(f"--front-ends: expected 0, as only Linux has them, got {self.front_ends}")
        _check_host(self.host)
        if self.advertise is not None:
            _check_name(self.advertise)
        if self.uds is not None:
            _check_uds(self.uds)
        try:
            local_socket.check(self.link, self.link_group)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def name(self, port: int) -> str:
        """The address that clients are told, of a server that listens on a port; "" for none."""
        if self.advertise is not None:
            host = self.advertise
            if host.rpartition("]")[2].count(":"):
                return host
        elif local_socket.is_loopback(self.host) or _is_wildcard(self.host):
            return ""
        else:
            host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{port}"


def _check_name(name: str) -> None:
    """A host or an address of one, and a port perhaps."""
    match = NAME.fullmatch(name)
    if match is None or not 0 < int(match["port"] or 1) < 2**16:
        raise ConfigError(f"--advertise: expected HOST or HOST:PORT, got {errors.shown(name)}")


def _is_wildcard(host: str) -> bool:
    """Whether --host is every address of this host, which names none."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _check_uds(path: str) -> None:
    """A socket may be made at the path, as far as its length, its characters and its folder tell."""
    if not 0 < len(os.fsencode(path)) <= MAX_UDS_BYTES:
        raise ConfigError(f"--uds: expected a path of 1 .. {MAX_UDS_BYTES} bytes, got {errors.shown(path)}")
    if any(character in path for character in URI_CHARACTERS):
        raise ConfigError(f"--uds: expected a path without {' '.join(URI_CHARACTERS)}, got {path!r}")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"--uds: expected a socket in a folder that exists, got {path!r}")


def _check_host(host: str) -> None:
    """A name or an address, as far as its form tells."""
    try:
        is_host = host.isprintable() and not any(map(str.isspace, host)) and len(host.encode("idna")) > 0
    except UnicodeError:
        is_host = False
    if not is_host:
        raise ConfigError(f"--host: expected the name of a host, or its address, got {errors.shown(host)}")
