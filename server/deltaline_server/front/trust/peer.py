"""Who is at the other end of a call, as the transport knows: an address, and what was proven there."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

# Properties of gRPC's authentication context, and the one that the link adds.
SECURITY, DNS_NAMES, SPIFFE_ID, UID = "transport_security_type", "peer_dns", "peer_spiffe_id", "uid"
_FORWARDED = (SECURITY, DNS_NAMES, SPIFFE_ID)
# Most bytes of them that a front end sends; a certificate with more names proves none.
MAX_FORWARDED_BYTES = 16 << 10
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
        return cls(context.peer(), context.auth_context())

    def packed(self) -> bytes:
        """What a front end says of its client: texts with zero bytes between."""
        pairs = [(name.encode(), value) for name in _FORWARDED for value in self.proven.get(name, ())]
        pairs = [pair for pair in pairs if b"\0" not in pair[1]]
        if sum(len(value) for _, value in pairs) > MAX_FORWARDED_BYTES:
            pairs = [pair for pair in pairs if pair[0] == SECURITY.encode()]
        return b"\0".join((self.address.encode(), *(text for pair in pairs for text in pair)))

    @classmethod
    def read(cls, packed: bytes) -> Peer:
        """Read what a front end says."""
        address, *texts = packed.split(b"\0")
        proven: dict[str, list[bytes]] = {}
        for name, value in zip(texts[::2], texts[1::2], strict=True):
            proven.setdefault(name.decode(), []).append(value)
        return cls(address.decode(), proven)


def is_local_socket(address: str) -> bool:
    """Whether an address is of a socket that only this host's processes reach."""
    return address.startswith(_LOCAL_SOCKETS)


def is_private(context: CallContext) -> bool:
    """Whether nobody but this host's processes can have read what a call carries."""
    address = context.peer()
    if is_local_socket(address) or _is_loopback(address.rpartition(":")[0]):
        return True
    return list(context.auth_context().get(SECURITY, ())) == [b"ssl"]


@lru_cache(1024)
def _is_loopback(address: str) -> bool:
    """Whether `ipv4:127.0.0.1` or `ipv6:[::1]` is an address of the loopback."""
    try:
        found = ipaddress.ip_address(unquote(address.partition(":")[2]).strip("[]"))
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
