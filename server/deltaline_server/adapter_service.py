"""AdapterService: loads, unloads and lists adapters.

Knows protobuf messages and how an upload comes in; what an adapter is, is the loader's to know, and which there are,
the registry's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc

from deltaline.v1 import adapter_service_pb2 as pb
from deltaline_server.adapter_config import CONFIG_FILE, MAX_CONFIG_BYTES
from deltaline_server.adapter_registry import AdapterDescription, AdapterRegistry
from deltaline_server.adapter_root import check_name
from deltaline_server.adapters import Adapters
from deltaline_server.errors import Reason, RequestError
from deltaline_server.interceptor import Context
from deltaline_server.model_config import ModelError

NAME = pb.DESCRIPTOR.services_by_name["AdapterService"].full_name
# How long the messages of one call may take, seconds.
UPLOAD_S = 600.0


class AdapterService:
    """The handlers of AdapterService. They take parsed messages and return serialised replies."""

    def __init__(self, adapters: Adapters | None, upload_s: float = UPLOAD_S) -> None:
        """`adapters` is None where the server keeps none."""
        self._adapters, self._upload_s = adapters, upload_s
        # Bytes of uploads that are coming in or being read; at most as many as the registry may hold.
        self._upload_bytes = 0

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
        size = 0
        try:
            async with asyncio.timeout(self._upload_s):
                first = await _first(messages)
                size = self._reserve(first, adapters.registry)
                tensors = await _read_chunks(first, messages, size)
            if first.HasField("upload"):
                config = first.upload.config
                loaded = await adapters.loader.load_bytes(first.name, first.pinned, config, tensors)
            else:
                loaded = await adapters.loader.load_directory(first.name, first.pinned)
        except TimeoutError as error:
            message = f"the messages did not all come within {self._upload_s:g} seconds"
            raise RequestError(Reason.UPLOAD_TIMEOUT, message) from error
        finally:
            self._upload_bytes -= size
        description, was_there = loaded
        return pb.LoadAdapterResponse(adapter=_message(description), already_loaded=was_there).SerializeToString()

    async def unload_adapter(self, message: pb.UnloadAdapterRequest, context: Context) -> bytes:
        """Free a name."""
        count = self._existing().registry.unload(message.name, message.drain)
        return pb.UnloadAdapterResponse(sequences=count).SerializeToString()

    async def list_adapters(self, message: pb.ListAdaptersRequest, context: Context) -> bytes:
        """Tell which adapters there are."""
        adapters = self._existing()
        return pb.ListAdaptersResponse(
            adapters=map(_message, adapters.registry.describe()),
            used_bytes=adapters.registry.used_bytes,
            limit_bytes=adapters.registry.limit_bytes,
            slots_used=adapters.slots.num_resident,
            slots_total=adapters.slots.num_slots,
        ).SerializeToString()

    def _existing(self) -> Adapters:
        if self._adapters is None:
            raise RequestError(Reason.ADAPTERS_OFF, "this server keeps no adapters")
        return self._adapters

    def _reserve(self, first: pb.LoadAdapterRequest, registry: AdapterRegistry) -> int:
        """Take room for the bytes that the chunks will have, 0 without an upload; return it. Raises RequestError."""
        if not first.HasField("upload"):
            return 0
        size, config_bytes = first.upload.tensors_bytes, len(first.upload.config)
        if config_bytes > MAX_CONFIG_BYTES:
            message = f"{CONFIG_FILE}: expected at most {MAX_CONFIG_BYTES} bytes, got {config_bytes}"
            raise RequestError(Reason.INVALID_ADAPTER, message, field="upload.config")
        limit = registry.limit_bytes
        if self._upload_bytes + size > limit:
            raise RequestError(
                Reason.ADAPTER_BYTES_EXHAUSTED,
                f"{size} bytes asked for, {limit - self._upload_bytes} of {limit} can be had for uploads",
                retry_after_s=1.0 if size <= limit else None,
            )
        self._upload_bytes += size
        return size


async def _first(messages: AsyncIterator[pb.LoadAdapterRequest]) -> pb.LoadAdapterRequest:
    """Read the first message and check its name. Raises RequestError INVALID_REQUEST or INVALID_ADAPTER."""
    first = await anext(messages, None)
    if first is None:
        raise _invalid("name", "must be set: the stream had no message")
    try:
        check_name(first.name)
    except ModelError as error:
        raise RequestError(Reason.INVALID_ADAPTER, str(error), field="name") from error
    return first


async def _read_chunks(
    first: pb.LoadAdapterRequest, messages: AsyncIterator[pb.LoadAdapterRequest], size: int
) -> bytearray:
    """Read the stream to its end: `size` bytes in all. Raises RequestError INVALID_REQUEST."""
    tensors = bytearray(first.chunk)
    if len(tensors) <= size:
        async for message in messages:
            if message.name or message.pinned or message.HasField("upload") or not message.chunk:
                raise _invalid("chunk", "must be all that a later message has")
            if len(tensors) + len(message.chunk) > size:
                tensors += message.chunk[: size + 1 - len(tensors)]
                break
            tensors += message.chunk
    if len(tensors) != size:
        got = "more" if len(tensors) > size else str(len(tensors))
        raise _invalid("chunk", f"must make {size} bytes over all messages, as tensors_bytes says, got {got}")
    return tensors


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
    )


def _invalid(field: str, message: str) -> RequestError:
    return RequestError(Reason.INVALID_REQUEST, f"{field}: {message}", field=field)
