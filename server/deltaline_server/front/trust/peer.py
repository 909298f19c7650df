"""Who is at the other end of a call, as the transport knows: an address, and what was proven there."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

# Properties of gRPC's authentication context, and the one that the link adds.
SECURITY, DNS_NAMES, SPIFFE_ID, UID = "transport_security_type", "peer_dns", "peer_spiffe_id", "uid"
CERTIFICATE = "x509_pem_cert"
_FORWARDED = (SECURITY, DNS_NAMES, SPIFFE_ID)
# Most bytes of a certificate's names, as a front end sends them; one that has more proves none, here or there. The
# envelope has room for four times as many, and each call is judged by them.
MAX_NAMES_BYTES = 16 << 10
# What such a name has before it in a certificate: the tag of a DNS name or URI of the alternative names.
_TAGS = {DNS_NAMES: b"\x82", SPIFFE_ID: b"\x86"}
_LOCAL_SOCKETS = ("unix:", "link:")


class CallContext(Protocol):
    """What is asked of a call's context, grpc.aio's or the link's."""

    def peer(self) -> str: ...
    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...
    def invocation_metadata(self) -> Any: ...


class Peer(NamedTuple):
    """An address as gRPC spells it, and properties as gRPC's `auth_context` gives them."""

    address: str
    proven: Mapping[str, Iterable[bytes]] = {}

    @classmethod
    def of(cls, context: CallContext) -> Peer:
        """The peer of a call by gRPC."""
        return cls(context.peer(), proven_by(context))

    def packed(self) -> bytes:
        """What a front end says of its client: texts with zero bytes between."""
        texts = [self.address.encode()]
        for name in _FORWARDED:
            for value in self.proven.get(name, ()):
                if b"\0" not in value:
                    texts += name.encode(), value
        return b"\0".join(texts)

    @classmethod
    def read(cls, packed: bytes) -> Peer:
        """Read what a front end says."""
        address, *texts = packed.split(b"\0")
        proven: dict[str, list[bytes]] = {}
        for name, value in zip(texts[::2], texts[1::2], strict=True):
            proven.setdefault(name.decode(), []).append(value)
        return cls(address.decode(), proven)


def proven_by(context: CallContext) -> Mapping[str, Iterable[bytes]]:
    """What is proven of a call's peer. gRPC tells of a name what is before its first zero byte: names that are not
    whole in the certificate are left out, and all of them where it has too many."""
    proven = context.auth_context()
    certificate = b"".join(proven.get(CERTIFICATE, ()))
    if not certificate:
        return proven
    names = {key: tuple(proven.get(key, ())) for key in _TAGS}
    # Each has its property's name before it, and a zero byte before either.
    num_bytes = sum(sum(map(len, values)) + len(values) * (len(key) + 2) for key, values in names.items())
    whole = _whole(tuple(names.items()), certificate) if num_bytes <= MAX_NAMES_BYTES else dict.fromkeys(_TAGS, ())
    return {**proven, **whole}


def is_local_socket(address: str) -> bool:
    """Whether an address is of a socket that only this host's processes reach."""
    return address.startswith(_LOCAL_SOCKETS)


def is_private(context: CallContext) -> bool:
    """Whether nobody but this host's processes can have read what a call carries."""
    address = context.peer()
    if is_local_socket(address) or _is_loopback(address.rpartition(":")[0]):
        return True
    return list(context.auth_context().get(SECURITY, ())) == [b"ssl"]


@lru_cache(256)
def _whole(names: tuple[tuple[str, tuple[bytes, ...]], ...], certificate: bytes) -> Mapping[str, tuple[bytes, ...]]:
    """Those of the names, by property, that a certificate, in PEM, has with so many bytes."""
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    return {key: tuple(name for name in values if _spelled(_TAGS[key], name) in der) for key, values in names}


def _spelled(tag: bytes, name: bytes) -> bytes:
    """A name as it is in a certificate."""
    size = len(name).to_bytes(4).lstrip(b"\0")
    return tag + (size if len(name) < 0x80 else bytes([0x80 + len(size)]) + size) + name


@lru_cache(1024)
def _is_loopback(address: str) -> bool:
    """Whether `ipv4:127.0.0.1` or `ipv6:[::1]` is an address of the loopback."""
    try:
        found = ipaddress.ip_address(unquote(address.partition(":")[2]).strip("[]"))
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
