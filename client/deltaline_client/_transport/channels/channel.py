"""The channel: its options, and what its errors mean."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from deltaline_client._exceptions import DeltalineError
from deltaline_client._transport.methods import METHODS, STEP_STREAM
from deltaline_client._transport.statuses import from_status

MAX_MESSAGE_BYTES = 64 * 2**20
"""Most bytes of a message on the channel, whose options are set before the server's inline limit is known."""
MAX_TENSOR_BYTES = MAX_MESSAGE_BYTES - 2**20
"""Most bytes of a tensor in such a message: a server takes 1 MiB besides."""

_STATUS_DETAILS_KEY = "grpc-status-details-bin"

# By whether requests and responses are streams.
_KINDS = {(False, False): "unary_unary", (True, False): "stream_unary", (False, True): "unary_stream"}

Options: TypeAlias = tuple[tuple[str, int], ...]

OPTIONS: Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Only this client resends, and only the same step: no retry policy may come from the channel or from DNS.
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    # A server that comes back is found within the first retries.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def bind(channel: Any) -> dict[str, Any]:
    """Return a callable per method path on a channel of grpc or grpc.aio."""
    return {
        method.path: getattr(channel, _KINDS[method.takes_stream, method.gives_stream])(
            method.path,
            request_serializer=method.request_type.SerializeToString,
            response_deserializer=method.response_type.FromString,
        )
        for method in METHODS
    }


def bind_stream(channel: Any) -> Any:
    """Return the callable that opens a StepStream on a channel of grpc or grpc.aio; it takes and gives bytes."""
    return channel.stream_stream(STEP_STREAM)


class _Ended(Protocol):
    """What both grpc and grpc.aio raise."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...


def error_of(failure: grpc.RpcError) -> DeltalineError:
    """Make the exception that mirrors a failed RPC."""
    ended = cast(_Ended, failure)
    status = status_pb2.Status(code=ended.code().value[0], message=ended.details() or "")
    for key, value in ended.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY:
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                break  # some proxy's; the code and message stand
    return from_status(status)
