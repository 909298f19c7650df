"""What the client remembers of a sequence, and of one row on its way to the server. Sends nothing.

A Progress advances only when the server has answered that a step was applied. A Job is one row of a call: it may be cut
into several consecutive steps (a prefill larger than a request may be), each the next piece of the row. While a step's
outcome is unknown its job stays in `Progress.unfinished`, so that exactly the same step can be sent again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deltaline.v1 import layer_service_pb2
from deltaline_client._arrays import Array
from deltaline_client._exceptions import (
    AcceptedOutOfRange,
    CommitConflict,
    DeltalineError,
    NothingToCommit,
    SequenceBusy,
    StepUnfinished,
)
from deltaline_client._state import ClientState
from deltaline_client._types import Output, RowOutcome

NO_COMMIT = -1


@dataclass(eq=False)
class Progress:
    """How far one span of a sequence is: steps done, tokens committed, and what is pending.

    accepted: the commit that waits for the next step, None for none. commit_in_doubt: it was sent by itself and no
    answer came. busy: a call is stepping this span now.
    """

    step: int = 0
    position: int = 0
    pending_tokens: int = 0
    accepted: int | None = None
    commit_in_doubt: bool = False
    unfinished: Job | None = None
    busy: bool = False

    @property
    def next_position(self) -> int:
        """Committed tokens, the remembered commit counted as made."""
        return self.position + (self.accepted or 0)

    def check_commit(self, accepted: int) -> None:
        """Check an accepted count of the pending verify.

        Raises NothingToCommit, AcceptedOutOfRange, SequenceBusy during a step, StepUnfinished while a step that may
        carry another count is unfinished, CommitConflict when another count may already have reached the server.
        """
        if self.busy:
            raise SequenceBusy("another call is stepping this span of the sequence")
        if self.unfinished is not None:
            raise StepUnfinished("a step of this sequence has an unknown outcome; resume it before the commit")
        if self.pending_tokens == 0:
            raise NothingToCommit("no verify waits for a commit")
        if not 0 <= accepted <= self.pending_tokens:
            raise AcceptedOutOfRange(f"accepted: expected 0 .. {self.pending_tokens}, got {accepted}")
        if self.commit_in_doubt and accepted != self.accepted:
            raise CommitConflict(f"{self.accepted} accepted tokens may already be committed, got {accepted}")

    def committed(self, position: int) -> None:
        """The server has made the remembered commit; `position` tokens are committed."""
        self.position, self.pending_tokens = position, 0
        self.accepted, self.commit_in_doubt = None, False

    def acquire(self) -> None:
        """Begin a call. Raises SequenceBusy."""
        if self.busy:
            raise SequenceBusy("another call is stepping this span of the sequence")
        self.busy = True


class SequenceRecord:
    """A sequence that the server holds: its handle, and the client's view of its progress per span."""

    def __init__(self, client: ClientState, handle: int, server_epoch: int) -> None:
        self._client = client
        self.handle = handle
        self.server_epoch = server_epoch
        self._progress: dict[int, Progress] = {}

    def progress(self, span: int = 0) -> Progress:
        """The client's view of one span; it changes as steps are done."""
        found = self._progress.get(span)
        if found is None:
            found = self._progress.setdefault(span, Progress())
        return found

    @property
    def position(self) -> int:
        """Committed tokens on span 0, a remembered commit counted as made: where the next step starts."""
        return self.progress().next_position

    @property
    def unfinished(self) -> bool:
        """True when a step on some span has an unknown outcome, so that `resume` has something to do."""
        return any(progress.unfinished is not None for progress in self._progress.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(handle={self.handle:#x}, position={self.position})"


@dataclass(eq=False)
class Job:
    """One row of a call on its way: what to send, what came back.

    progress: what the job advances. hidden [n, hidden_size] in the server's type. tokens_done: how many of its tokens
    are applied. piece: tokens of the step under way. in_doubt: that step was sent and may have been applied.
    """

    sequence: SequenceRecord
    progress: Progress
    kind: layer_service_pb2.RowKind.ValueType
    hidden: Array
    output: Output
    tokens_done: int = 0
    piece: int = 0
    in_doubt: bool = False
    outputs: list[Array] = field(default_factory=list)
    outcome: RowOutcome = RowOutcome.REFUSED
    error: DeltalineError | None = None

    @property
    def is_over(self) -> bool:
        """True when every token is applied, or an error ended the job."""
        return self.error is not None or self.tokens_done == len(self.hidden)

    @property
    def accepted(self) -> int:
        """The commit that the step under way carries, -1 for none."""
        accepted = self.progress.accepted
        return NO_COMMIT if accepted is None else accepted

    def is_same_row(self, other: Job) -> bool:
        """Tell whether another job asks for the same: kind, tokens to the bit, outputs."""
        return (
            self.kind == other.kind
            and self.output == other.output
            and self.hidden.shape == other.hidden.shape
            and np.array_equal(self.hidden.view(np.uint8), other.hidden.view(np.uint8))
        )

    def next_piece(self, budget: int, limit: int) -> int:
        """Return how many tokens to send next when `budget` of a request's `limit` tokens are free; 0 to wait.

        A step in doubt is sent again as it was. A row is cut only when no request could carry what is left of it.
        """
        left = len(self.hidden) - self.tokens_done
        wanted = self.piece if self.in_doubt else left
        if wanted <= budget:
            return wanted
        return budget if left > limit and not self.in_doubt else 0

    def applied(self, output: Array, position: int, outcome: RowOutcome) -> None:
        """The server has applied the step under way: advance the job and its sequence."""
        progress = self.progress
        progress.committed(position)
        progress.step += 1
        if self.kind == layer_service_pb2.ROW_KIND_VERIFY:
            progress.pending_tokens = self.piece
        if self.output == "last":
            self.outputs.clear()
        self.outputs.append(output)
        self.tokens_done += self.piece
        self.outcome, self.in_doubt = outcome, False

    def leave(self) -> None:
        """The call is over, whatever became of the job: keep it if its last step may have been applied."""
        self.progress.unfinished = self if self.in_doubt else None
        self.progress.busy = False
