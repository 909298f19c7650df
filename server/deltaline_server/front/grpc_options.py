"""gRPC's options for a server: every limit is explicit."""

from __future__ import annotations

from deltaline_server.config import Config

# What a message has besides its tensor.
MESSAGE_SLACK_BYTES = 1 << 20
MAX_METADATA_BYTES = 16 << 10


def grpc_options(config: Config) -> list[tuple[str, int]]:
    """gRPC's options: every limit is explicit, and clients may keep idle connections alive."""
    message_bytes = config.inline_limit_bytes + MESSAGE_SLACK_BYTES
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # Two servers on one port would each hold half of the sequences.
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Identity only: a small compressed message could unfold to any size.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]
