"""What the client returns about adapters. Plain frozen values: no protobuf."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

from deltaline.v1 import adapter_service_pb2
from deltaline_client._exceptions import ProtocolError
from deltaline_client._types import same_fields

HASH_DIGITS = 16
"""Hex digits of a content hash that are shown to people."""


class AdapterState(IntEnum):
    """Where an adapter is: in host memory; on the device too; or unloaded, kept for sequences that still use it."""

    REGISTERED = adapter_service_pb2.ADAPTER_STATE_REGISTERED
    RESIDENT = adapter_service_pb2.ADAPTER_STATE_RESIDENT
    DRAINING = adapter_service_pb2.ADAPTER_STATE_DRAINING


@dataclass(frozen=True)
class Adapter:
    """An adapter that the server holds. Field meanings are those of deltaline.v1.Adapter."""

    name: str
    content_hash: bytes
    rank: int
    size_bytes: int
    state: AdapterState
    pinned: bool
    sequences: int
    modules_elsewhere: int
    shared: bool = False

    def __repr__(self) -> str:
        """All fields; of the hash as many digits as fit a line."""
        values = {one.name: repr(getattr(self, one.name)) for one in fields(self)}
        values["content_hash"] = self.content_hash.hex()[:HASH_DIGITS]
        return f"Adapter({', '.join(f'{name}={value}' for name, value in values.items())})"

    @classmethod
    def from_proto(cls, message: adapter_service_pb2.Adapter) -> Adapter:
        """Read the server's answer. Raises ProtocolError for a state that this version does not know."""
        if message.state not in set(map(int, AdapterState)):
            raise ProtocolError("the state of an adapter is not known to this client")
        return cls(state=AdapterState(message.state), **same_fields(cls, message, {"state"}))


@dataclass(frozen=True)
class LoadedAdapter:
    """What a load came to. already_loaded: the same content had the name before, perhaps by a try whose answer was
    lost."""

    adapter: Adapter
    already_loaded: bool

    @classmethod
    def from_proto(cls, message: adapter_service_pb2.LoadAdapterResponse) -> LoadedAdapter:
        """Read the server's answer."""
        return cls(Adapter.from_proto(message.adapter), message.already_loaded)


@dataclass(frozen=True)
class AdapterList:
    """The adapters of a server, by name, and its room for them: bytes of host memory, slots on the device."""

    adapters: tuple[Adapter, ...]
    used_bytes: int
    limit_bytes: int
    slots_used: int
    slots_total: int

    @classmethod
    def from_proto(cls, message: adapter_service_pb2.ListAdaptersResponse) -> AdapterList:
        """Read the server's answer."""
        adapters = tuple(map(Adapter.from_proto, message.adapters))
        return cls(adapters=adapters, **same_fields(cls, message, {"adapters"}))
