"""AdapterService: loads, unloads and lists adapters.

Knows protobuf messages and how an upload comes in; what an adapter is, is the loader's to know, and which there are,
the registry's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, cast

import grpc

from deltaline.sizes import spelled_bytes
from deltaline.v1 import adapter_service_pb2 as pb
from deltaline_server.adapters.directory import CONFIG_FILE, MAX_CONFIG_BYTES, check_name
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.errors import Reason, RequestError, invalid
from deltaline_server.front.interceptor import Context
from deltaline_server.front.pace import PACE, Pace
from deltaline_server.front.trust.principals import check_role, current_principal
from deltaline_server.front.trust.roles import Role
from deltaline_server.principal import SHARED, Principal
from deltaline_server.tables.adapter_registry import AdapterDescription, AdapterRegistry

NAME = pb.DESCRIPTOR.services_by_name["AdapterService"].full_name


class Loader(Protocol):
    """Loads adapters: returns what there is now, and whether it was there before. Raises RequestError."""

    async def load_directory(self, name: str, is_pinned: bool, owner: Principal) -> tuple[AdapterDescription, bool]:
        """Load one of the server's own folder."""

    async def load_bytes(
        self, name: str, is_pinned: bool, owner: Principal, config: bytes, tensors: bytearray
    ) -> tuple[AdapterDescription, bool]:
        """Load one that was uploaded."""


class Adapters(Protocol):
    """The adapters of a server. What they are made of is not imported here: it needs torch."""

    @property
    def registry(self) -> AdapterRegistry:
        """Which there are."""

    @property
    def loader(self) -> Loader:
        """What brings more."""


class AdapterService:
    """The handlers of AdapterService. They take parsed messages and return serialised replies."""

    def __init__(self, adapters: Adapters | None, pace: Pace = PACE) -> None:
        """`adapters` is None where the server keeps none. pace: of uploads."""
        self._adapters, self._pace = adapters, pace
        # Bytes of uploads that are coming in or being read, by their owner's number; together at most as many as the
        # registry may hold, and a config.
        self._uploads = Counter[int]()

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a grpc.aio server registers."""
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            NAME,
            {
                "LoadAdapter": grpc.stream_unary_rpc_method_handler(
                    self.load_adapter, pb.LoadAdapterRequest.FromString
                ),
                "UnloadAdapter": unary(self.unload_adapter, pb.UnloadAdapterRequest.FromString),
                "ListAdapters": unary(self.list_adapters, pb.ListAdaptersRequest.FromString),
            },
        )

    async def load_adapter(self, messages: AsyncIterator[pb.LoadAdapterRequest], context: Context) -> bytes:
        """Load an adapter from the root, or from the chunks that follow."""
        adapters = self._existing()
        reserved_bytes, owner = 0, current_principal()
        try:
            async with self._pace.upload(messages) as coming:
                first = await _first(coming)
                owner = _owner(first.is_shared)
                reserved_bytes = self._reserve(first, owner, adapters.registry)
                tensors = await _read_chunks(first, coming)
            if first.config is not None:
                loaded = await adapters.loader.load_bytes(first.name, first.is_pinned, owner, first.config, tensors)
            else:
                loaded = await adapters.loader.load_directory(first.name, first.is_pinned, owner)
        finally:
            self._uploads[owner.number] -= reserved_bytes
        description, was_there = loaded
        return pb.LoadAdapterResponse(adapter=_message(description), already_loaded=was_there).SerializeToString()

    async def unload_adapter(self, message: pb.UnloadAdapterRequest, context: Context) -> bytes:
        """Free a name."""
        count = self._existing().registry.unload(message.name, message.drain, _owner(message.shared))
        return pb.UnloadAdapterResponse(sequences=count).SerializeToString()

    async def list_adapters(self, message: pb.ListAdaptersRequest, context: Context) -> bytes:
        """Tell which adapters there are."""
        adapters = self._existing()
        return pb.ListAdaptersResponse(
            adapters=map(_message, adapters.registry.describe(current_principal())),
            used_bytes=adapters.registry.used_bytes,
            limit_bytes=adapters.registry.limit_bytes,
            slots_used=adapters.registry.places.num_resident,
            slots_total=adapters.registry.places.num_places,
        ).SerializeToString()

    def _existing(self) -> Adapters:
        if self._adapters is None:
            raise RequestError(Reason.ADAPTERS_OFF, "this server keeps no adapters: start it with --adapter-bytes")
        return self._adapters

    def _reserve(self, first: _First, owner: Principal, registry: AdapterRegistry) -> int:
        """Take room for the bytes that an upload will have, 0 without one; return it. Raises RequestError."""
        if first.config is None:
            return 0
        size, config_bytes = first.tensors_bytes, len(first.config)
        if owner.quotas is not None:
            owner.quotas.check("adapter_bytes", self._uploads[owner.number], size)
        if config_bytes > MAX_CONFIG_BYTES:
            message = f"{CONFIG_FILE}: expected at most {MAX_CONFIG_BYTES} bytes, got {config_bytes}"
            raise RequestError(Reason.INVALID_ADAPTER, message, field="upload.config")
        limit = registry.limit_bytes + MAX_CONFIG_BYTES  # the largest adapter has a config too
        num_bytes, free = config_bytes + size, limit - self._uploads.total()
        if size > registry.limit_bytes or num_bytes > free:
            fits_later = size <= registry.limit_bytes
            have, hint = spelled_bytes(free), "try again later, or " if fits_later else ""
            raise RequestError(
                Reason.ADAPTER_BYTES_EXHAUSTED,
                f"the upload has {spelled_bytes(num_bytes)}, and {have} of {spelled_bytes(limit)} can be had for "
                f"uploads: {hint}start the server with more --adapter-bytes",
                retry_after_s=1.0 if fits_later else None,
            )
        self._uploads[owner.number] += num_bytes
        return num_bytes


@dataclass(frozen=True)
class _First:
    """What the first message says. The message itself may be much larger, and the rest may be long in coming.

    config: None without an upload.
    """

    name: str
    is_pinned: bool
    is_shared: bool
    config: bytes | None
    tensors_bytes: int
    chunk: bytes


async def _first(messages: AsyncIterator[pb.LoadAdapterRequest]) -> _First:
    """Read the first message and check its name. Raises RequestError INVALID_REQUEST or INVALID_ADAPTER."""
    first = await anext(messages, None)
    if first is None:
        raise invalid("name", "must be set: the stream had no message")
    try:
        check_name(first.name)
    except ModelError as error:
        raise RequestError(Reason.INVALID_ADAPTER, str(error), field="name") from error
    config = first.upload.config if first.HasField("upload") else None
    return _First(first.name, first.pinned, first.shared, config, first.upload.tensors_bytes, first.chunk)


async def _read_chunks(first: _First, messages: AsyncIterator[pb.LoadAdapterRequest]) -> bytearray:
    """Read the stream to its end: as many bytes as were announced. Raises RequestError INVALID_REQUEST."""
    size, tensors = first.tensors_bytes, bytearray(first.chunk)
    if len(tensors) <= size:
        async for message in messages:
            if message.name or message.pinned or message.shared or message.HasField("upload") or not message.chunk:
                raise invalid("chunk", "must be all that a later message has")
            if len(tensors) + len(message.chunk) > size:
                tensors += message.chunk[: size + 1 - len(tensors)]
                break
            tensors += message.chunk
            del message  # or a stream that stalls would hold its last one
    if len(tensors) != size:
        got = "more" if len(tensors) > size else str(len(tensors))
        raise invalid("chunk", f"must make {size} bytes over all messages, as tensors_bytes says, got {got}")
    return tensors


def _owner(is_shared: bool) -> Principal:
    """Whose an adapter is that a call is about. Raises RequestError ROLE_MISSING."""
    if is_shared:
        check_role(Role.ADMIN)
    return SHARED if is_shared else current_principal()


def _message(description: AdapterDescription) -> pb.Adapter:
    return pb.Adapter(
        name=description.name,
        content_hash=description.content_hash,
        rank=description.rank,
        size_bytes=description.num_bytes,
        # The two enums have the same numbers.
        state=cast("pb.AdapterState.ValueType", int(description.state)),
        pinned=description.is_pinned,
        sequences=description.num_sequences,
        modules_elsewhere=description.num_elsewhere,
        shared=description.is_shared,
    )
