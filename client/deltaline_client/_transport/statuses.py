"""What a google.rpc.Status means: the exception that mirrors it."""

from __future__ import annotations

from collections.abc import Mapping

from google.rpc import code_pb2, error_details_pb2, status_pb2

from deltaline_client._exceptions import (
    BY_REASON,
    AccessError,
    Cancelled,
    CapacityError,
    ConflictError,
    DeadlineExceeded,
    DeltalineError,
    ProtocolError,
    RequestError,
    ServerError,
    StateError,
    TransportError,
    Unavailable,
)

DOMAIN = "deltaline"

# What a status means when its reason is none that this version knows.
_FAMILY_BY_CODE: Mapping[int, type[DeltalineError]] = {
    code_pb2.INVALID_ARGUMENT: RequestError,
    code_pb2.RESOURCE_EXHAUSTED: CapacityError,
    code_pb2.NOT_FOUND: StateError,
    code_pb2.DATA_LOSS: StateError,
    code_pb2.FAILED_PRECONDITION: ConflictError,
    code_pb2.OUT_OF_RANGE: ConflictError,
    code_pb2.ABORTED: ConflictError,
    code_pb2.UNAUTHENTICATED: AccessError,
    code_pb2.PERMISSION_DENIED: AccessError,
}

_BY_TRANSPORT_CODE: Mapping[int, type[TransportError]] = {
    code_pb2.UNAVAILABLE: Unavailable,
    code_pb2.DEADLINE_EXCEEDED: DeadlineExceeded,
    code_pb2.CANCELLED: Cancelled,
}


def from_status(status: status_pb2.Status) -> DeltalineError:
    """Make the exception that mirrors a status.

    A status without a deltaline ErrorInfo did not come from the service (a proxy, the channel, a size limit): it
    becomes a TransportError, and the outcome of the call is unknown.
    """
    reason, metadata, retry_after_s = "", {}, None
    for detail in status.details:
        error_info, retry_info = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(error_info) and error_info.domain == DOMAIN:
            reason, metadata = error_info.reason, dict(error_info.metadata)
        elif detail.Unpack(retry_info):
            retry_after_s = retry_info.retry_delay.ToTimedelta().total_seconds()
    if not reason:
        return _BY_TRANSPORT_CODE.get(status.code, ProtocolError)(
            status.message or code_pb2.Code.Name(code_pb2.Code.ValueType(status.code)), retry_after_s=retry_after_s
        )
    error_type = BY_REASON.get(reason) or _FAMILY_BY_CODE.get(status.code, ServerError)
    error = error_type(status.message, metadata=metadata, retry_after_s=retry_after_s)
    error.reason = reason
    return error
