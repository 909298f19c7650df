"""What a front end tells the core of its client, and which wires nobody else reads."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rigs.authority import Authority

from deltaline import link
from deltaline_server.front.trust.peer import MAX_NAMES_BYTES, Peer, is_private, proven_by

TLS = {"transport_security_type": [b"ssl"]}


class Context:
    """A call's context."""

    def __init__(self, address: str, proven: Mapping[str, Sequence[bytes]] | None = None) -> None:
        self._address, self._proven = address, proven or {}

    def peer(self) -> str:
        return self._address

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return self._proven

    def invocation_metadata(self) -> Any:
        return ()


def test_what_a_front_end_says_is_read_as_it_was_proven() -> None:
    proven = TLS | {"peer_dns": [b"a.org", b"b.org"], "peer_spiffe_id": [b"spiffe://a"], "x509_subject": [b"CN=x"]}
    read = Peer.read(Peer.of(Context("ipv4:10.0.0.1:5", proven)).packed())
    assert read == Peer("ipv4:10.0.0.1:5", TLS | {"peer_dns": [b"a.org", b"b.org"], "peer_spiffe_id": [b"spiffe://a"]})
    assert Peer.read(Peer("unix:").packed()) == Peer("unix:", {})


def test_a_name_can_not_pass_for_two_texts() -> None:
    proven = {"peer_dns": [b"a.org\0peer_dns\0evil.org", b"b.org"]}
    assert Peer.read(Peer("ipv4:1", proven).packed()).proven == {"peer_dns": [b"b.org"]}


def test_a_name_that_is_cut_at_a_zero_byte_proves_nothing(tmp_path: Path) -> None:
    long, cut = "x" * 200 + ".org", ("a.org\0.evil.org", "spiffe://a\0/evil")
    pem = Authority(tmp_path).issue("c", *cut, "b.org", long, "spiffe://b").cert.read_bytes()
    told = {"peer_dns": [b"a.org", b"b.org", long.encode()], "peer_spiffe_id": [b"spiffe://a", b"spiffe://b"]}
    proven = proven_by(Context("ipv4:1", TLS | told | {"x509_pem_cert": [pem]}))
    assert list(proven["peer_dns"]) == [b"b.org", long.encode()]
    assert list(proven["peer_spiffe_id"]) == [b"spiffe://b"]
    assert proven["transport_security_type"] == [b"ssl"]


def test_a_user_can_not_be_asserted() -> None:
    assert Peer.read(Peer("ipv4:1", {"uid": [b"0"]}).packed()).proven == {}


def test_what_a_front_end_says_fits_an_envelope_whatever_names_a_certificate_has() -> None:
    """Else the front end could send it to nobody: short ones take more for their property than for themselves."""
    for size in (1, 10, 100):
        most = MAX_NAMES_BYTES // (size + len("peer_dns") + 2)
        for count in (most, most + 1):
            names = [b"x" * size] * count
            pem = ssl.DER_cert_to_PEM_cert(bytes([0x82, size]) + names[0]).encode()
            context = Context("ipv4:10.0.0.1:5", TLS | {"peer_dns": names, "x509_pem_cert": [pem]})
            packed = Peer.of(context).packed()
            link.pack(link.CALL, 1, method=b"/x", client=packed)
            assert list(proven_by(context)["peer_dns"]) == names * (count == most), "on the core's own port too"
            assert Peer.read(packed).proven == TLS | ({"peer_dns": names} if count == most else {})


@pytest.mark.parametrize(("count", "expected"), [(100, 1), (5000, 0)])
def test_a_certificate_is_decoded_once_and_never_for_too_many_names(
    monkeypatch: pytest.MonkeyPatch, count: int, expected: int
) -> None:
    """It is judged for each call, while nobody else's goes on."""
    names, decoded = [b"%x" % i for i in range(count)], list[str]()
    pem = ssl.DER_cert_to_PEM_cert(b"".join(bytes([0x82, len(name)]) + name for name in names))
    real = ssl.PEM_cert_to_DER_cert

    def decode(text: str) -> bytes:
        decoded.append(text)
        return real(text)

    monkeypatch.setattr(ssl, "PEM_cert_to_DER_cert", decode)
    for _ in range(2):
        proven = proven_by(Context("ipv4:1", TLS | {"peer_dns": names, "x509_pem_cert": [pem.encode()]}))
        assert list(proven["peer_dns"]) == names * expected
    assert len(decoded) == expected


@pytest.mark.parametrize(
    ("address", "proven", "expected"),
    [
        ("ipv4:127.0.0.1:5", {}, True),
        ("ipv6:%5B::1%5D:5", {}, True),
        ("ipv6:[::1]:5", {}, True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:5", {}, True),
        ("unix:", {}, True),
        ("link:1000:7", {}, True),
        ("ipv4:10.0.0.1:5", {}, False),
        ("ipv4:10.0.0.1:5", {"transport_security_type": [b"insecure"]}, False),
        ("ipv4:10.0.0.1:5", TLS, True),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", {}, False),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5", {}, False),
        ("dns:localhost", {}, False),
        ("", {}, False),
    ],
)
def test_a_wire_is_private_within_the_host_or_with_tls(
    address: str, proven: dict[str, list[bytes]], expected: bool
) -> None:
    assert is_private(Context(address, proven)) is expected
