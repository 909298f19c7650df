"""The address of a server as a person writes it: a host, a host and a port, a Unix socket, or a local link."""

from __future__ import annotations

import ipaddress
import re

from deltaline.link import SCHEME

PORT = 50051
"""Where a server listens unless it is told otherwise."""

_HOST = re.compile(r"(?:[\w.-]+|\[[^\]\s]+\])(?::(?P<port>[0-9]{1,5}))?")  # a name, 10.0.0.1 or [::1]
_URI_CHARACTERS = "%?#"  # %41 is decoded, and the others end a path: the server makes its socket at the path as it is
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:")  # gRPC's own, which it is left to read


def is_host_and_port(text: str) -> bool:
    """Whether a text is HOST:PORT, and so an address that nobody reads otherwise."""
    match = _HOST.fullmatch(text)
    return match is not None and bool(match["port"]) and not text.startswith(_SCHEMES)


def link_path(address: str) -> str | None:
    """The path of a local link's socket; None for an address of gRPC. Raises ValueError for none that can be, TypeError
    for what is no text."""
    if not isinstance(address, str):
        raise TypeError(f"address: expected a text, got {type(address).__name__}")
    if not address.startswith(SCHEME):
        return None
    path = address.removeprefix(SCHEME)
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"address: expected {SCHEME}/PATH, got {address!r}")
    return path


def with_port(address: str) -> str:
    """Return the address with PORT if it is a host alone; else as it is. Raises ValueError if it is no address,
    TypeError if it is no text."""
    if link_path(address) is not None:
        return address
    try:
        host = f"[{ipaddress.IPv6Address(address)}]"
    except ValueError:
        host = address
    scheme, _, target = host.partition(":")
    if f"{scheme}:" in _SCHEMES and target and host.isprintable():
        if scheme == "unix" and any(character in target for character in _URI_CHARACTERS):
            raise ValueError(f"address: expected unix:/PATH without {' '.join(_URI_CHARACTERS)}, got {address!r}")
        return host
    match = _HOST.fullmatch(host)
    if match is None or not 0 < int(match["port"] or PORT) < 2**16:
        raise ValueError(f"address: expected HOST, HOST:PORT, unix:/PATH or link:/PATH, got {address!r}")
    return host if match["port"] else f"{host}:{PORT}"
