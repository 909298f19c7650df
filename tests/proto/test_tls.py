"""The client's end of TLS: files that can't be used are told before anything is sent."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from rigs.authority import Authority, pem_of

from deltaline.tls import Tls, channel_of


def test_a_certificate_and_its_key_go_together() -> None:
    with pytest.raises(ValueError, match=r"^tls\.cert: expected tls\.key beside it"):
        Tls(cert="a")
    with pytest.raises(ValueError, match=r"^tls\.key: expected tls\.cert beside it"):
        Tls(key="a")


def test_files_that_can_t_be_used_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.issue("client"), authority.issue("other")
    secret = tmp_path / "secret.key"
    secret.write_bytes(pem_of(ec.generate_private_key(ec.SECP256R1()), b"secret"))
    for tls, message in (
        (Tls(tmp_path / "none"), r"tls\.ca: .*none.*No such file"),
        (Tls(pair.key), r"tls\.ca: expected certificates in PEM"),
        (Tls(cert=pair.cert, key=other.key), r"tls\.cert, tls\.key: .*mismatch"),
        (Tls(cert=pair.cert, key=secret), r"tls\.cert, tls\.key: .*the key is encrypted"),
    ):
        with pytest.raises(ValueError, match=message):
            channel_of(grpc, "localhost:1", tls)


def test_a_server_is_checked_and_a_certificate_shown_by_http_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = Tls(authority.ca).context()
    assert context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED
    assert [dict(pair[0] for pair in each["subject"]) for each in context.get_ca_certs()] == [  # type: ignore[misc]
        {"commonName": "authority"}
    ]


def test_sockets_of_this_host_are_reached_without_it(tmp_path: Path) -> None:
    missing = Tls(tmp_path / "none")
    channel_of(grpc, f"unix:{tmp_path}/s", missing).close()
    with pytest.raises(ValueError, match="No such file"):
        channel_of(grpc, "localhost:1", missing)
