"""Sequences that are moved: a client goes on where they live, as far as it may go there; and has them moved."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import state_service_pb2 as states
from deltaline_client._exceptions import DeltalineError, ProtocolError, StateElsewhere
from deltaline_client._seconds import MAX_SECONDS
from deltaline_client._state import ClientState, attempted, info
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._table import Home
from deltaline_client._transport.flow import Flow, MayGo, Server, call
from deltaline_client._transport.methods import MOVE
from deltaline_client._transport.statuses import from_status

_ID_BYTES = 16

Homes: TypeAlias = dict[SequenceRecord, Home]
"""Sequences that one server process holds, and where each lived as this was made."""


def by_server(sequences: Sequence[SequenceRecord], most: int) -> Iterator[tuple[Server, Homes]]:
    """Sequences by the server that holds them, so many at a time."""
    homes = {sequence: sequence._home for sequence in sequences}
    for server in dict.fromkeys(home.at for home in homes.values()):
        held = [item for item in homes.items() if item[1].at == server]
        for first in range(0, len(held), most):
            yield server, dict(held[first : first + most])


def followed(sequence: SequenceRecord, home: Home, error: DeltalineError) -> Flow[bool]:
    """A call about a sequence that lived at home failed: if it was moved and calls may go to its owner, they do so from
    now on. Gives whether the same call is to be made again, where the sequence lives now."""
    if not isinstance(error, StateElsewhere) or not error.server:
        return False
    owner = Server(error.server_epoch, error.server)
    may_go: bool = yield MayGo(owner)
    if may_go:
        sequence._table.move(sequence._slot, home, Home(owner, error.handle))
    else:
        cure = "name it in Client(..., servers=[...])"
        error.args = (f"the sequence lives at {error.server}, where this client may not go: {cure}",)
    return may_go


def elsewhere(moved: layers.MovedSequence) -> StateElsewhere:
    """What a reply tells of a sequence that was moved, as the error that tells the same."""
    numbers = {"server_epoch": str(moved.server_epoch), "sequence": str(moved.sequence)}
    return StateElsewhere("the sequence was moved to another server", metadata={"server": moved.server} | numbers)


class Moved(NamedTuple):
    """A sequence that was moved, and where it lives: its server's name, the process that holds it, its handle there."""

    sequence: SequenceRecord
    server: str
    server_epoch: int
    handle: int


class MoveError(DeltalineError):
    """Some sequences of a move stayed where they are, and go on there.

    errors: sequence to why it stayed. moved: the others.
    """

    def __init__(self, errors: Mapping[SequenceRecord, DeltalineError], moved: Sequence[Moved]) -> None:
        self.errors, self.moved = dict(errors), tuple(moved)
        first = next(iter(self.errors.values()))
        super().__init__(
            f"{len(self.errors)} of {len(self.errors) + len(self.moved)} sequences were not moved; the first: "
            f"{type(first).__name__}: {first}"
        )


def move(
    client: ClientState, sequences: Sequence[SequenceRecord], target: str, *, timeout_s: float | None = None
) -> Flow[list[Moved]]:
    """Have the servers that hold sequences move them to another, each by itself; they may be stepped meanwhile. Returns
    where each lives now, in order: there, or where it had been moved before.

    With their next call they go on there, without having to ask: the client may follow the target where its server
    tells that address as its own, else as `servers` and `tls` of the client have it; without TLS no token follows to
    another host. Sent again by itself, nothing is moved twice.

    Args: target, host:port, one of those that their servers were told; timeout_s, with all retries, default the
    client's.
    Raises MoveError when some could not be moved; the error itself, as MoveTargetRefused, when it ended the call.
    """
    if not isinstance(target, str):
        raise TypeError(f"target: expected an address, got {type(target).__name__}")
    client._caller.named.add(target)
    most = (yield from info(client)).max_sequences
    found: dict[SequenceRecord, Moved] = {}
    errors: dict[SequenceRecord, DeltalineError] = {}
    for server, homes in by_server(sequences, most):
        try:
            response = yield from _asked_to_move(client, server, homes, target, timeout_s)
        except DeltalineError as error:
            errors |= dict.fromkeys(homes, error)
            continue
        rows = list(homes)
        for one in response.moved:
            sequence = rows[one.row]
            yield from followed(sequence, homes[sequence], elsewhere(one))
            found[sequence] = Moved(sequence, one.server, one.server_epoch, one.sequence)
        errors |= {rows[refused.row]: from_status(refused.status) for refused in response.row_status}
    if errors and not found and len(set(errors.values())) == 1:
        raise next(iter(errors.values()))
    if errors:
        raise MoveError(errors, list(found.values()))
    return [found[sequence] for sequence in sequences]


def _asked_to_move(
    client: ClientState, server: Server, homes: Homes, target: str, timeout_s: float | None
) -> Flow[states.MoveSequencesResponse]:
    """What a server answers that is to move some of its sequences. Raises ProtocolError unless each has an answer."""
    request = states.MoveSequencesRequest(
        request_id=secrets.token_bytes(_ID_BYTES),
        server_epoch=server.epoch,
        sequence=[home.handle for home in homes.values()],
        target=target,
    )
    # No attempt is cut short to make another: a move takes as long as its states travel.
    attempts = client._attempts(timeout_s, replace(client._retry, attempt_timeout_s=MAX_SECONDS))
    response = yield from attempted(attempts, lambda left_s: call(MOVE, request, left_s, server), server)
    answered = sorted([one.row for one in response.moved] + [refused.row for refused in response.row_status])
    if answered != list(range(len(homes))):
        raise ProtocolError(f"asked for {len(homes)} sequences to be moved, got other answers")
    return response
