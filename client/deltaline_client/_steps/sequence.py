"""What the client remembers of a sequence, and of one row on its way to the server.

A Progress advances only when the server has answered that a step was applied. A RowProgress is one row of a call: it
may be cut into several consecutive steps (a prefill larger than a request may be), each a RowStep. While a step's
outcome is unknown its row stays in `Progress.unfinished`, so that exactly the same step can be sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deltaline.v1 import layer_service_pb2
from deltaline_client._arrays import Array, Shape
from deltaline_client._exceptions import (
    AcceptedOutOfRange,
    CommitConflict,
    DeltalineError,
    NothingToCommit,
    SequenceClosed,
    StepStale,
    StepUnfinished,
)
from deltaline_client._prefixes import PrefixMatch, Waypoint, Waypoints
from deltaline_client._state import ClientState
from deltaline_client._steps.places import Places
from deltaline_client._table import COMMIT, COMMIT_IN_DOUBT, HOLDER, PENDING, POSITION, STEP, UNFINISHED, Home
from deltaline_client._transport.flow import Flow
from deltaline_client._types import Output, RowOutcome

NO_COMMIT = -1


class Progress:
    """How far one span of a sequence is: a view of its slot, which changes as steps are done.

    step: steps done. position: tokens committed. pending_tokens: those of a verify that waits for its commit. accepted:
    the commit that waits for the next step, None for none. commit_in_doubt: it was sent by itself and no answer came.
    busy: a call holds this span now, see Hold. unfinished: the row whose next step has an unknown outcome, or None.
    """

    __slots__ = ("_ledger", "_sequence", "_span")

    def __init__(self, sequence: SequenceRecord, span: int) -> None:
        self._sequence, self._span = sequence, span
        self._ledger = sequence._table.ledger(span)

    def _read(self, column: int) -> int:
        return self._ledger.read(self._sequence._slot, column)

    @property
    def step(self) -> int:
        return self._read(STEP)

    @property
    def position(self) -> int:
        return self._read(POSITION)

    @property
    def pending_tokens(self) -> int:
        return self._read(PENDING)

    @property
    def accepted(self) -> int | None:
        count = self._read(COMMIT)
        return count - 1 if count else None

    @property
    def commit_in_doubt(self) -> bool:
        return bool(self._read(COMMIT_IN_DOUBT))

    @property
    def busy(self) -> bool:
        return bool(self._read(HOLDER))

    @property
    def unfinished(self) -> RowProgress | None:
        return self._sequence._unfinished.get(self._span)

    @property
    def next_position(self) -> int:
        """Committed tokens, the remembered commit counted as made."""
        return self.position + (self.accepted or 0)

    def write(self, columns: dict[int, int]) -> None:
        """Set numbers, by Column."""
        self._ledger.write(self._sequence._slot, columns)

    def remember(self, row: RowProgress | None) -> None:
        """Set the unfinished row."""
        if row is None:
            self._sequence._unfinished.pop(self._span, None)
        else:
            self._sequence._unfinished[self._span] = row
        self.write({UNFINISHED: row is not None})

    def check_commit(self, accepted: int) -> None:
        """Check an accepted count of the pending verify.

        Raises NothingToCommit, SequenceClosed where this client closed it, AcceptedOutOfRange, StepUnfinished while a
        step that may carry another count is unfinished, CommitConflict when another count may already have reached the
        server.
        """
        if self.unfinished is not None:
            raise StepUnfinished("a step of this sequence has an unknown outcome; resume it before the commit")
        if self.pending_tokens == 0:
            if self._sequence._is_closed:
                raise SequenceClosed("the sequence was closed")
            raise NothingToCommit("no verify waits for a commit")
        if not 0 <= accepted <= self.pending_tokens:
            raise AcceptedOutOfRange(f"accepted: expected 0 .. {self.pending_tokens}, got {accepted}")
        if self.commit_in_doubt and accepted != self.accepted:
            raise CommitConflict(f"{self.accepted} accepted tokens may already be committed, got {accepted}")

    def committed(self, position: int) -> None:
        """The server has made the remembered commit; `position` tokens are committed."""
        self.write({POSITION: position, PENDING: 0, COMMIT: 0, COMMIT_IN_DOUBT: 0})


class SequenceRecord:
    """A sequence that the server holds: its handle, and a view of the client's progress per span.

    server_epoch, server: the process that holds it, and its server's name, the address at which calls about the
    sequence go on where this client may follow it; "" where it told none. Where the sequence is moved they and the
    handle become those of its owner, as soon as a call learns of it.

    adapter: the name under which its adapter was opened, None for none. adapter_hash: that adapter's content_hash, b""
    for none; a name may come to mean another adapter, the sequence keeps the one that it was opened with. match: what
    its open found of the prompt whose keys it was given; None without keys, and of a server that knows none. waypoints:
    what became of the places that the last prefill with waypoints named, as far as the server has told; of several
    spans the last one's reply tells.
    """

    match: PrefixMatch | None = None
    waypoints: tuple[Waypoint, ...] = ()
    _is_closed = False

    def __init__(
        self,
        client: ClientState,
        slot: int,
        adapter: str | None = None,
        adapter_hash: bytes = b"",
    ) -> None:
        """slot: which `client._table` has taken for it."""
        self._client, self._table, self._slot = client, client._table, slot
        self._unfinished: dict[int, RowProgress] = {}
        self.adapter, self.adapter_hash = adapter, adapter_hash

    def __del__(self) -> None:
        if hasattr(self, "_slot"):
            self._table.drop(self._slot)

    def _run(self, flow: Flow[Any]) -> Any:
        return self._client._run(flow)

    @property
    def _home(self) -> Home:
        return self._table.home(self._slot)

    @property
    def handle(self) -> int:
        return self._home.handle

    @property
    def server_epoch(self) -> int:
        return self._home.at.epoch

    @property
    def server(self) -> str:
        return self._home.at.name

    def progress(self, span: int = 0) -> Progress:
        """The client's view of one span; it changes as steps are done."""
        return Progress(self, span)

    @property
    def position(self) -> int:
        """Committed tokens on span 0, a remembered commit counted as made: where the next step starts."""
        return self.progress().next_position

    @property
    def unfinished(self) -> bool:
        """True when a step on some span has an unknown outcome, so that `resume` has something to do."""
        return bool(self._unfinished)

    def __repr__(self) -> str:
        adapter = "" if self.adapter is None else f", adapter={self.adapter!r}"
        return f"{type(self).__name__}(handle={self.handle:#x}, position={self.position}{adapter})"


@dataclass(eq=False, slots=True)
class RowStep:
    """One step of a row: its tokens start .. start + count.

    number, position, accepted: as they go on the wire, fixed once and for all: a step sent again is the same step.
    in_doubt: it was sent and may have been applied. was_in_doubt: so it was before it was sent last. error: why it was
    not applied, when last sent. reply: its outputs (a view), the position after it, and its outcome. waypoints: those
    of its reply.
    """

    number: int
    position: int
    accepted: int
    start: int
    count: int
    in_doubt: bool = False
    was_in_doubt: bool = False
    error: DeltalineError | None = None
    reply: tuple[Array, int, RowOutcome] | None = None
    waypoints: Sequence[Waypoint] = ()


@dataclass(eq=False, slots=True)
class RowProgress:
    """One row of a call on its way: what to send, what came back.

    progress: of its sequence, which the row advances. home: where that lived when the row was sent last. hidden
    [n, *input_shape] in the server's type: it may share the caller's memory while the call lasts that made the row, and
    is a copy once the row is remembered. output_shape: of one token. steps: those that were cut from it and are not
    known to be applied, in order; more than one only when the row is larger than a request may be.
    tokens_done: how many of its tokens are applied. lost: set when steps were applied whose outputs can't be had any
    more; nothing more is cut then. places: where it leaves snapshots, None for nowhere. waypoints: what became of these
    so far.
    """

    sequence: SequenceRecord
    progress: Progress
    home: Home
    kind: layer_service_pb2.RowKind.ValueType
    hidden: Array
    output: Output
    output_shape: Shape
    steps: deque[RowStep] = field(default_factory=deque)
    tokens_done: int = 0
    result: Array | None = None
    outcome: RowOutcome = RowOutcome.REFUSED
    error: DeltalineError | None = None
    lost: DeltalineError | None = None
    places: Places | None = None
    waypoints: tuple[Waypoint, ...] = ()

    def leave(self, waypoints: Waypoints, grid: int) -> None:
        """Name where it leaves snapshots, before anything is cut. grid: ServerInfo.waypoint_tokens."""
        self.places = Places.of(waypoints, self.progress.next_position, len(self.hidden), grid)

    @property
    def is_one_step(self) -> bool:
        """Whether all its tokens must be one step: a verify is pending until it is committed."""
        return self.kind == layer_service_pb2.ROW_KIND_VERIFY

    @property
    def tokens_cut(self) -> int:
        """How many of its tokens are cut."""
        return self.steps[-1].start + self.steps[-1].count if self.steps else self.tokens_done

    @property
    def is_over(self) -> bool:
        """Whether every token is applied, or an error ended the row."""
        return self.error is not None or self.tokens_done == len(self.hidden)

    @property
    def next_error(self) -> DeltalineError | None:
        """Why its next step was not applied, while the row is not over."""
        return self.steps[0].error if self.steps and not self.is_over else None

    def is_same_as(self, other: RowProgress) -> bool:
        """Whether another row asks for the same: kind, tokens to the bit, outputs, snapshots."""
        return (
            self.kind == other.kind
            and (self.places and self.places.waypoints) == (other.places and other.places.waypoints)
            and self.output == other.output
            and self.hidden.shape == other.hidden.shape
            and np.array_equal(self.hidden.view(np.uint8), other.hidden.view(np.uint8))
        )

    def cut(self, count: int) -> RowStep:
        """Cut the next tokens off as a step, behind those that are under way: `count`, or fewer where places ask for
        that."""
        progress = self.progress
        if self.places is not None:
            count = self.places.cut(self.tokens_cut, count)
        if self.steps:
            last = self.steps[-1]
            step = RowStep(last.number + 1, last.position + last.count, NO_COMMIT, self.tokens_cut, count)
        else:
            accepted = NO_COMMIT if progress.accepted is None else progress.accepted
            step = RowStep(progress.step + 1, progress.next_position, accepted, self.tokens_cut, count)
        self.steps.append(step)
        return step

    def uncut(self) -> None:
        """Take back the steps that were cut, none of which was applied, to cut the tokens otherwise."""
        self.steps.clear()

    def output_of(self, step: RowStep) -> Output:
        """The outputs to request with a step: of the last token only the last step has any."""
        return "none" if self.output == "last" and step.start + step.count < len(self.hidden) else self.output

    def apply_replies(self) -> None:
        """Apply what was answered, in order, up to the first step that is not known to be applied.

        A step is there until it is noted as applied: interrupted in between, the same is noted once more.
        """
        steps = self.steps
        while steps and (steps[0].reply is not None or self._has_lost_its_reply(steps[0])):
            step = steps[0]
            if step.reply is None:
                position, self.outcome = self._end(step), RowOutcome.REPLAYED
                if self.output_of(step) != "none" and self.lost is None:
                    self._lose(step)
            else:
                output, position, self.outcome = step.reply
                if self.lost is None:
                    self._keep(step, output)
            self.progress.committed(position)
            self.progress.write({STEP: step.number, PENDING: step.count if self.is_one_step else 0})
            self.tokens_done = step.start + step.count
            steps.popleft()
            self.waypoints += tuple(step.waypoints)
        if self.lost is not None and not steps:
            self.error = self.lost

    def _lose(self, step: RowStep) -> None:
        first = step.position
        self.lost = StepStale(
            f"the tokens from position {first} on were applied, but the connection broke and their outputs are lost",
            metadata={"step": str(step.number), "position": str(first)},
        )
        if self.result is not None:
            self.result = self.result[: step.start]

    def _keep(self, step: RowStep, output: Array) -> None:
        if step.count == len(self.hidden) or self.output != "all":
            self.result = output
        else:
            if self.result is None:
                self.result = np.empty((len(self.hidden), *self.output_shape), self.hidden.dtype)
            self.result[step.start : step.start + step.count] = output

    def _end(self, step: RowStep) -> int:
        """The position after a step."""
        return step.position + (0 if self.is_one_step else step.count)

    def _has_lost_its_reply(self, step: RowStep) -> bool:
        """Whether a step was applied and its reply is no longer kept: a later one of this row was applied since.

        So it is when the server calls it stale, it had been sent before, and the server is where one of our steps ends.
        """
        if not step.was_in_doubt or not isinstance(step.error, StepStale):
            return False
        current = step.error.metadata.get("step"), step.error.metadata.get("position")
        return any((str(one.number), str(self._end(one))) == current for one in self.steps)

    def release(self) -> None:
        """The call is over: the sequence remembers the row if its next step may have been applied, or was and that is
        not noted. A step that is refused for good takes everything behind it along."""
        if self.places is not None:
            self.sequence.waypoints = self.waypoints
        is_unfinished = bool(self.steps) and (self.steps[0].in_doubt or self.steps[0].reply is not None)
        if is_unfinished and self.progress.unfinished is not self:
            self.hidden = self.hidden.copy()  # the caller may change its array now, and a resend must not
        self.progress.remember(self if is_unfinished else None)
