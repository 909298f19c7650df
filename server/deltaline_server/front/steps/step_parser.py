"""The parser of step messages: remembers what those of the same rows have in common, so that it is read once.

A decode loop sends the same message again and again but for its numbers and its tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltaline import wire
from deltaline.sizes import spelled_bytes
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import tensor_pb2
from deltaline_server.errors import Reason, RequestError
from deltaline_server.front.grpc_port import MESSAGE_SLACK_BYTES
from deltaline_server.front.steps.step_message import (
    Pattern,
    StepMessage,
    StreamStep,
    from_protobuf,
    scan_step,
    scan_stream_step,
)
from deltaline_server.front.steps.wire_scan import LENGTH_DELIMITED, bytes_beside

# Patterns that are remembered: a batch that is stepped again after so many others is scanned again.
MOST_PATTERNS = 128
# The most bytes of a message that a pattern keeps, those of some 3,000 rows: nobody has checked them yet, so that a
# message may have columns of any size.
MOST_BYTES = 64 << 10
# The first bytes of a message, in which lie the server's epoch, the span and the first handle: they tell batches apart.
KEY_BYTES = 28

_REQUEST, _TENSOR = pb.StepRequest, tensor_pb2.Tensor
_MESSAGES = [one.DESCRIPTOR for one in (pb.StepStreamRequest, _REQUEST, _TENSOR)]
# Where a tensor's bytes lie in a message, by the tags that lead there.
_IN_STEP = {
    _REQUEST.HIDDEN_FIELD_NUMBER << 3 | LENGTH_DELIMITED: {_TENSOR.INLINE_FIELD_NUMBER << 3 | LENGTH_DELIMITED: None}
}
_IN_STREAM_STEP = {pb.StepStreamRequest.STEP_FIELD_NUMBER << 3 | LENGTH_DELIMITED: _IN_STEP}


class StepParser:
    """Parses StepRequests and StepStreamRequests. For one thread."""

    def __init__(self, max_sequences: int) -> None:
        """max_sequences: the most rows of a step."""
        self._patterns: dict[bytes, Pattern] = {}
        # Each field once, and of those with entries, rows' or dimensions', each entry by itself.
        num_columns = sum(field.is_repeated for field in _REQUEST.DESCRIPTOR.fields)
        self._most_fields = sum(len(one.fields) for one in _MESSAGES) + num_columns * max_sequences + wire.MAX_RANK

    def parse_step(self, body: bytes) -> StepMessage:
        """Parse a StepRequest. Raises: DecodeError for bytes that are not one; RequestError MESSAGE_TOO_LARGE."""
        found = self._find(body, 0, len(body))
        if found is None:
            self._check(body, _IN_STEP)
            found = from_protobuf(pb.StepRequest.FromString(body))
        return found

    def parse_stream_step(self, body: bytes) -> StreamStep:
        """Parse a StepStreamRequest. Raises: DecodeError for bytes that are not one; RequestError MESSAGE_TOO_LARGE."""
        found = scan_stream_step(body)
        if found is not None:
            correlation_id, (begin, end), traceparent = found
            step = self._find(body, begin, end)
            if step is not None:
                return StreamStep(correlation_id, step, traceparent)
        self._check(body, _IN_STREAM_STEP)
        message = pb.StepStreamRequest.FromString(body)
        return StreamStep(message.correlation_id, from_protobuf(message.step), message.traceparent)

    def _check(self, body: bytes, inside: Mapping[int, Any]) -> None:
        """Refuse what no step needs, before protobuf makes many times as much of it."""
        num_bytes = bytes_beside(body, inside, self._most_fields)
        if num_bytes is None or num_bytes > MESSAGE_SLACK_BYTES:
            most = f"at most {self._most_fields} fields, and {spelled_bytes(MESSAGE_SLACK_BYTES)} beside its tensor"
            raise RequestError(Reason.MESSAGE_TOO_LARGE, f"expected a message of {most}")

    def _find(self, body: bytes, begin: int, end: int) -> StepMessage | None:
        """The StepRequest in body[begin:end] if it has the usual form, else None."""
        key = body[begin : begin + KEY_BYTES]
        pattern = self._patterns.get(key)
        if pattern is not None:
            message = pattern.match(body, begin, end)
            if message is not None:
                return message
        scanned = scan_step(body, begin, end)
        if scanned is None:
            return None
        pattern = Pattern(body, begin, end, *scanned)
        if pattern.num_bytes > MOST_BYTES:
            return scanned[0]
        self._patterns.pop(key, None)
        if len(self._patterns) == MOST_PATTERNS:
            del self._patterns[next(iter(self._patterns))]
        self._patterns[key] = pattern
        return scanned[0]._replace(pattern=pattern)
