"""The client for threads: runs flows over gRPC or the local link."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any, Self, TypeVar, cast

from deltaline.address import with_port
from deltaline.tls import Tls
from deltaline_client._adapters import calls as adapter_calls
from deltaline_client._adapters.calls import AdaptersRecord
from deltaline_client._exceptions import DeltalineError
from deltaline_client._prefixes import Prefix, Reuse
from deltaline_client._snapshots import calls as snapshot_calls
from deltaline_client._snapshots import files as snapshot_files
from deltaline_client._snapshots.snapshot import SnapshotRecord, SnapshotsRecord, holder_of, id_of
from deltaline_client._state import ClientState, empty, info
from deltaline_client._steps import calls, moves, sequences
from deltaline_client._steps import commit as commits
from deltaline_client._steps import step as steps
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._transport.caller import Caller
from deltaline_client._transport.flow import (
    Call,
    Flow,
    Found,
    MayGo,
    Receive,
    Reroute,
    Send,
    Sleep,
    TakeMemory,
    blocking,
)
from deltaline_client._transport.retry import Retry
from deltaline_client._transport.token import Token
from deltaline_client._transport.transport import Transport

T = TypeVar("T")


class Client(ClientState):
    """A connection to one deltaline server.

        with Client("localhost:50051") as client, client.open() as sequence:
            outputs = sequence.prefill(hidden)      # [n, hidden_size] in, [n, hidden_size] out
            output = sequence.decode(outputs[-1])

    Where a span has residual streams, a token is [streams, hidden_size] in place of [hidden_size], in all arguments and
    results: `info().input_shape(span)` and `info().output_shape(span)` tell what it is at each end. Arrays may have any
    numeric type and are cast to the server's.

    Leaving `with Client` closes the channel, not the sequences: they live until they are closed, which leaving
    `with client.open()` does, or until their lease ends. So the sequences of a client that crashed keep their adapter
    from being unloaded until their lease ends.
    Threads may share a client; two calls at once on the same span of the same sequence raise SequenceBusy. A
    process that was forked since makes one of its own: calls of this one raise RuntimeError there.

    A client on the server's host goes by the server's local link, if it has one, without being told: `info().is_linked`
    says so. Where the link ends, calls go by gRPC. One that has a certificate or a token goes by the link only where
    that is its address: there a certificate counts for nothing.

    Args: address, "host" (its port is 50051), "host:port", "unix:/path" or "link:/path"; timeout, seconds for a call
    with all its retries; retry, see Retry; shared_memory_bytes, how much memory to share with a server on this host
    that allows it, for the tensors of steps: room for those of all steps at a time, their outputs too; 0 for none. The
    first call that needs it asks for it, and calls beside that one wait for it, no longer than their own timeout; tls,
    how it and the server know each other, None for plain text (see Tls); token, or token_file, which is read again when
    it changes: who it is to a server that asks; not in plain text to another host; servers, addresses at which calls
    may go on about what a server opened that tells one of them: None for any whose certificate verifies, and without
    TLS for none but targets of `move`; channels, how many connections of gRPC to each server its calls at a time
    are spread over: more than one where a server has front ends. Raises ValueError, TypeError.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 120.0,
        retry: Retry | None = None,
        shared_memory_bytes: int = 0,
        tls: Tls | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        servers: Iterable[str] | None = None,
        channels: int = 1,
    ) -> None:
        shown = Token.of(token, token_file, with_port(address), tls)
        super().__init__(timeout, retry or Retry(), shared_memory_bytes, Caller(shown))
        self._transport = Transport(address, tls, self._caller, servers, channels, on_leave=self._leave_link)

    def _run(self, flow: Flow[T]) -> T:
        """Drive a flow to its end, making its calls and waits."""
        session = self._transport.session()
        try:
            command = next(flow)
            while True:
                result: Any = None
                try:
                    if session.is_over:
                        session.close()
                        session = self._transport.session()
                    match command:
                        case Send():
                            session.send(command.number, command.request, command.server)
                        case Receive():
                            result = session.receive(command.timeout_s)
                        case Sleep():
                            time.sleep(command.seconds)
                        case Call():
                            result = session.call(command)
                        case Found():
                            result = self._transport.find(command)
                        case Reroute():
                            result = session.turn(command)
                        case MayGo():
                            result = session.may_go(command)
                        case TakeMemory():
                            result = session.memory(command)
                except DeltalineError as error:
                    command = flow.throw(error)
                else:
                    command = flow.send(result)
        except StopIteration as end:
            return cast(T, end.value)
        finally:
            flow.close()
            session.close()

    def open(
        self,
        *,
        lease_s: float | None = None,
        adapter: str | None = None,
        snapshot: Snapshot | bytes | None = None,
        prefix: Prefix | None = None,
        reuse: Reuse = "always",
    ) -> Sequence:
        """Open a sequence with zero state, or with that of a snapshot.

        lease_s: how long it lives without a step; default the server's. adapter: the name of one that is loaded, which
        the sequence has for as long as it lives; default none. snapshot: one, or its id; the sequence has its adapter.
        prefix: the keys of its prompt; it begins with the deepest state that the server has stored of that, if any, as
        `position` and `match` of the sequence tell; reuse="if_cheaper": with what is there soonest. Raises as
        open_many.
        """
        return self.open_many(1, lease_s=lease_s, adapter=adapter, snapshot=snapshot, prefix=prefix, reuse=reuse)[0]

    def open_many(
        self,
        count: int,
        *,
        lease_s: float | None = None,
        adapter: str | None = None,
        snapshot: Snapshot | bytes | None = None,
        prefix: Prefix | None = None,
        reuse: Reuse = "always",
    ) -> list[Sequence]:
        """Open `count` sequences with the same adapter, or the same snapshot, or for the same prompt, all or none.

        Raises NoFreeLines when so many do not become free in time; AdapterUnknown when no adapter has the name,
        SnapshotUnknown when the snapshot is not held; ValueError for a snapshot beside an adapter or a prefix.
        """
        snapshot_id = b"" if snapshot is None else id_of(snapshot)
        at = holder_of(snapshot)
        opening = sequences.open_sequences(self, Sequence, count, lease_s, adapter, snapshot_id, prefix, reuse, at)
        return self._run(opening)

    def load_sequence(
        self,
        source: str | os.PathLike[str] | bytes,
        *,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Sequence:
        """Open a sequence that goes on where one stood that was saved (`Sequence.save`, `export`): with
        the next step, or the commit of its last verify. Sent again by itself, it is opened once.

        source: a file's path, or the bytes. lease_s: how long it lives without a step; default the server's. timeout_s:
        with all retries, default the client's. Raises as Snapshots.load, and as open_many where there is no room.
        """
        return self._run(snapshot_files.load_sequence(self, Sequence, source, lease_s, timeout_s))

    @property
    def adapters(self) -> Adapters:
        """The adapters of the server: load, unload, list."""
        return Adapters(self)

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots of this client's principal: create, find, list, renew, release, load."""
        return Snapshots(self)

    step = blocking(steps.step)
    resume = blocking(steps.resume)
    prefill = blocking(calls.prefill)
    decode = blocking(calls.decode)
    verify = blocking(calls.verify)
    commit = blocking(commits.commit)
    close = blocking(sequences.close)
    describe = blocking(sequences.describe)
    move = blocking(moves.move)
    renew = blocking(sequences.renew)
    info = blocking(info)
    empty = blocking(empty)
    load = blocking(sequences.load)
    drain = blocking(sequences.drain)

    def disconnect(self) -> None:
        """Close the channel. Sequences stay open on the server; shared memory goes.

        Calls under way and later ones raise Disconnected; a step that was under way has an unknown outcome.
        """
        self._run(self._shared.end())
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disconnect()


class Adapters(AdaptersRecord):
    """The adapters of a server: what `Client.adapters` is.

    client.adapters.load("french", "path/of/a/peft/directory")
    with client.open(adapter="french") as sequence: ...
    """

    load = blocking(adapter_calls.load)
    unload = blocking(adapter_calls.unload)
    list = blocking(adapter_calls.list_adapters)


class Sequence(SequenceRecord):
    """One token stream whose state the server holds. Made by Client.open; as a context manager it closes itself."""

    prefill = blocking(calls.prefill_one)
    decode = blocking(calls.decode_one)
    verify = blocking(calls.verify_one)
    resume = blocking(calls.resume_one)
    commit = blocking(calls.commit_one)
    close = blocking(calls.close_one)
    fork = blocking(snapshot_calls.fork)
    export = blocking(snapshot_files.export_sequence)
    save = blocking(snapshot_files.save_sequence)

    def snapshot(self, *, key: bytes | None = None, pin: bool = False, lease_s: float | None = None) -> Snapshot:
        """Capture the state now; the sequence goes on. As Snapshots.create of this one; key: that of its tokens so far,
        by which prompts find it (see Prefix)."""
        snapshots = cast("Client", self._client).snapshots
        [made] = snapshots.create([self], pin=pin, lease_s=lease_s, keys=[key])
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, exception: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except DeltalineError:
            if exception is None:  # else the body's error matters more; the lease frees the state
                raise


class Snapshot(SnapshotRecord[Sequence]):
    """A state of a sequence that the server holds, to go on from any number of times. Made by Client.snapshots;
    as a context manager it releases itself. Else it lives until its lease ends."""

    _make_sequence = Sequence
    restore = blocking(snapshot_calls.restore)
    renew = blocking(snapshot_calls.renew_one)
    release = blocking(snapshot_calls.release_one)
    export = blocking(snapshot_files.export)
    save = blocking(snapshot_files.save)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, exception: BaseException | None, traceback: object) -> None:
        try:
            self.release()
        except DeltalineError:
            if exception is None:  # else the body's error matters more; the lease frees the state
                raise


class Snapshots(SnapshotsRecord[Snapshot]):
    """The snapshots of a client's principal: what `Client.snapshots` is.

    [snapshot] = client.snapshots.create([sequence])
    first, second = snapshot.restore(2)
    """

    _make_snapshot = Snapshot
    create = blocking(snapshot_calls.create)
    find = blocking(snapshot_calls.find)
    list = blocking(snapshot_calls.list_snapshots)
    renew = blocking(snapshot_calls.renew)
    release = blocking(snapshot_calls.release)
    load = blocking(snapshot_files.load)
