"""gRPC's port: its services, the options of its servers, and why a port can't be had."""

from __future__ import annotations

import errno
import socket

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from deltaline.v1 import adapter_service_pb2, admin_service_pb2, layer_service_pb2, state_service_pb2
from deltaline_server.front.port.descriptors import MAX_CONNECTIONS

SERVICES = [
    service
    for module in (
        *(layer_service_pb2, state_service_pb2, adapter_service_pb2, admin_service_pb2),
        *(health_pb2, reflection_pb2),
    )
    for service in module.DESCRIPTOR.services_by_name.values()
]
# How long what is under way when a connection is too old may go on: a step's time, and some more. Steps of a stream
# that is cut are sent again.
AGE_GRACE_MS = 60_000
# Calls of a connection at a time, as it is told: its client holds the others back.
MAX_STREAMS = 1024
# Calls that wait to be looked at, beyond which gRPC ends them as CANCELLED.
MAX_PENDING = 32_768
# How long a new connection may take to begin, and one may be silent before it is asked for a sign of life.
HANDSHAKE_MS = 10_000
KEEPALIVE_MS = 60_000
KEEPALIVE_TIMEOUT_MS = 20_000
# What a message has besides its tensor.
MESSAGE_SLACK_BYTES = 1 << 20
MAX_METADATA_BYTES = 16 << 10


def grpc_options(
    message_bytes: int,
    *,
    connections: int = MAX_CONNECTIONS,
    shares_port: bool = False,
    max_age_s: int | None = None,
) -> list[tuple[str, int]]:
    """gRPC's options: every limit is explicit, and clients may keep idle connections alive.

    message_bytes: most bytes of a request. connections: the most of an address; one more is closed. shares_port:
    whether other processes listen on the same port. max_age_s: how long a connection lasts, None for as long as it may.
    """
    age: list[tuple[str, int]] = []
    if max_age_s is not None:
        age = [("grpc.max_connection_age_ms", 1000 * max_age_s), ("grpc.max_connection_age_grace_ms", AGE_GRACE_MS)]
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.http2.settings_timeout", HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # Else a call that is over counts until its memory is free, and one that comes before is refused, by a reset.
        ("grpc.http.overload_protection", 0),
        # gRPC's own, 1,000 and 3,000, are reached by a thousand calls at once, or by calls that are cancelled at once.
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # Two servers on one port would each hold half of the sequences.
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Identity only: a small compressed message could unfold to any size.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        *age,
    ]


def reflection_handler() -> grpc.GenericRpcHandler:
    """The library's reflection of all services, as the link takes it too."""
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer([service.full_name for service in SERVICES]).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": handler})


def add_port(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Listen on an address, by TLS where there are credentials; return the port. Raises RuntimeError."""
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def system_reason(error: OSError, flag: str = "--port") -> str:
    """What the system says of a port, in parentheses, and what to do when it is in use; `flag` is the port's."""
    hint = f": another server runs there; stop it, or give {flag}" if error.errno == errno.EADDRINUSE else ""
    return f" ({error.strerror}){hint}"


def why_not_bound(host: str, port: int) -> str:
    """Why nothing can listen on the port of --port, as a plain socket reports it; gRPC does not."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        return system_reason(error)
    return ""
