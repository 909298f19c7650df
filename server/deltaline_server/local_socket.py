"""Where the local link's socket is: what the options --link and --link-group mean, and their defaults."""

from __future__ import annotations

import grp
import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path

OFF = "off"
# Linux's sun_path, without the zero at its end.
MAX_PATH_BYTES = 107
MAX_PORT = 65535
SUFFIX = ".sock"
ADDRESS = "link:/"
"""How the address of a link begins: its scheme, then an absolute path."""

# What the options are, for the help.
LINK = (
    "local link: its socket, or a folder (ending in /) for PORT.sock in it where that can be, or off; default a folder "
    "of this user's in XDG_RUNTIME_DIR or TMPDIR, where --host is loopback or --uds is given"
)
GROUP = "group whose members may use the local link; default this user alone"
MEMORY = "bytes of memory shared with the local link's clients, at most; 0 for none"


def default_folder(environ: Mapping[str, str], host: str, uds: str | None) -> str | None:
    """The folder of sockets of this user's servers; None where there is no link, or who connects is elsewhere."""
    if not has_link() or not (uds is not None or is_loopback(host)):
        return None
    folder = environ.get("XDG_RUNTIME_DIR")
    made = f"{folder}/deltaline/" if folder else f"{environ.get('TMPDIR') or '/tmp'}/deltaline-{os.geteuid()}/"
    return made if len(os.fsencode(socket_path(made, MAX_PORT))) <= MAX_PATH_BYTES else None


def has_link() -> bool:
    """Whether this system has what the link needs: Linux does."""
    return hasattr(socket, "SO_PEERCRED") and hasattr(os, "memfd_create")


def socket_path(link: str, port: int) -> Path:
    """The path that --link means; port: of gRPC, which names a socket in a folder."""
    return Path(link, f"{port}{SUFFIX}") if link.endswith("/") else Path(link)


def check(link: str | None, group: str | None) -> None:
    """Raise ValueError, which names the option and what was expected, for a --link or --link-group that can't be."""
    if group is not None:
        group_number(group)
    if link is None or link == OFF:
        return
    if not has_link():
        raise ValueError(f"--link: expected {OFF}, as only Linux has it, got {link!r}")
    path = socket_path(link, MAX_PORT)
    if not path.is_absolute() or len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ValueError(f"--link: expected {OFF} or an absolute path of at most {MAX_PATH_BYTES} bytes, got {link!r}")
    if path.suffix != SUFFIX:
        raise ValueError(f"--link: expected a path that ends in {SUFFIX}, or a folder that ends in /, got {link!r}")


def group_number(name: str) -> int:
    """The number of a group. Raises ValueError as `check`."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ValueError(f"--link-group: expected the name of a group, got {name!r}") from error


def is_loopback(host: str) -> bool:
    """Whether --host is reached by processes of this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
