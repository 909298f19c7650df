"""The parser of step messages: remembers what those of the same rows have in common, so that it is read once.

A decode loop sends the same message again and again but for its numbers and its tensor.
"""

from __future__ import annotations

from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.front.steps.step_message import (
    Pattern,
    StepMessage,
    StreamStep,
    from_protobuf,
    scan_step,
    scan_stream_step,
)

# Patterns that are remembered: a batch that is stepped again after so many others is scanned again.
MOST_PATTERNS = 128
# The most bytes of a message that a pattern keeps, those of some 3,000 rows: nobody has checked them yet, so that a
# message may have columns of any size.
MOST_BYTES = 64 << 10
# The first bytes of a message, in which lie the server's epoch, the span and the first handle: they tell batches apart.
KEY_BYTES = 28


class StepParser:
    """Parses StepRequests and StepStreamRequests. For one thread."""

    def __init__(self) -> None:
        self._patterns: dict[bytes, Pattern] = {}

    def parse_step(self, body: bytes) -> StepMessage:
        """Parse a StepRequest. Raises: DecodeError for bytes that are not one."""
        return self._find(body, 0, len(body)) or from_protobuf(pb.StepRequest.FromString(body))

    def parse_stream_step(self, body: bytes) -> StreamStep:
        """Parse a StepStreamRequest. Raises: DecodeError for bytes that are not one."""
        found = scan_stream_step(body)
        if found is not None:
            correlation_id, (begin, end), traceparent = found
            step = self._find(body, begin, end)
            if step is not None:
                return StreamStep(correlation_id, step, traceparent)
        message = pb.StepStreamRequest.FromString(body)
        return StreamStep(message.correlation_id, from_protobuf(message.step), message.traceparent)

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
