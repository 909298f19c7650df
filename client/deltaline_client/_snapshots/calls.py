"""What is done with snapshots: create, find, list, renew, release, restore; and forks of sequences."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from deltaline.v1 import state_service_pb2 as pb
from deltaline_client._exceptions import ProtocolError, StateElsewhere, StepUnfinished
from deltaline_client._integers import check_integer
from deltaline_client._prefixes import Prefix, PrefixMatch
from deltaline_client._seconds import milliseconds
from deltaline_client._snapshots.snapshot import (
    ID_BYTES,
    AnySequence,
    AnySnapshot,
    SnapshotRecord,
    SnapshotsRecord,
    SnapshotState,
    holder_of,
    id_of,
)
from deltaline_client._state import ClientState, answerer, info, retried
from deltaline_client._steps.commit import commit
from deltaline_client._steps.hold import Group, Hold
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._steps.sequences import begin, check_name, describe
from deltaline_client._table import UNFINISHED
from deltaline_client._transport.flow import Flow, Method, Response, Server
from deltaline_client._transport.methods import (
    CREATE_SNAPSHOTS,
    FIND_SNAPSHOTS,
    FORK,
    LIST_SNAPSHOTS,
    RELEASE_SNAPSHOTS,
    RENEW_SNAPSHOTS,
    RESTORE,
)
from deltaline_client._transport.retry import MOST_MOVES

# Ids of one request.
_MAX_IDS = 4096

T = TypeVar("T")
StateResponse = TypeVar("StateResponse", pb.RenewSnapshotsResponse, pb.ReleaseSnapshotsResponse)

# On the snapshots of a client.


def create(
    snapshots: SnapshotsRecord[AnySnapshot],
    sequences: Sequence[SequenceRecord],
    *,
    pin: bool = False,
    lease_s: float | None = None,
    keys: Sequence[bytes | None] | None = None,
) -> Flow[list[AnySnapshot]]:
    """Capture the state of sequences, all or none; the sequences go on. Commits that wait for a step are made first.

    Args: pin, whether they stay when memory is short; lease_s, how long they live, default the server's; keys, that of
    each one's tokens so far (see Prefix), by which prompts find it, None for none.
    Raises NoSnapshotLines when there is no room in time; StepUnfinished, SequenceBusy; VerifyPending for a verify whose
    count was not given; SpansUneven; StateError.
    """
    client = snapshots._client
    if keys is not None and len(keys) != len(sequences):
        raise ValueError(f"keys: expected {len(sequences)}, one per sequence, got {len(keys)}")
    request = pb.CreateSnapshotsRequest(
        request_id=_new_id(),
        lease_ms=milliseconds("lease_s", lease_s),
        pinned=pin,
        prefix_key=[key or b"" for key in keys or ()],
    )
    response, at = yield from _captured(client, sequences, CREATE_SNAPSHOTS, request)
    if len(response.snapshots) != len(sequences):
        raise ProtocolError(f"asked for {len(sequences)} snapshots, got {len(response.snapshots)}")
    return [snapshots._make_snapshot(client, one, at) for one in response.snapshots]


def find(snapshots: SnapshotsRecord[Any], prefix: Prefix, *, adapter: str | None = None) -> Flow[PrefixMatch]:
    """What the server has stored of a prompt: the deepest state that it can go on from, or why there is none.

    adapter: that of the sequence that would go on; default none. Nothing changes: `open(prefix=...)` finds and begins
    in one call. Raises AdapterUnknown.
    """
    if not isinstance(prefix, Prefix):
        raise TypeError(f"prefix: expected a Prefix, got {type(prefix).__name__}")
    check_name("adapter", adapter)
    request = pb.FindSnapshotsRequest(prefix=prefix.message(), adapter=adapter or "")
    response = yield from retried(snapshots._client, FIND_SNAPSHOTS, request)
    return PrefixMatch.from_proto(response.match)


def list_snapshots(snapshots: SnapshotsRecord[AnySnapshot]) -> Flow[list[AnySnapshot]]:
    """The snapshots that the server holds for this client's principal, whoever made them, in the order of their ids.

    Of several servers behind one address: those of the one that the call comes to.
    """
    client, found, after, server = snapshots._client, list[AnySnapshot](), b"", None
    while True:
        page = yield from retried(client, LIST_SNAPSHOTS, pb.ListSnapshotsRequest(after=after), server)
        at = Server(page.server_epoch, page.server)
        found += [snapshots._make_snapshot(client, one, at) for one in page.snapshots]
        server = at if at.name else None
        if not page.has_more:
            return found
        if not page.snapshots or page.snapshots[-1].snapshot_id <= after:
            raise ProtocolError("a page of snapshots says that there are more, and leads nowhere")
        after = page.snapshots[-1].snapshot_id


def renew(
    snapshots: SnapshotsRecord[Any], which: Sequence[SnapshotRecord[Any] | bytes], lease_s: float | None = None
) -> Flow[list[SnapshotState]]:
    """Move lease deadlines to lease_s from now (default: the lease that each was made with).

    which: snapshots, or their ids. Returns what each is now: HELD, or what became of it.
    """
    lease_ms = milliseconds("lease_s", lease_s)

    def request(ids: list[bytes]) -> pb.RenewSnapshotsRequest:
        return pb.RenewSnapshotsRequest(request_id=_new_id(), snapshot_id=ids, lease_ms=lease_ms)

    return (yield from _states(snapshots._client, RENEW_SNAPSHOTS, request, which))


def release(snapshots: SnapshotsRecord[Any], which: Sequence[SnapshotRecord[Any] | bytes]) -> Flow[list[SnapshotState]]:
    """End snapshots; sequences that were restored from them go on. Idempotent; returns what each is now.

    which: snapshots, or their ids.
    """

    def request(ids: list[bytes]) -> pb.ReleaseSnapshotsRequest:
        return pb.ReleaseSnapshotsRequest(request_id=_new_id(), snapshot_id=ids)

    return (yield from _states(snapshots._client, RELEASE_SNAPSHOTS, request, which))


# On a snapshot.


def restore(
    snapshot: SnapshotRecord[AnySequence], count: int = 1, *, lease_s: float | None = None
) -> Flow[list[AnySequence]]:
    """Open `count` sequences that begin with the snapshot, all or none; the snapshot stays.

    lease_s: how long each lives without a step; default the server's. Raises SnapshotUnknown when it is held no more;
    NoFreeLines when so many do not become free in time.
    """
    client, make = snapshot._client, type(snapshot)._make_sequence
    yield from _check_count(client, count)
    lease_ms = milliseconds("lease_s", lease_s)
    request = pb.RestoreSequencesRequest(request_id=_new_id(), snapshot_id=[snapshot.id] * count, lease_ms=lease_ms)
    holder = holder_of(snapshot)
    response = yield from retried(client, RESTORE, request, holder)
    if len(response.sequences) != count:
        raise ProtocolError(f"asked for {count} sequences, got {len(response.sequences)}")
    at = answerer(response, holder)
    handles = [one.sequence for one in response.sequences]
    return begin(client, make, at, handles, snapshot.position, snapshot.adapter, snapshot.adapter_hash)


def renew_one(snapshot: SnapshotRecord[Any], lease_s: float | None = None) -> Flow[SnapshotState]:
    """Move the lease's deadline to lease_s from now (default: the lease it was made with); returns what it is now."""
    [state] = yield from renew(SnapshotsRecord(snapshot._client), [snapshot], lease_s)
    return state


def release_one(snapshot: SnapshotRecord[Any]) -> Flow[None]:
    """End the snapshot; sequences that were restored from it go on. Idempotent."""
    yield from release(SnapshotsRecord(snapshot._client), [snapshot])


# On a sequence.


def fork(sequence: AnySequence, count: int = 1, *, lease_s: float | None = None) -> Flow[list[AnySequence]]:
    """Open `count` sequences that begin where this one is, with its adapter, all or none; this one goes on.

    A commit that waits for a step is made first. lease_s: how long each lives without a step; default the server's.
    Raises NoFreeLines when so many do not become free in time; StepUnfinished, SequenceBusy; VerifyPending for a verify
    whose count was not given; SpansUneven; StateError.
    """
    client, make = sequence._client, type(sequence)
    yield from _check_count(client, count)
    lease_ms = milliseconds("lease_s", lease_s)
    request = pb.ForkSequencesRequest(request_id=_new_id(), count=count, lease_ms=lease_ms)
    response, at = yield from _captured(client, [sequence], FORK, request)
    if len(response.sequence) != count or len(response.position) != 1:
        raise ProtocolError(f"asked for {count} children, got {len(response.sequence)}")
    [position] = response.position
    at = answerer(response, at)
    return begin(client, make, at, response.sequence, position, sequence.adapter, sequence.adapter_hash)


def _captured(
    client: ClientState, sequences: Sequence[SequenceRecord], method: Method[Any, Response], request: Any
) -> Flow[tuple[Response, Server]]:
    """Call a method that captures sequences while no other call steps them. request: but for whose they are, and which.
    Gives who answered, too. Raises ValueError, StepUnfinished, SequenceBusy."""

    def work(at: Server, handles: list[int]) -> Flow[tuple[Response, Server]]:
        request.server_epoch = at.epoch
        request.sequence[:] = handles
        return (yield from retried(client, method, request, at)), at

    return (yield from while_held(client, sequences, work))


def while_held(
    client: ClientState, sequences: Sequence[SequenceRecord], work: Callable[[Server, list[int]], Flow[T]]
) -> Flow[T]:
    """Do work on sequences where they live, of one server process, and by their handles there, while no other call
    steps them; commits that wait for a step are made first. Work that finds them moved is begun again at their owner.
    Raises ValueError, StepUnfinished, SequenceBusy."""
    _home_of(sequences)  # before anything is sent
    spans = range(len((yield from info(client)).spans))
    for span in spans:
        waiting = [one for one in sequences if one.progress(span).accepted is not None]
        if waiting:
            accepted = [one.progress(span).accepted or 0 for one in waiting]
            yield from commit(client, waiting, accepted, now=True, span=span)
    with ExitStack() as held:
        for span in spans:
            hold = held.enter_context(Hold(Group.of(client, sequences), span))
            if hold.numbers[UNFINISHED].any():
                raise StepUnfinished("a step of this sequence has an unknown outcome; resume it first")
        for moves in range(MOST_MOVES + 1):
            at, handles = _home_of(sequences)
            try:
                return (yield from work(at, handles))
            except StateElsewhere as error:
                if not error.server or moves == MOST_MOVES:
                    raise
                yield from describe(client, sequences)  # the error tells of one of them; this follows all
                if _home_of(sequences) == (at, handles):
                    raise
    raise AssertionError("the last error was raised")


def _states(
    client: ClientState,
    method: Method[Any, StateResponse],
    request: Callable[[list[bytes]], Any],
    which: Sequence[SnapshotRecord[Any] | bytes],
) -> Flow[list[SnapshotState]]:
    """Ask about snapshots, each server that holds some, as many at a time as a request may have. Returns their states
    in order."""
    holders = list(map(holder_of, which))
    states: dict[int, SnapshotState] = {}
    for server in dict.fromkeys(holders):
        own = [index for index, holder in enumerate(holders) if holder == server]
        for first in range(0, len(own), _MAX_IDS):
            some = own[first : first + _MAX_IDS]
            response = yield from retried(client, method, request([id_of(which[index]) for index in some]), server)
            if len(response.state) != len(some) or not set(response.state) <= set(map(int, SnapshotState)):
                raise ProtocolError(f"asked about {len(some)} snapshots, got other answers")
            states.update(zip(some, map(SnapshotState, response.state), strict=True))
    return [states[index] for index in range(len(which))]


def _new_id() -> bytes:
    return secrets.token_bytes(ID_BYTES)


def _home_of(sequences: Sequence[SequenceRecord]) -> tuple[Server, list[int]]:
    """The server process that holds sequences, and their handles there. Raises ValueError."""
    homes = [one._home for one in sequences]
    holders = {home.at for home in homes}
    if len(holders) != 1:
        raise ValueError(f"sequences: expected some of one server process, got {len(sequences)} of {len(holders)}")
    return holders.pop(), [home.handle for home in homes]


def _check_count(client: ClientState, count: int) -> Flow[None]:
    """Raise TypeError or ValueError unless a server may open so many sequences in one call."""
    check_integer("count", count, 1)
    check_integer("count", count, 1, (yield from info(client)).max_sequences)
