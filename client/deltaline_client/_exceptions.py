"""The errors of the client, each with the reason that the service gives for it.

    except deltaline_client.StateError:  # the state is gone: open a new sequence, prefill it again

DeltalineError
├── TransportError           no answer, or none that can be read: the outcome is unknown until the step is resumed
│   ├── Unavailable
│   ├── DeadlineExceeded
│   ├── Cancelled
│   └── ProtocolError
├── RequestError             the request or one of its rows is wrong: fix the caller
│   ├── InvalidRequest
│   ├── InvalidTensor
│   ├── InvalidBatch
│   ├── DuplicateSequence
│   ├── UnknownSpan
│   ├── AcceptedOutOfRange
│   ├── NonFiniteInput
│   ├── ContextExceeded
│   ├── MessageTooLarge
│   ├── InvalidAdapter
│   ├── AdapterUnknown
│   └── InvalidSharedMemory
├── CapacityError            the server is full: nothing ran, later it may
│   ├── QueueDeadline
│   ├── AdapterBytesExhausted
│   ├── UploadTimeout
│   ├── NoFreeLines
│   ├── QueueFull
│   ├── ReplyBytesExhausted
│   ├── TooManyInFlight
│   ├── PagesExhausted
│   └── SharedMemoryExhausted
├── StateError               the state of the sequence is gone
│   ├── SequenceUnknown
│   ├── SequenceClosed
│   ├── SequenceExpired
│   ├── StateLost
│   └── StatePoisoned
├── ConflictError            the caller and the server disagree about how far the sequence is
│   ├── StepStale
│   ├── StepGap
│   ├── StepConflict
│   ├── PositionMismatch
│   ├── VerifyPending
│   ├── NothingToCommit
│   ├── CommitConflict
│   ├── SpanTooFarAhead
│   ├── PredecessorRefused
│   ├── AdapterExists
│   ├── AdapterInUse
│   ├── AdaptersOff
│   ├── SharedMemoryOff
│   ├── StepUnfinished       raised here: an earlier step has an unknown outcome and must be resumed first
│   └── SequenceBusy         raised here: another call is stepping this sequence right now
├── ServerError              the server is going away, or has a bug
│   ├── Draining
│   ├── Stopping
│   └── Bug
├── Disconnected             raised here: the client was disconnected before or during the call
└── StepError                some rows of a batch failed; carries the results of all of them (defined in `_steps.rows`)
"""

from __future__ import annotations

from collections.abc import Mapping


class DeltalineError(Exception):
    """Base of everything that this package raises about the service.

    reason: the server's, "" for none. metadata: current values, as {"step": "4"}. retry_after_s: when a retry may help.
    """

    reason: str = ""

    def __init__(
        self, message: str, *, metadata: Mapping[str, str] | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.metadata, self.retry_after_s = dict(metadata or {}), retry_after_s


class TransportError(DeltalineError):
    """No answer that can be read came from the server; the call may have taken effect."""


class Unavailable(TransportError):
    """The server could not be reached, or the connection broke."""


class DeadlineExceeded(TransportError):
    """No answer in time."""


class Cancelled(TransportError):
    """The call was cancelled on the way."""


class ProtocolError(TransportError):
    """The answer contradicts the protocol, or no deltaline server gave it."""


class RequestError(DeltalineError):
    """The request or one of its rows is wrong."""


class InvalidRequest(RequestError):
    """A field of the request is out of its range."""

    reason = "INVALID_REQUEST"


class InvalidTensor(RequestError):
    """The hidden states have the wrong type, shape or size."""

    reason = "INVALID_TENSOR"


class InvalidBatch(RequestError):
    """The arrays of the batch do not fit each other."""

    reason = "INVALID_BATCH"


class DuplicateSequence(RequestError):
    """A sequence is in the batch twice."""

    reason = "DUPLICATE_SEQUENCE"


class UnknownSpan(RequestError):
    """The server has not declared this span."""

    reason = "UNKNOWN_SPAN"


class AcceptedOutOfRange(RequestError):
    """More draft tokens accepted than were verified, or fewer than none."""

    reason = "ACCEPTED_OUT_OF_RANGE"


class NonFiniteInput(RequestError):
    """The row's hidden states hold an infinity or a NaN."""

    reason = "NON_FINITE_INPUT"


class ContextExceeded(RequestError):
    """The sequence would have more tokens than the server's max_context."""

    reason = "CONTEXT_EXCEEDED"


class MessageTooLarge(RequestError):
    """The tensor is larger than the server takes inline, or than all that may wait there."""

    reason = "MESSAGE_TOO_LARGE"


class InvalidAdapter(RequestError):
    """The adapter's name or its files can't be taken; the message names the key or the tensor."""

    reason = "INVALID_ADAPTER"


class AdapterUnknown(RequestError):
    """No adapter has this name (any more)."""

    reason = "ADAPTER_UNKNOWN"


class InvalidSharedMemory(RequestError):
    """A slice of shared memory is out of its region, or the server does not have the region (any more)."""

    reason = "INVALID_SHARED_MEMORY"


class CapacityError(DeltalineError):
    """The server is full; nothing ran."""


class QueueDeadline(CapacityError):
    """The row waited longer for the device than it was allowed to."""

    reason = "QUEUE_DEADLINE"


class AdapterBytesExhausted(CapacityError):
    """The adapters in use leave too little memory for another."""

    reason = "ADAPTER_BYTES_EXHAUSTED"


class UploadTimeout(CapacityError):
    """The bytes of an adapter did not reach the server in time."""

    reason = "UPLOAD_TIMEOUT"


class NoFreeLines(CapacityError):
    """Fewer state lines are free than sequences were asked for."""

    reason = "NO_FREE_LINES"


class QueueFull(CapacityError):
    """Too many rows or bytes wait for the device."""

    reason = "QUEUE_FULL"


class ReplyBytesExhausted(CapacityError):
    """The reply could not be kept for a retry, so the step was not begun."""

    reason = "REPLY_BYTES_EXHAUSTED"


class TooManyInFlight(CapacityError):
    """Too many steps of one sequence are in flight."""

    reason = "TOO_MANY_IN_FLIGHT"


class PagesExhausted(CapacityError):
    """Too few pages of keys and values are free for the step; closing sequences frees theirs."""

    reason = "PAGES_EXHAUSTED"


class SharedMemoryExhausted(CapacityError):
    """The server has no more memory to share."""

    reason = "SHARED_MEMORY_EXHAUSTED"


class StateError(DeltalineError):
    """The state of the sequence is gone; open a new one."""


class SequenceUnknown(StateError):
    """Never opened here, or closed too long ago to be remembered."""

    reason = "SEQUENCE_UNKNOWN"


class SequenceClosed(StateError):
    """It was closed."""

    reason = "SEQUENCE_CLOSED"


class SequenceExpired(StateError):
    """Its lease ran out."""

    reason = "SEQUENCE_EXPIRED"


class StateLost(StateError):
    """The server process that held it is gone."""

    reason = "STATE_LOST"


class StatePoisoned(StateError):
    """A computation failed or gave a value that is not finite."""

    reason = "STATE_POISONED"


class ConflictError(DeltalineError):
    """The caller and the server disagree about how far the sequence is."""


class StepStale(ConflictError):
    """The step was done long ago."""

    reason = "STEP_STALE"


class StepGap(ConflictError):
    """The step is not the next one."""

    reason = "STEP_GAP"


class StepConflict(ConflictError):
    """The same step was sent before with other content."""

    reason = "STEP_CONFLICT"


class PositionMismatch(ConflictError):
    """The server has committed another number of tokens."""

    reason = "POSITION_MISMATCH"


class VerifyPending(ConflictError):
    """A verify waits for its commit."""

    reason = "VERIFY_PENDING"


class NothingToCommit(ConflictError):
    """No verify waits for a commit."""

    reason = "NOTHING_TO_COMMIT"


class CommitConflict(ConflictError):
    """Another accepted count was fixed for this verify before."""

    reason = "COMMIT_CONFLICT"


class SpanTooFarAhead(ConflictError):
    """Another span of the sequence is too far behind."""

    reason = "SPAN_TOO_FAR_AHEAD"


class PredecessorRefused(ConflictError):
    """An earlier step in flight of the same sequence was refused, so this one was too."""

    reason = "PREDECESSOR_REFUSED"


class AdapterExists(ConflictError):
    """The name has an adapter with other content."""

    reason = "ADAPTER_EXISTS"


class AdapterInUse(ConflictError):
    """Sequences use the adapter."""

    reason = "ADAPTER_IN_USE"


class AdaptersOff(ConflictError):
    """The server holds no adapters, or has no folder of them."""

    reason = "ADAPTERS_OFF"


class SharedMemoryOff(ConflictError):
    """The server shares no memory."""

    reason = "SHARED_MEMORY_OFF"


class StepUnfinished(ConflictError):
    """An earlier step of the sequence has an unknown outcome: resume it, or make the identical call again."""


class SequenceBusy(ConflictError):
    """Another call is stepping the same span of the sequence right now."""


class ServerError(DeltalineError):
    """The server is going away, or has a bug."""


class Draining(ServerError):
    """The server takes no new sequences."""

    reason = "DRAINING"


class Stopping(ServerError):
    """The server is stopping."""

    reason = "STOPPING"


class Bug(ServerError):
    """Something failed inside the server."""

    reason = "BUG"


class Disconnected(DeltalineError):
    """The client was disconnected and sends nothing more; a call that was under way may have taken effect."""

    def __init__(self) -> None:
        super().__init__("the client was disconnected")
