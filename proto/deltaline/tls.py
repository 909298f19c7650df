"""TLS at the client's end: whom it believes, who it is, and the channels that it makes with it."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

Path: TypeAlias = "str | os.PathLike[str]"
_MAX_FILE_BYTES = 1 << 20
# Sockets of this host: a server speaks no TLS there.
_LOCAL = ("unix:", "unix-abstract:")


@dataclass(frozen=True)
class Tls:
    """How a client knows its server, and is known by it: paths of PEM files, read when a client is made.

    ca: authorities, one of which has to have signed the server's certificate; None for the public ones that gRPC has.
    cert, key: the client's own certificate and its key, not encrypted, where the server asks for one; both or none.
    server_name: the name in the server's certificate, where that is not the host of its address.

    Raises ValueError for one of cert and key without the other.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            given, missing = ("tls.key", "tls.cert") if self.cert is None else ("tls.cert", "tls.key")
            raise ValueError(f"{given}: expected {missing} beside it, got none")

    def context(self) -> ssl.SSLContext:
        """The same for sockets of Python, such as those of HTTP. Raises ValueError for files that can't be used."""
        try:
            context = ssl.create_default_context(cafile=None if self.ca is None else os.fspath(self.ca))
        except OSError as error:
            raise ValueError(f"tls.ca: expected certificates in PEM, got {self.ca!r} ({reason(error)})") from error
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key, password=no_password)
            except (OSError, ValueError) as error:
                what = "expected a certificate and its key in PEM, the key not encrypted"
                got = f"{self.cert!r} and {self.key!r} ({reason(error)})"
                raise ValueError(f"tls.cert, tls.key: {what}, got {got}") from error
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """What gRPC needs of the files. Raises ValueError for those that can't be used."""
        self.context()
        ca, key, cert = (None if path is None else _content(path) for path in (self.ca, self.key, self.cert))
        return grpc.ssl_channel_credentials(ca, key, cert)


def channel_of(api: Any, address: str, tls: Tls | None, options: Sequence[tuple[str, Any]] = ()) -> Any:
    """A channel of grpc or grpc.aio, which is the api, to an address of gRPC. A Unix socket is reached without TLS.

    Raises ValueError for files that can't be used.
    """
    if tls is None or address.startswith(_LOCAL):
        return api.insecure_channel(address, options=options)
    name = [] if tls.server_name is None else [("grpc.ssl_target_name_override", tls.server_name)]
    return api.secure_channel(address, tls.credentials(), options=[*options, *name])


def _content(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MAX_FILE_BYTES)


def no_password() -> str:
    """What OpenSSL is told when it asks for a key's password."""
    raise ValueError("the key is encrypted")


def reason(error: OSError | ValueError) -> str:
    """What an error of files or of OpenSSL says, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM").lower().replace("_", " ")
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
