"""Options about trust: how connections are protected, and who is let in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltaline_server import errors, local_socket
from deltaline_server.config.network import NAME, NetworkOptions
from deltaline_server.config.option import ConfigError, setting


@dataclass(frozen=True)
class TrustOptions(NetworkOptions):
    """How what listens is protected."""

    tls_cert: str | None = setting(
        None,
        "trust",
        "certificate chain of this server, PEM; read anew when it changes; default no TLS",
        metavar="PATH",
    )
    tls_key: str | None = setting(None, "trust", "its key, PEM, not encrypted; needed with --tls-cert", metavar="PATH")
    tls_client_ca: str | None = setting(
        None,
        "trust",
        "authorities, PEM, one of which has to have signed a client's certificate; default clients need none",
        metavar="PATH",
    )
    max_connection_age_s: int = setting(
        3600, "trust", "with TLS, how long a connection lasts before certificates are shown again", low=1, high=10**6
    )
    principals: str | None = setting(
        None,
        "trust",
        "file (TOML) of who may call: tokens' digests, certificates' names, users, their roles and quotas; read again "
        "when it changes; default none: all are one",
        metavar="PATH",
    )
    move_peers: str | None = setting(
        None,
        "trust",
        "HOST:PORT,HOST:PORT,...: servers that sequences may be moved to, with TLS where this one has it; link:PATH is "
        "the local link of one on this host; default none",
        metavar="NAMES",
    )
    move_ca: str | None = setting(
        None,
        "trust",
        "authorities, PEM, one of which has to have signed their certificates; default those of --tls-client-ca, else "
        "public ones",
        metavar="PATH",
    )
    move_token_file: str | None = setting(
        None,
        "trust",
        "file of the token by which they know this server; default none: by its certificate, if at all",
        metavar="PATH",
    )
    insecure: bool = setting(
        False, "trust", "listen beyond loopback without TLS: in a network that only trusted clients reach"
    )

    def __post_init__(self) -> None:
        """Check that nobody reaches the server unprotected, unless it is meant."""
        super().__post_init__()
        if self.principals is not None and not Path(self.principals).is_file():
            raise ConfigError(f"--principals: expected a file that exists, got {self.principals!r}")
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("--tls-key", "--tls-cert") if self.tls_cert is None else ("--tls-cert", "--tls-key")
            raise ConfigError(f"{given}: expected {missing} beside it, got none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("--tls-client-ca: expected --tls-cert and --tls-key beside it, got none")
        if self.insecure and self.tls_cert is not None:
            raise ConfigError("--insecure: expected no --tls-cert beside it, got one")
        if not (self.insecure or self.tls_cert is not None or local_socket.is_loopback(self.host)):
            raise ConfigError(
                f"--host: expected --tls-cert and --tls-key for {errors.shown(self.host)}, which is not loopback, got "
                "none; --insecure does without, where the network lets none but trusted clients reach it"
            )
        self._check_peers()

    def _check_peers(self) -> None:
        """Check that states and tokens go to no other host unprotected, unless it is meant."""
        if self.move_token_file is not None and not Path(self.move_token_file).is_file():
            raise ConfigError(f"--move-token-file: expected a file that exists, got {self.move_token_file!r}")
        for peer in self.peers:
            if peer.startswith(local_socket.ADDRESS):
                continue  # whose it is shows when it is reached
            match = NAME.fullmatch(peer)
            if match is None or not 0 < int(match["port"] or 0) < 2**16:
                raise ConfigError(
                    f"--move-peers: expected HOST:PORT or link:/PATH, with commas between, got {errors.shown(peer)}"
                )
            if self.tls_cert is not None or local_socket.is_loopback(peer.rpartition(":")[0].strip("[]")):
                continue
            if self.move_token_file is not None or not self.insecure:
                raise ConfigError(
                    f"--move-peers: expected --tls-cert and --tls-key for {peer}, which is not loopback, got none; "
                    "--insecure does without them, and without --move-token-file"
                )
        if self.move_ca is not None and self.tls_cert is None:
            raise ConfigError("--move-ca: expected --tls-cert and --tls-key beside it, got none")

    @property
    def peers(self) -> list[str]:
        """The addresses of --move-peers."""
        return [] if self.move_peers is None else [peer.strip() for peer in self.move_peers.split(",")]

    @property
    def max_age_s(self) -> int | None:
        """How long a connection lasts, None for as long as it may."""
        return None if self.tls_cert is None else self.max_connection_age_s
