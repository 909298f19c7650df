"""The errors of the service: each reason has one gRPC code, here and nowhere else.

Knows codes, reasons and messages; not how they travel (reply.py) nor who raises them. A `Refusal` is a value: one
row's or one sequence's fault under an OK RPC. A `RequestError` is raised: no row of the request ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from google.rpc import code_pb2

DOMAIN = "deltaline"


class Reason(Enum):
    """A stable reason; its value is the google.rpc.Code that it always travels with."""

    INVALID_REQUEST = (code_pb2.INVALID_ARGUMENT, 1)
    INVALID_TENSOR = (code_pb2.INVALID_ARGUMENT, 2)
    INVALID_BATCH = (code_pb2.INVALID_ARGUMENT, 3)
    DUPLICATE_SEQUENCE = (code_pb2.INVALID_ARGUMENT, 4)
    UNKNOWN_SPAN = (code_pb2.INVALID_ARGUMENT, 5)
    ACCEPTED_OUT_OF_RANGE = (code_pb2.INVALID_ARGUMENT, 6)
    NON_FINITE_INPUT = (code_pb2.INVALID_ARGUMENT, 7)
    INVALID_SHARED_MEMORY = (code_pb2.INVALID_ARGUMENT, 21)
    INVALID_ADAPTER = (code_pb2.INVALID_ARGUMENT, 31)
    MESSAGE_TOO_LARGE = (code_pb2.RESOURCE_EXHAUSTED, 1)
    NO_FREE_LINES = (code_pb2.RESOURCE_EXHAUSTED, 2)
    QUEUE_FULL = (code_pb2.RESOURCE_EXHAUSTED, 3)
    REPLY_BYTES_EXHAUSTED = (code_pb2.RESOURCE_EXHAUSTED, 4)
    TOO_MANY_IN_FLIGHT = (code_pb2.RESOURCE_EXHAUSTED, 5)
    PAGES_EXHAUSTED = (code_pb2.RESOURCE_EXHAUSTED, 6)
    SHARED_MEMORY_EXHAUSTED = (code_pb2.RESOURCE_EXHAUSTED, 21)
    ADAPTER_BYTES_EXHAUSTED = (code_pb2.RESOURCE_EXHAUSTED, 31)
    SEQUENCE_UNKNOWN = (code_pb2.NOT_FOUND, 1)
    SEQUENCE_CLOSED = (code_pb2.NOT_FOUND, 2)
    SEQUENCE_EXPIRED = (code_pb2.NOT_FOUND, 3)
    STATE_LOST = (code_pb2.NOT_FOUND, 4)
    ADAPTER_UNKNOWN = (code_pb2.NOT_FOUND, 31)
    ADAPTER_EXISTS = (code_pb2.ALREADY_EXISTS, 31)
    STEP_STALE = (code_pb2.FAILED_PRECONDITION, 1)
    POSITION_MISMATCH = (code_pb2.FAILED_PRECONDITION, 2)
    VERIFY_PENDING = (code_pb2.FAILED_PRECONDITION, 3)
    NOTHING_TO_COMMIT = (code_pb2.FAILED_PRECONDITION, 4)
    SPAN_TOO_FAR_AHEAD = (code_pb2.FAILED_PRECONDITION, 5)
    SHARED_MEMORY_OFF = (code_pb2.FAILED_PRECONDITION, 21)
    ADAPTER_IN_USE = (code_pb2.FAILED_PRECONDITION, 31)
    ADAPTERS_OFF = (code_pb2.FAILED_PRECONDITION, 32)
    STEP_GAP = (code_pb2.OUT_OF_RANGE, 1)
    CONTEXT_EXCEEDED = (code_pb2.OUT_OF_RANGE, 2)
    STEP_CONFLICT = (code_pb2.ABORTED, 1)
    COMMIT_CONFLICT = (code_pb2.ABORTED, 2)
    PREDECESSOR_REFUSED = (code_pb2.ABORTED, 3)
    QUEUE_DEADLINE = (code_pb2.DEADLINE_EXCEEDED, 1)
    UPLOAD_TIMEOUT = (code_pb2.DEADLINE_EXCEEDED, 31)
    STATE_POISONED = (code_pb2.DATA_LOSS, 1)
    DRAINING = (code_pb2.UNAVAILABLE, 1)
    STOPPING = (code_pb2.UNAVAILABLE, 2)
    BUG = (code_pb2.INTERNAL, 1)

    @property
    def code(self) -> int:
        """The google.rpc.Code of this reason."""
        return int(self.value[0])


@dataclass(frozen=True)
class Refusal:
    """Why one row, one sequence or a whole request was refused.

    message: one sentence for a person, without paths, pointers, class names or other sequences' handles.
    metadata: current values, e.g. {"step": "4", "position": "12"}.
    field: the request field at fault ("" for none), sent as a BadRequest violation with INVALID_ARGUMENT.
    retry_after_s: set where the same request may succeed later; sent as RetryInfo.
    """

    reason: Reason
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    field: str = ""
    retry_after_s: float | None = None


class RequestError(Exception):
    """A whole request is refused: no row of it ran.

    Raised by parsing, validation, admission and capacity; reply.py turns it into a google.rpc.Status.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.refusal = Refusal(reason, message, metadata or {}, field, retry_after_s)
