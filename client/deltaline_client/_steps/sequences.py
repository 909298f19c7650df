"""The life of sequences: open, close, describe, renew; and the server as a whole."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._exceptions import DeltalineError, ProtocolError, SnapshotUnknown
from deltaline_client._integers import UINT32_MAX, check_integer
from deltaline_client._prefixes import REUSE, Prefix, PrefixMatch, Reuse
from deltaline_client._seconds import milliseconds
from deltaline_client._state import ClientState, answerer, info, retried
from deltaline_client._steps.moves import by_server, elsewhere, followed
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._transport.flow import Flow, Method, Server
from deltaline_client._transport.methods import CLOSE, DESCRIBE, DRAIN, LOAD, OPEN, RENEW
from deltaline_client._transport.retry import MOST_MOVES
from deltaline_client._types import SequenceDescription, SequenceState, ServerLoad

S = TypeVar("S", bound=SequenceRecord)
T = TypeVar("T")

_log = logging.getLogger(__name__)
_TOKEN_BYTES = 16
# Sequences that one request asks about: of so many a reply fits 4 MiB, if they have no more than 400 spans.
_MAX_ASKED = 256
_LOST = layers.SEQUENCE_STATE_LOST

Make: TypeAlias = Callable[[ClientState, int, str | None, bytes], S]
"""Makes a sequence of a client, slot, adapter and adapter_hash."""


def open_sequences(
    client: ClientState,
    make: Make[S],
    count: int,
    lease_s: float | None,
    adapter: str | None,
    snapshot_id: bytes = b"",
    prefix: Prefix | None = None,
    reuse: Reuse = "always",
    server: Server | None = None,
) -> Flow[list[S]]:
    """Open `count` sequences, all or none; `make` makes the objects. server: which holds the snapshot, as far as that
    is known.

    Raises ProtocolError if the server has opened them without the adapter: it is too old to know any. SnapshotUnknown
    if it is too old to know snapshots.
    """
    check_integer("count", count, 1, UINT32_MAX)
    check_name("adapter", adapter)
    if adapter == "":
        raise ValueError("adapter: expected a name, or None for none, got an empty name")
    if adapter is not None and snapshot_id:
        raise ValueError("adapter: expected none beside a snapshot, whose sequences have its own")
    if not isinstance(prefix, Prefix | None):
        raise TypeError(f"prefix: expected a Prefix, or None for none, got {type(prefix).__name__}")
    if prefix is not None and snapshot_id:
        raise ValueError("prefix: expected none beside a snapshot, which the sequences begin with")
    if reuse not in REUSE:
        raise ValueError(f"reuse: expected one of {', '.join(REUSE)}, got {reuse!r}")
    if snapshot_id and not (yield from info(client)).serves_state:
        raise SnapshotUnknown("snapshot: the server keeps none")
    request = layers.OpenSequencesRequest(
        count=count,
        lease_ms=milliseconds("lease_s", lease_s),
        open_token=secrets.token_bytes(_TOKEN_BYTES),
        adapter=adapter or "",
        snapshot_id=snapshot_id,
        prefix=None if prefix is None else prefix.message(),
        reuse=REUSE[reuse],
    )
    response = yield from retried(client, OPEN, request, server)
    if len(response.sequence) != count:
        raise ProtocolError(f"asked for {count} sequences, got {len(response.sequence)}")
    at, adapter_hash = answerer(response, server), response.adapter_hash
    match = PrefixMatch.from_proto(response.match) if response.HasField("match") else None
    if snapshot_id:
        adapter = response.adapter or None
    sequences = begin(client, make, at, response.sequence, response.position, adapter, adapter_hash)
    for sequence in sequences:
        sequence.match = match
    if (adapter is not None) != bool(response.adapter_hash):
        yield from close(client, sequences)  # no one else has their handles
        raise ProtocolError("the server has not opened the sequences with the adapter that was asked for")
    return sequences


def check_name(what: str, name: object) -> None:
    """Raise TypeError unless it is a name, or None."""
    if not isinstance(name, str | None):
        raise TypeError(f"{what}: expected a name, or None for none, got {type(name).__name__}")


def begin(
    client: ClientState,
    make: Make[S],
    at: Server,
    handles: Sequence[int],
    position: int,
    adapter: str | None,
    adapter_hash: bytes,
) -> list[S]:
    """Make the objects of sequences that a server, `at`, has just opened, at a position on every span.

    Asks the server for nothing: a call that failed would lose them.
    """
    if client._info is not None and client._info.server_epoch != at.epoch and at.epoch not in client._table.epochs:
        client._info = None  # another process answers now; it may serve something else
    slots = client._table.take(handles, at, position)
    return [make(client, slot, adapter, adapter_hash) for slot in slots]


def close(client: ClientState, sequences: Sequence[SequenceRecord]) -> Flow[list[SequenceState]]:
    """End sequences and free their state. Idempotent; returns what each is now.

    Raises StateElsewhere where no call came to the server that holds them, as Unavailable where none was answered; all
    that can be closed are. One that is LOST of a server without a name may live: the log has a warning.
    """
    client._groups.clear()  # which would keep them
    states = yield from _asked(client, CLOSE, sequences, lambda response: response.state)
    for one, state in zip(sequences, states, strict=True):
        one._is_closed = state == layers.SEQUENCE_STATE_CLOSED
    unsure = [state for one, state in zip(sequences, states, strict=True) if not one.server and state == _LOST]
    if unsure:
        why = "another process answered than the one that opened them; if that lives, they stay until their leases end"
        _log.warning("%d sequences could not be closed: %s", len(unsure), why)
    return list(map(SequenceState, states))


def renew(
    client: ClientState, sequences: Sequence[SequenceRecord], lease_s: float | None = None
) -> Flow[list[SequenceState]]:
    """Move lease deadlines to lease_s from now (default: the lease they were opened with); returns what each is now.

    Every step renews the lease as well: this is for sequences that pause for longer than their lease. Raises
    StateElsewhere as `close`.
    """
    lease_ms = milliseconds("lease_s", lease_s)
    states = yield from _asked(client, RENEW, sequences, lambda response: response.state, lease_ms=lease_ms)
    return list(map(SequenceState, states))


def describe(client: ClientState, sequences: Sequence[SequenceRecord]) -> Flow[list[SequenceDescription]]:
    """What the server holds of each sequence. Changes nothing. Raises StateElsewhere as `close`."""
    described = yield from _asked(client, DESCRIBE, sequences, lambda response: response.sequences, attrgetter("state"))
    return list(map(SequenceDescription.from_proto, described))


def load(client: ClientState) -> Flow[ServerLoad]:
    """How full the server is now."""
    return ServerLoad.from_proto((yield from retried(client, LOAD, admin.GetLoadRequest())))


def drain(client: ClientState, timeout_s: float | None = None, *, target: str | None = None) -> Flow[int]:
    """Begin the server's drain and return how many sequences are still open.

    It opens no more sequences, steps the open ones for timeout_s (default: the server's own), then stops. Idempotent.
    target: the server to which they are moved meanwhile, as by `move`, whoever's they are; default none.
    """
    check_name("target", target)
    request = admin.DrainRequest(timeout_ms=milliseconds("timeout_s", timeout_s), target=target or "")
    return (yield from retried(client, DRAIN, request)).sequences_open


def _asked(
    client: ClientState,
    method: Method[Any, Any],
    sequences: Sequence[SequenceRecord],
    answers: Callable[[Any], Sequence[T]],
    state_of: Callable[[T], Any] = lambda state: state,
    **fields: int,
) -> Flow[list[T]]:
    """Ask about sequences, _MAX_ASKED at a time of each server that holds some. Returns the answers in their order.

    state_of: an answer's. Raises the error of the first server that could not be asked, once all others were.
    """
    found: dict[SequenceRecord, T] = {}

    def is_elsewhere(response: Any) -> bool:
        moved = {one.row for one in response.moved}
        states = map(state_of, answers(response))
        return any(state == layers.SEQUENCE_STATE_ELSEWHERE and row not in moved for row, state in enumerate(states))

    def ask(sequences: Sequence[SequenceRecord], moves: int) -> Flow[DeltalineError | None]:
        """Find the answers, of those that were moved at their owners; give the first error."""
        failed, moved = None, list[SequenceRecord]()
        for server, homes in by_server(sequences, _MAX_ASKED):
            handles = [home.handle for home in homes.values()]
            request = method.request_type(server_epoch=server.epoch, sequence=handles, **fields)
            try:
                response = yield from retried(client, method, request, server, is_elsewhere)
            except DeltalineError as error:
                failed = failed or error
                continue
            got = answers(response)
            if len(got) != len(homes):
                raise ProtocolError(f"asked about {len(homes)} sequences, got {len(got)} answers")
            owners = {one.row: elsewhere(one) for one in response.moved}
            for row, (sequence, answer) in enumerate(zip(homes, got, strict=True)):
                if row not in owners:
                    found[sequence] = answer
                elif moves and (yield from followed(sequence, homes[sequence], owners[row])):
                    moved.append(sequence)
                else:
                    failed = failed or owners[row]
        if moved:
            late = yield from ask(moved, moves - 1)
            failed = failed or late
        return failed

    failed = yield from ask(sequences, MOST_MOVES)
    if failed is not None:
        raise failed
    return [found[sequence] for sequence in sequences]
