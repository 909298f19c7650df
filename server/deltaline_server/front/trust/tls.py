"""TLS from files that may change: the server's certificate and key, and the authorities of its clients."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from deltaline.tls import no_password, reason
from deltaline_server.log import event

_log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
# What a client and a server that are both ready say to each other takes less.
_ROUNDS = 4


class TlsError(ValueError):
    """The files can't be used. The message is one line: the option, what was expected and what was got."""


@dataclass(frozen=True)
class _Taken:
    """What the files had when they were read. expires_s: since the epoch. context: for sockets of this process."""

    content: tuple[bytes | None, ...] = field(repr=False)
    configuration: grpc.ServerCertificateConfiguration
    context: ssl.SSLContext
    expires_s: float


class Tls:
    """Who the server is, and whose clients it takes. Files that changed count for the next connection; what can't be
    used, or has expired, leaves what was there. Threads share it.

    num_taken, num_refused: how often changed files were taken, or not.
    """

    def __init__(self, cert: str, key: str, client_ca: str | None) -> None:
        """Paths of PEM files. client_ca: None where clients need no certificate. Raises TlsError."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._lock = threading.Lock()
        self._seen = self._look()
        self._taken = self._read()
        self.num_taken = self.num_refused = 0

    @property
    def expires_s(self) -> float:
        """When the certificate that counts now expires, in seconds since the epoch."""
        return self._current().expires_s

    def context(self) -> ssl.SSLContext:
        """For the next connection to a socket of this process. It asks clients for a certificate where gRPC needs one,
        and lets those in that have none."""
        return self._current().context

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC, which asks again at each connection."""
        given = self._current()

        def fetch() -> Any:  # None: nothing is new, which gRPC's types leave out
            nonlocal given
            found = self._current()
            if found is given:
                return None
            given = found
            return found.configuration

        return grpc.dynamic_ssl_server_credentials(given.configuration, fetch, self._client_ca is not None)

    def _current(self) -> _Taken:
        """What counts now."""
        with self._lock:
            seen = self._look()
            if seen != self._seen:
                self._seen = seen  # before it is read: what changes meanwhile is seen the next time
                try:
                    found = self._read()
                except TlsError as error:
                    self.num_refused += 1
                    event(_log, "certificate refused, the one before stays", level=logging.WARNING, why=str(error))
                    return self._taken
                # What changed while it was looked at is read twice.
                if found.content != self._taken.content:
                    self._taken = found
                    self.num_taken += 1
                    event(_log, "certificate taken", expires_s=round(self._taken.expires_s))
            return self._taken

    def _look(self) -> list[tuple[int, ...] | None]:
        """What tells that files changed."""
        found: list[tuple[int, ...] | None] = []
        for path in (self._cert, self._key, self._client_ca):
            status = None
            if path is not None:
                with suppress(OSError):
                    status = os.stat(path)
            found.append(status and (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev))
        return found

    def _read(self) -> _Taken:
        """Read the files, and try them. Raises TlsError."""
        cert, key = _content("--tls-cert", self._cert), _content("--tls-key", self._key)
        client_ca = None if self._client_ca is None else _content("--tls-client-ca", self._client_ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key, password=no_password)
        except (OSError, ValueError) as error:
            what = "expected a certificate and its key in PEM, the key not encrypted"
            raise TlsError(f"--tls-cert, --tls-key: {what}, got others ({reason(error)})") from error
        try:
            expires_s = _try(context, cert)
        except (OSError, ValueError) as error:
            what = "expected a server's certificate that is valid now"
            raise TlsError(f"--tls-cert: {what}, got another ({reason(error)})") from error
        if client_ca is not None:
            try:
                context.load_verify_locations(cadata=client_ca.decode("ascii", "ignore"))
            except (OSError, ValueError) as error:
                raise TlsError(
                    f"--tls-client-ca: expected certificates in PEM, got others ({reason(error)})"
                ) from error
            context.verify_mode = ssl.CERT_OPTIONAL
        configuration = grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)
        return _Taken((cert, key, client_ca), configuration, context, expires_s)


def _content(flag: str, path: str) -> bytes:
    """What a file has. Raises TlsError."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TlsError(f"{flag}: expected a file that can be read, got {path!r} ({error.strerror})") from error
    if len(content) > MAX_FILE_BYTES:
        raise TlsError(f"{flag}: expected at most {MAX_FILE_BYTES} bytes in {path!r}, got more")
    return content


def _try(server: ssl.SSLContext, cert: bytes) -> float:
    """Let a client that trusts this certificate alone connect; return when it expires, in seconds since the epoch.

    Raises ssl.SSLError, ValueError.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=cert.decode("ascii", "ignore"))
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking, answering = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for end in (asking, answering) * _ROUNDS:
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    found = asking.getpeercert()
    assert found is not None
    return float(ssl.cert_time_to_seconds(str(found["notAfter"])))
