"""What the client returns about servers, sequences and time. Plain frozen values: no protobuf, no arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Literal, TypedDict

import numpy as np
from google.protobuf.message import Message

from deltaline import wire
from deltaline.v1 import admin_service_pb2, layer_service_pb2
from deltaline_client._exceptions import ProtocolError

Output = Literal["all", "last", "none"]
"""Which output rows a step returns: one per token, that of the last token, or none."""


def same_fields(kind: type, message: Message, converted: Collection[str] = ()) -> dict[str, Any]:
    """The values of a message for a dataclass whose fields have the same names, but for those that are converted."""
    return {one.name: getattr(message, one.name) for one in fields(kind) if one.name not in converted}


class StepOptions(TypedDict, total=False):
    """Keywords that every stepping method takes.

    span: index into ServerInfo.spans, default 0. priority: -8 .. 7, higher goes first, default 0. queue_timeout_s: how
    long the rows may wait for the device, default for ever. timeout_s: for the whole call with its retries, default the
    client's. copy: False for outputs that may be views of shared memory, which is the client's again once they are
    dropped; default True.
    """

    span: int
    priority: int
    queue_timeout_s: float | None
    timeout_s: float | None
    copy: bool


class RowOutcome(IntEnum):
    """What became of a row: computed now, answered from the kept reply, joined to one in flight, or not applied."""

    EXECUTED = layer_service_pb2.ROW_OUTCOME_EXECUTED
    REPLAYED = layer_service_pb2.ROW_OUTCOME_REPLAYED
    JOINED = layer_service_pb2.ROW_OUTCOME_JOINED
    REFUSED = layer_service_pb2.ROW_OUTCOME_REFUSED


class SequenceState(IntEnum):
    """The state of a sequence on the server."""

    OPEN = layer_service_pb2.SEQUENCE_STATE_OPEN
    CLOSING = layer_service_pb2.SEQUENCE_STATE_CLOSING
    POISONED = layer_service_pb2.SEQUENCE_STATE_POISONED
    CLOSED = layer_service_pb2.SEQUENCE_STATE_CLOSED
    EXPIRED = layer_service_pb2.SEQUENCE_STATE_EXPIRED
    LOST = layer_service_pb2.SEQUENCE_STATE_LOST
    UNKNOWN = layer_service_pb2.SEQUENCE_STATE_UNKNOWN
    ELSEWHERE = layer_service_pb2.SEQUENCE_STATE_ELSEWHERE


@dataclass(frozen=True)
class LayerSpan:
    """Contiguous layers that one step addresses: the first, and how many.

    input_streams, output_streams: residual streams of the hidden states that go in and come out, 0 for none.
    """

    first: int
    count: int
    input_streams: int = 0
    output_streams: int = 0


@dataclass(frozen=True)
class ServerInfo:
    """What is served, and the limits. Field meanings are those of deltaline.v1.GetServerInfoResponse.

    is_linked: whether this client's calls go by the local link.
    """

    server_epoch: int
    version: str
    model_type: str
    spans: tuple[LayerSpan, ...]
    scope: Literal["mixer", "block"]
    hidden_size: int
    dtype: np.dtype[Any]
    state_dtype: np.dtype[Any]
    max_sequences: int
    max_draft_tokens: int
    max_steps_in_flight: int
    inline_limit_bytes: int
    default_lease_s: float
    max_lease_s: float
    device: str
    sequence_state_bytes: int
    versions: Mapping[str, str]
    shared_memory_bytes: int
    adapter_bytes: int
    adapter_slots: int
    max_adapter_rank: int
    kv_pages: int
    kv_page_tokens: int
    kv_page_bytes: int
    max_context: int
    serves_state: bool
    snapshot_lines: int
    waypoint_tokens: int
    max_reply_bytes: int
    server: str
    is_linked: bool = False

    def input_shape(self, span: int = 0) -> tuple[int, ...]:
        """What one token is where it enters a span: (hidden_size,), or (streams, hidden_size)."""
        # For a span that the server does not have: the server refuses it, with its own message.
        streams = self.spans[span].input_streams if span < len(self.spans) else 0
        return (streams, self.hidden_size) if streams else (self.hidden_size,)

    def output_shape(self, span: int = 0) -> tuple[int, ...]:
        """What one token is where it leaves a span."""
        streams = self.spans[span].output_streams if span < len(self.spans) else 0
        return (streams, self.hidden_size) if streams else (self.hidden_size,)

    @classmethod
    def from_proto(cls, message: admin_service_pb2.GetServerInfoResponse) -> ServerInfo:
        """Read the server's answer. Raises ProtocolError for a type or scope that this version does not know."""
        try:
            dtype, state_dtype = wire.numpy_dtype(message.dtype), wire.numpy_dtype(message.state_dtype)
        except wire.WireError as error:
            raise ProtocolError(f"GetServerInfo: {error}") from error
        scopes: Mapping[int, Literal["mixer", "block"]] = {
            admin_service_pb2.SCOPE_MIXER: "mixer",
            admin_service_pb2.SCOPE_BLOCK: "block",
        }
        if message.scope not in scopes:
            raise ProtocolError("the server's scope is not known to this client")
        converted: dict[str, Any] = {
            "spans": tuple(LayerSpan(**same_fields(LayerSpan, span)) for span in message.spans),
            "scope": scopes[message.scope],
            "dtype": dtype,
            "state_dtype": state_dtype,
            "default_lease_s": message.default_lease_ms / 1000,
            "max_lease_s": message.max_lease_ms / 1000,
            "versions": dict(message.versions),
            "is_linked": False,
        }
        return cls(**converted, **same_fields(cls, message, converted))


@dataclass(frozen=True)
class ServerLoad:
    """How full the server is now. Field meanings are those of deltaline.v1.GetLoadResponse."""

    sequences_open: int
    lines_used: int
    lines_total: int
    queued_rows: int
    queued_rows_limit: int
    queued_bytes: int
    queued_bytes_limit: int
    reply_bytes: int
    reply_bytes_limit: int
    draining: bool
    kv_pages_used: int
    kv_pages_total: int

    @classmethod
    def from_proto(cls, message: admin_service_pb2.GetLoadResponse) -> ServerLoad:
        """Read the server's answer."""
        return cls(**same_fields(cls, message))


@dataclass(frozen=True)
class SpanProgress:
    """How far the server is with a sequence on one span."""

    step: int
    position: int
    steps_in_flight: int
    pending_tokens: int


@dataclass(frozen=True)
class SequenceDescription:
    """What the server holds of a sequence. spans is empty where it holds nothing, adapter None where there is none.

    adapter: the name under which it was opened, which may mean another one by now; adapter_hash identifies it.
    """

    state: SequenceState
    lease_remaining_s: float
    spans: tuple[SpanProgress, ...]
    adapter: str | None
    adapter_hash: bytes

    @classmethod
    def from_proto(cls, message: layer_service_pb2.SequenceDescription) -> SequenceDescription:
        """Read the server's answer."""
        return cls(
            state=SequenceState(message.state),
            lease_remaining_s=message.lease_remaining_ms / 1000,
            spans=tuple(SpanProgress(**same_fields(SpanProgress, span)) for span in message.spans),
            adapter=message.adapter or None,
            adapter_hash=message.adapter_hash,
        )


@dataclass(frozen=True)
class StepTiming:
    """Where the server's time went, seconds; sums when the client made several requests of one call.

    batch_rows and batch_tokens: size of the last batch on the device that carried a row of the call.
    """

    queue_s: float = 0.0
    copy_in_s: float = 0.0
    compute_s: float = 0.0
    copy_out_s: float = 0.0
    batch_rows: int = 0
    batch_tokens: int = 0

    @classmethod
    def of(cls, requests: Sequence[layer_service_pb2.StepTiming]) -> StepTiming:
        """Add up the times of requests, in the order of their answers."""
        if not requests:
            return cls()
        last = requests[-1]
        return cls(
            sum(one.queue_ns for one in requests) / 1e9,
            sum(one.copy_in_ns for one in requests) / 1e9,
            sum(one.compute_ns for one in requests) / 1e9,
            sum(one.copy_out_ns for one in requests) / 1e9,
            last.batch_rows,
            last.batch_tokens,
        )
