"""The errors of the client, each with the reason that the service gives for it.

    except deltaline_client.StateError:  # the state is gone: open a new sequence, prefill it again

DeltalineError
├── TransportError           no answer, or none that can be read: the outcome is unknown until the step is resumed
│   Unavailable, DeadlineExceeded, Cancelled, ProtocolError
├── RequestError             the request or one of its rows is wrong: fix the caller
│   InvalidRequest, InvalidTensor, InvalidBatch, DuplicateSequence, UnknownSpan, AcceptedOutOfRange, NonFiniteInput,
│   ContextExceeded, MessageTooLarge, ReplyTooLarge, InvalidAdapter, AdapterUnknown, InvalidWaypoint,
│   InvalidSharedMemory
├── CapacityError            the server is full: nothing ran, later it may
│   QueueDeadline, AdapterBytesExhausted, UploadTimeout, NoFreeLines, QueueFull, ReplyBytesExhausted,
│   TooManyInFlight, TooManyCalls, RepliesUnread, PagesExhausted, TooManyUnknown, QuotaExceeded, NoSnapshotLines,
│   SharedMemoryExhausted
├── StateError               the state of the sequence, or of a snapshot, is gone, or not where the call came
│   SequenceUnknown, SequenceClosed, SequenceExpired, StateLost, StateElsewhere, SnapshotUnknown, StateNotFinite,
│   StatePoisoned, StateDamaged
├── ConflictError            the caller and the server disagree about how far the sequence is
│   StepStale, StepGap, StepConflict, PositionMismatch, VerifyPending, NothingToCommit, CommitConflict,
│   SpanTooFarAhead, SpansUneven, PredecessorRefused, AdapterExists, AdapterInUse, AdaptersOff, StateMismatch,
│   HostTierOff, MoveTargetRefused, SharedMemoryOff, StepUnfinished, SequenceBusy
├── AccessError              the server does not know who calls, or does not let them: nothing ran
│   CredentialsMissing, CredentialsUnknown, TokenInPlaintext, RoleMissing
├── ServerError              the server is going away, or has a bug
│   Draining, Stopping, MoveFailed, Bug
├── Disconnected             raised here: the client was disconnected before or during the call
├── MoveError                some sequences of a move stayed (defined in `_steps.moves`)
└── StepError                some rows of a batch failed; carries the results of all of them (defined in `_steps.rows`)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_DECIMAL = re.compile(r"[1-9][0-9]{0,19}")

BY_REASON: dict[str, type[DeltalineError]] = {}
"""The service's reasons, and the exception that each is raised as."""


class DeltalineError(Exception):
    """Base of everything that this package raises about the service.

    reason: the server's, "" for none. metadata: current values, as {"step": "4"}. retry_after_s: when a retry may help.
    """

    reason: str = ""

    def __init_subclass__(cls, *, reason: str = "") -> None:
        if reason:
            cls.reason = reason
            BY_REASON[reason] = cls

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


class InvalidRequest(RequestError, reason="INVALID_REQUEST"):
    """A field of the request is out of its range."""


class InvalidTensor(RequestError, reason="INVALID_TENSOR"):
    """The hidden states have the wrong type, shape or size."""


class InvalidBatch(RequestError, reason="INVALID_BATCH"):
    """The arrays of the batch do not fit each other."""


class DuplicateSequence(RequestError, reason="DUPLICATE_SEQUENCE"):
    """A sequence is in the batch twice."""


class UnknownSpan(RequestError, reason="UNKNOWN_SPAN"):
    """The server has not declared this span."""


class AcceptedOutOfRange(RequestError, reason="ACCEPTED_OUT_OF_RANGE"):
    """More draft tokens accepted than were verified, or fewer than none."""


class NonFiniteInput(RequestError, reason="NON_FINITE_INPUT"):
    """The row's hidden states hold an infinity or a NaN."""


class ContextExceeded(RequestError, reason="CONTEXT_EXCEEDED"):
    """The sequence would have more tokens than the server's max_context."""


class MessageTooLarge(RequestError, reason="MESSAGE_TOO_LARGE"):
    """The message or its tensor is larger than the server takes inline, or the tensor than all that may wait there."""


class ReplyTooLarge(RequestError, reason="REPLY_TOO_LARGE"):
    """The reply might have more bytes than are taken; `metadata` tells reply_bytes and max_reply_bytes."""


class InvalidAdapter(RequestError, reason="INVALID_ADAPTER"):
    """The adapter's name or its files can't be taken; the message names the key or the tensor."""


class AdapterUnknown(RequestError, reason="ADAPTER_UNKNOWN"):
    """No adapter has this name (any more)."""


class InvalidWaypoint(RequestError, reason="INVALID_WAYPOINT"):
    """A prefill can't leave a state where it was asked to."""


class InvalidSharedMemory(RequestError, reason="INVALID_SHARED_MEMORY"):
    """A slice of shared memory is out of its region, or the server does not have the region (any more)."""


class CapacityError(DeltalineError):
    """The server is full; nothing ran."""


class QueueDeadline(CapacityError, reason="QUEUE_DEADLINE"):
    """The row waited longer for the device than it was allowed to."""


class AdapterBytesExhausted(CapacityError, reason="ADAPTER_BYTES_EXHAUSTED"):
    """The adapters in use leave too little memory for another."""


class UploadTimeout(CapacityError, reason="UPLOAD_TIMEOUT"):
    """The bytes of an adapter or a state did not reach the server in time."""


class NoFreeLines(CapacityError, reason="NO_FREE_LINES"):
    """Fewer state lines are free than sequences were asked for."""


class QueueFull(CapacityError, reason="QUEUE_FULL"):
    """Too many rows or bytes wait for the device."""


class ReplyBytesExhausted(CapacityError, reason="REPLY_BYTES_EXHAUSTED"):
    """The reply could not be kept for a retry, so the step was not begun."""


class TooManyInFlight(CapacityError, reason="TOO_MANY_IN_FLIGHT"):
    """Too many steps of one sequence are in flight."""


class TooManyCalls(CapacityError, reason="TOO_MANY_CALLS"):
    """As many calls are in flight as the server takes, of all clients or of this one."""


class RepliesUnread(CapacityError, reason="REPLIES_UNREAD"):
    """Replies to this client's connection wait to be read, more than the server keeps there."""


class PagesExhausted(CapacityError, reason="PAGES_EXHAUSTED"):
    """Too few pages of keys and values are free for the step; closing sequences frees theirs."""


class TooManyUnknown(CapacityError, reason="TOO_MANY_UNKNOWN"):
    """The connection named many sequences that the server does not have, or not for this caller."""


class QuotaExceeded(CapacityError, reason="QUOTA_EXCEEDED"):
    """The caller's principal has as much as it may; `metadata` tells quota, limit, used and asked."""


class NoSnapshotLines(CapacityError, reason="NO_SNAPSHOT_LINES"):
    """No line is free for a snapshot, and none that is held may give way."""


class SharedMemoryExhausted(CapacityError, reason="SHARED_MEMORY_EXHAUSTED"):
    """The server has no more memory to share."""


class StateError(DeltalineError):
    """The state of the sequence, or of the snapshot, is gone, or not where the call came."""


class SequenceUnknown(StateError, reason="SEQUENCE_UNKNOWN"):
    """Never opened here, or closed too long ago to be remembered."""


class SequenceClosed(StateError, reason="SEQUENCE_CLOSED"):
    """It was closed."""


class SequenceExpired(StateError, reason="SEQUENCE_EXPIRED"):
    """Its lease ran out."""


class StateLost(StateError, reason="STATE_LOST"):
    """The server process that held it is gone."""


class StateElsewhere(StateError, reason="STATE_ELSEWHERE"):
    """The call came to another server than the one that holds it, which may live; nothing was done.

    server, server_epoch, handle: where it was moved, as far as that was told; "" and 0 where it was not. A client
    follows by itself where it may go there.
    """

    def __init__(
        self, message: str, *, metadata: Mapping[str, str] | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, metadata=metadata, retry_after_s=retry_after_s)
        server, epoch, handle = map(self.metadata.get, ("server", "server_epoch", "sequence"))
        self.server, self.server_epoch, self.handle = "", 0, 0
        if server and all(number and _DECIMAL.fullmatch(number) and int(number) < 2**64 for number in (epoch, handle)):
            self.server, self.server_epoch, self.handle = server, int(epoch or 0), int(handle or 0)


class SnapshotUnknown(StateError, reason="SNAPSHOT_UNKNOWN"):
    """Never made for this caller, released, expired, or it gave way."""


class StateNotFinite(StateError, reason="STATE_NOT_FINITE"):
    """The state has a value that is not finite, so it is not captured."""


class StatePoisoned(StateError, reason="STATE_POISONED"):
    """A computation failed or gave a value that is not finite."""


class StateDamaged(StateError, reason="STATE_DAMAGED"):
    """What was to be imported is cut short, or not what was exported."""


class ConflictError(DeltalineError):
    """The caller and the server disagree about how far the sequence is."""


class StepStale(ConflictError, reason="STEP_STALE"):
    """The step was done long ago."""


class StepGap(ConflictError, reason="STEP_GAP"):
    """The step is not the next one."""


class StepConflict(ConflictError, reason="STEP_CONFLICT"):
    """The same step was sent before with other content."""


class PositionMismatch(ConflictError, reason="POSITION_MISMATCH"):
    """The server has committed another number of tokens."""


class VerifyPending(ConflictError, reason="VERIFY_PENDING"):
    """A verify waits for its commit."""


class NothingToCommit(ConflictError, reason="NOTHING_TO_COMMIT"):
    """No verify waits for a commit."""


class CommitConflict(ConflictError, reason="COMMIT_CONFLICT"):
    """Another accepted count was fixed for this verify before."""


class SpanTooFarAhead(ConflictError, reason="SPAN_TOO_FAR_AHEAD"):
    """Another span of the sequence is too far behind."""


class SpansUneven(ConflictError, reason="SPANS_UNEVEN"):
    """The spans of the sequence are at different positions, so it has no one state to capture."""


class PredecessorRefused(ConflictError, reason="PREDECESSOR_REFUSED"):
    """An earlier step in flight of the same sequence was refused, so this one was too."""


class AdapterExists(ConflictError, reason="ADAPTER_EXISTS"):
    """The name has an adapter with other content."""


class AdapterInUse(ConflictError, reason="ADAPTER_IN_USE"):
    """Sequences use the adapter."""


class AdaptersOff(ConflictError, reason="ADAPTERS_OFF"):
    """The server holds no adapters, or has no folder of them."""


class StateMismatch(ConflictError, reason="STATE_MISMATCH"):
    """What was to be imported is of another model or other settings, or of an adapter that is not loaded there."""


class HostTierOff(ConflictError, reason="HOST_TIER_OFF"):
    """The server has no host memory for states, by way of which they are exported and imported."""


class MoveTargetRefused(ConflictError, reason="MOVE_TARGET_REFUSED"):
    """The server moves nothing to such a target: it is not one of its peers, can't be reached or verified, or refuses
    it."""


class SharedMemoryOff(ConflictError, reason="SHARED_MEMORY_OFF"):
    """The server shares no memory."""


class StepUnfinished(ConflictError):
    """Raised here: an earlier step has an unknown outcome; resume it, or make the identical call again."""


class SequenceBusy(ConflictError):
    """Raised here: another call is stepping the same span of the sequence right now."""


class AccessError(DeltalineError):
    """The server does not know who calls, or does not let them; nothing ran."""


class CredentialsMissing(AccessError, reason="CREDENTIALS_MISSING"):
    """The server asks for a token or a client certificate."""


class CredentialsUnknown(AccessError, reason="CREDENTIALS_UNKNOWN"):
    """The token is wrong, or was taken out of use."""


class TokenInPlaintext(AccessError, reason="TOKEN_IN_PLAINTEXT"):
    """The token came to the server from another host without TLS: it has to be replaced."""


class RoleMissing(AccessError, reason="ROLE_MISSING"):
    """The caller's roles don't allow this call."""


class ServerError(DeltalineError):
    """The server is going away, or has a bug."""


class Draining(ServerError, reason="DRAINING"):
    """The server takes no new sequences."""


class Stopping(ServerError, reason="STOPPING"):
    """The server is stopping."""


class MoveFailed(ServerError, reason="MOVE_FAILED"):
    """A sequence was not moved: its target did not answer, or it could not be recorded. It goes on where it was."""


class Bug(ServerError, reason="BUG"):
    """Something failed inside the server."""


class Disconnected(DeltalineError):
    """The client was disconnected and sends nothing more; a call that was under way may have taken effect."""

    def __init__(self) -> None:
        super().__init__("the client was disconnected")
