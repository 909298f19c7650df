"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """The paths of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates into a folder. ca: the path of its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca = folder / f"{name}.crt"
        self.ca.write_bytes(_pem(self._sign(self._name, self._key.public_key(), (), timedelta(days=1), is_ca=True)))

    def issue(self, name: str, *names: str, life: timedelta = timedelta(days=1)) -> Pair:
        """A certificate and its key, put in place of those of the same name by renaming. names: hosts, addresses and
        URIs that it is for, by default this host's. life: until it expires; below zero, it has."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert = self._sign(subject, key.public_key(), names or ("localhost", "127.0.0.1"), life, is_ca=False)
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        put(pair.key, pem_of(key))
        put(pair.cert, _pem(cert))
        return pair

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        names: tuple[str, ...],
        life: timedelta,
        *,
        is_ca: bool,
    ) -> x509.Certificate:
        end = datetime.now(UTC) + life
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(end - timedelta(days=2))
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if names:
            made = made.add_extension(x509.SubjectAlternativeName(list(map(_general_name, names))), critical=False)
        return made.sign(self._key, hashes.SHA256())


def put(path: Path, content: bytes) -> None:
    """Put a file in the place of another at once."""
    beside = path.with_suffix(f"{path.suffix}.new")
    beside.write_bytes(content)
    os.replace(beside, path)


def pem_of(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    """A private key as a file has it."""
    secret = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _general_name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
