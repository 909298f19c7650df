"""The errors of the service: each reason has one gRPC code, here and nowhere else.

A `Refusal` is a value: one row's or one sequence's fault under an OK RPC. A `RequestError` is raised: no row of the
request ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

DOMAIN = "deltaline"
# Python writes larger integers in powers of two alone.
_DECIMAL_BITS = 4096


class Code(IntEnum):
    """The values of google.rpc.Code that reasons travel with: whoever raises one needs no protobuf."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Reason(Enum):
    """A stable reason. Its value is the google.rpc.Code that it travels with, and a number among those of that code."""

    INVALID_REQUEST = (Code.INVALID_ARGUMENT, 1)
    INVALID_TENSOR = (Code.INVALID_ARGUMENT, 2)
    INVALID_BATCH = (Code.INVALID_ARGUMENT, 3)
    DUPLICATE_SEQUENCE = (Code.INVALID_ARGUMENT, 4)
    UNKNOWN_SPAN = (Code.INVALID_ARGUMENT, 5)
    ACCEPTED_OUT_OF_RANGE = (Code.INVALID_ARGUMENT, 6)
    NON_FINITE_INPUT = (Code.INVALID_ARGUMENT, 7)
    INVALID_WAYPOINT = (Code.INVALID_ARGUMENT, 8)
    REPLY_TOO_LARGE = (Code.INVALID_ARGUMENT, 9)
    INVALID_SHARED_MEMORY = (Code.INVALID_ARGUMENT, 21)
    INVALID_ADAPTER = (Code.INVALID_ARGUMENT, 31)
    MESSAGE_TOO_LARGE = (Code.RESOURCE_EXHAUSTED, 1)
    NO_FREE_LINES = (Code.RESOURCE_EXHAUSTED, 2)
    QUEUE_FULL = (Code.RESOURCE_EXHAUSTED, 3)
    REPLY_BYTES_EXHAUSTED = (Code.RESOURCE_EXHAUSTED, 4)
    TOO_MANY_IN_FLIGHT = (Code.RESOURCE_EXHAUSTED, 5)
    PAGES_EXHAUSTED = (Code.RESOURCE_EXHAUSTED, 6)
    TOO_MANY_CALLS = (Code.RESOURCE_EXHAUSTED, 7)
    REPLIES_UNREAD = (Code.RESOURCE_EXHAUSTED, 8)
    TOO_MANY_UNKNOWN = (Code.RESOURCE_EXHAUSTED, 9)
    QUOTA_EXCEEDED = (Code.RESOURCE_EXHAUSTED, 10)
    NO_SNAPSHOT_LINES = (Code.RESOURCE_EXHAUSTED, 11)
    SHARED_MEMORY_EXHAUSTED = (Code.RESOURCE_EXHAUSTED, 21)
    ADAPTER_BYTES_EXHAUSTED = (Code.RESOURCE_EXHAUSTED, 31)
    SEQUENCE_UNKNOWN = (Code.NOT_FOUND, 1)
    SEQUENCE_CLOSED = (Code.NOT_FOUND, 2)
    SEQUENCE_EXPIRED = (Code.NOT_FOUND, 3)
    STATE_LOST = (Code.NOT_FOUND, 4)
    SNAPSHOT_UNKNOWN = (Code.NOT_FOUND, 5)
    STATE_ELSEWHERE = (Code.NOT_FOUND, 6)
    ADAPTER_UNKNOWN = (Code.NOT_FOUND, 31)
    ADAPTER_EXISTS = (Code.ALREADY_EXISTS, 31)
    STEP_STALE = (Code.FAILED_PRECONDITION, 1)
    POSITION_MISMATCH = (Code.FAILED_PRECONDITION, 2)
    VERIFY_PENDING = (Code.FAILED_PRECONDITION, 3)
    NOTHING_TO_COMMIT = (Code.FAILED_PRECONDITION, 4)
    SPAN_TOO_FAR_AHEAD = (Code.FAILED_PRECONDITION, 5)
    SPANS_UNEVEN = (Code.FAILED_PRECONDITION, 6)
    STATE_MISMATCH = (Code.FAILED_PRECONDITION, 7)
    HOST_TIER_OFF = (Code.FAILED_PRECONDITION, 8)
    MOVE_TARGET_REFUSED = (Code.FAILED_PRECONDITION, 9)
    SHARED_MEMORY_OFF = (Code.FAILED_PRECONDITION, 21)
    ADAPTER_IN_USE = (Code.FAILED_PRECONDITION, 31)
    ADAPTERS_OFF = (Code.FAILED_PRECONDITION, 32)
    STEP_GAP = (Code.OUT_OF_RANGE, 1)
    CONTEXT_EXCEEDED = (Code.OUT_OF_RANGE, 2)
    STEP_CONFLICT = (Code.ABORTED, 1)
    COMMIT_CONFLICT = (Code.ABORTED, 2)
    PREDECESSOR_REFUSED = (Code.ABORTED, 3)
    QUEUE_DEADLINE = (Code.DEADLINE_EXCEEDED, 1)
    UPLOAD_TIMEOUT = (Code.DEADLINE_EXCEEDED, 31)
    STATE_POISONED = (Code.DATA_LOSS, 1)
    STATE_NOT_FINITE = (Code.DATA_LOSS, 2)
    STATE_DAMAGED = (Code.DATA_LOSS, 3)
    CREDENTIALS_MISSING = (Code.UNAUTHENTICATED, 1)
    CREDENTIALS_UNKNOWN = (Code.UNAUTHENTICATED, 2)
    TOKEN_IN_PLAINTEXT = (Code.UNAUTHENTICATED, 3)
    ROLE_MISSING = (Code.PERMISSION_DENIED, 1)
    DRAINING = (Code.UNAVAILABLE, 1)
    STOPPING = (Code.UNAVAILABLE, 2)
    MOVE_FAILED = (Code.UNAVAILABLE, 3)
    BUG = (Code.INTERNAL, 1)

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

    def of_row(self, row: int) -> Refusal:
        """The same, whose metadata tells of which row it speaks."""
        return replace(self, metadata={**self.metadata, "row": str(row)})


class RequestError(Exception):
    """A whole request is refused: no row of it ran.

    Raised by parsing, validation, admission and capacity; replies.py turns it into a google.rpc.Status.
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


def invalid(field: str, message: str) -> RequestError:
    """What refuses a request for the value of a field."""
    return RequestError(Reason.INVALID_REQUEST, f"{field}: {message}", field=field)


def shown(value: object) -> str:
    """A value for a message, in one line and cut short. It may be nested as deeply as JSON can be read."""
    try:
        text = hex(value) if isinstance(value, int) and value.bit_length() > _DECIMAL_BITS else repr(value)
    except RecursionError:  # there is less room here than there was when it was read
        text = "something nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."
