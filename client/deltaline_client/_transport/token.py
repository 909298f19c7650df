"""The token that says who a client is: a text, or a file that may change. It is shown nowhere."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import TypeAlias

from deltaline.tls import Tls

Path: TypeAlias = "str | os.PathLike[str]"
Header: TypeAlias = tuple[str, str]

_MAX_BYTES = 8192
_TOKEN = re.compile(r"[!-~]+")
_LOCAL = ("unix:", "unix-abstract:", "link:")
_HOST = re.compile(r"(?:ipv[46]:)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+)):\d+")


class Token:
    """What a client's calls carry."""

    def __init__(self, text: str | None, path: Path | None) -> None:
        """One of both. Raises ValueError for no token, OSError for a file that can't be read."""
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        if path is not None:
            self._seen = _signature(path)
            text = _read(path)
        self._header = _header("token" if path is None else "token_file", text or "")

    @classmethod
    def of(cls, token: str | None, token_file: Path | None, address: str, tls: Tls | None) -> Token | None:
        """A client's token, None for none. Raises ValueError where others could read it on its way, or for both."""
        if token is None and token_file is None:
            return None
        if token is not None and token_file is not None:
            raise ValueError("token, token_file: expected one of them, got both")
        if tls is None:
            cls.check(address)
        try:
            return cls(token, token_file)
        except OSError as error:
            raise ValueError(
                f"token_file: expected a file with a token, got {token_file!r} ({error.strerror})"
            ) from error

    @staticmethod
    def check(address: str) -> None:
        """Raise ValueError for an address to which no token goes without TLS."""
        if not is_on_host(address):
            raise ValueError(f"token: expected tls beside it for an address that others reach, got {address!r}")

    def header(self) -> Header:
        """The metadata of a call, as of now; of a file that can't be used any more, what it had before."""
        if self._path is not None:
            try:
                seen = _signature(self._path)
                if seen != self._seen:
                    self._header, self._seen = _header("token_file", _read(self._path)), seen
            except (OSError, ValueError):
                pass
        return self._header


def is_on_host(address: str) -> bool:
    """Whether an address, with its port, is one that only this host has."""
    if address.startswith(_LOCAL):
        return True
    match = _HOST.fullmatch(address)
    host = None if match is None else match["v6"] or match["host"]
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _header(source: str, text: str) -> Header:
    """Raises ValueError, which does not tell the text."""
    token = text.strip()
    if not _TOKEN.fullmatch(token) or len(token) > _MAX_BYTES:
        raise ValueError(f"{source}: expected 1 .. {_MAX_BYTES} visible ASCII characters")
    return "authorization", f"Bearer {token}"


def _signature(path: Path) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> str:
    """Raises OSError."""
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read(_MAX_BYTES + 2)
