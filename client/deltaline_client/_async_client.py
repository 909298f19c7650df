"""The client for asyncio: runs the same flows over gRPC or the local link."""

from __future__ import annotations

import asyncio
import os
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
from deltaline_client._transport.async_transport import AsyncTransport
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
    awaited,
)
from deltaline_client._transport.retry import Retry
from deltaline_client._transport.token import Token

T = TypeVar("T")


class AsyncClient(ClientState):
    """A connection to one deltaline server, for asyncio.

        async with AsyncClient("localhost:50051") as client, await client.open() as sequence:
            outputs = await sequence.prefill(hidden)
            output = await sequence.decode(outputs[-1])

    Methods and arguments are those of Client. It belongs to the event loop in which it is first used. A cancelled step
    has an unknown outcome: the sequence remembers it, see AsyncSequence.resume.
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
        self._transport = AsyncTransport(address, tls, self._caller, servers, channels, on_leave=self._leave_link)

    async def _run(self, flow: Flow[T]) -> T:
        """Drive a flow to its end, making its calls and waits."""
        session = await self._transport.session()
        try:
            command = next(flow)
            while True:
                result: Any = None
                try:
                    if session.is_over:
                        session.close()
                        session = await self._transport.session()
                    match command:
                        case Send():
                            session.send(command.number, command.request, command.server)
                        case Receive():
                            result = await session.receive(command.timeout_s)
                        case Sleep():
                            await asyncio.sleep(command.seconds)
                        case Call():
                            result = await session.call(command)
                        case Found():
                            result = await self._transport.find(command)
                        case Reroute():
                            result = session.turn(command)
                        case MayGo():
                            result = session.may_go(command)
                        case TakeMemory():
                            result = await session.memory(command)
                except DeltalineError as error:
                    command = flow.throw(error)
                else:
                    command = flow.send(result)
        except StopIteration as end:
            return cast(T, end.value)
        finally:
            flow.close()
            session.close()

    async def open(
        self,
        *,
        lease_s: float | None = None,
        adapter: str | None = None,
        snapshot: AsyncSnapshot | bytes | None = None,
        prefix: Prefix | None = None,
        reuse: Reuse = "always",
    ) -> AsyncSequence:
        """Open a sequence with zero state, or with that of a snapshot.

        lease_s: how long it lives without a step; default the server's. adapter: the name of one that is loaded, which
        the sequence has for as long as it lives; default none. snapshot: one, or its id; the sequence has its adapter.
        prefix: the keys of its prompt; it begins with the deepest state that the server has stored of that, if any, as
        `position` and `match` of the sequence tell; reuse="if_cheaper": with what is there soonest. Raises as
        open_many.
        """
        return (
            await self.open_many(1, lease_s=lease_s, adapter=adapter, snapshot=snapshot, prefix=prefix, reuse=reuse)
        )[0]

    async def open_many(
        self,
        count: int,
        *,
        lease_s: float | None = None,
        adapter: str | None = None,
        snapshot: AsyncSnapshot | bytes | None = None,
        prefix: Prefix | None = None,
        reuse: Reuse = "always",
    ) -> list[AsyncSequence]:
        """Open `count` sequences with the same adapter, or the same snapshot, or for the same prompt, all or none.

        Raises NoFreeLines when so many do not become free in time; AdapterUnknown when no adapter has the name,
        SnapshotUnknown when the snapshot is not held; ValueError for a snapshot beside an adapter or a prefix.
        """
        snapshot_id = b"" if snapshot is None else id_of(snapshot)
        at = holder_of(snapshot)
        opening = sequences.open_sequences(self, AsyncSequence, count, lease_s, adapter, snapshot_id, prefix, reuse, at)
        return await self._run(opening)

    async def load_sequence(
        self,
        source: str | os.PathLike[str] | bytes,
        *,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> AsyncSequence:
        """Open a sequence that goes on where one stood that was saved (`AsyncSequence.save`, `export`): with
        the next step, or the commit of its last verify. Sent again by itself, it is opened once.

        source: a file's path, or the bytes. lease_s: how long it lives without a step; default the server's. timeout_s:
        with all retries, default the client's. Raises as Snapshots.load, and as open_many where there is no room.
        """
        return await self._run(snapshot_files.load_sequence(self, AsyncSequence, source, lease_s, timeout_s))

    @property
    def adapters(self) -> AsyncAdapters:
        """The adapters of the server: load, unload, list."""
        return AsyncAdapters(self)

    @property
    def snapshots(self) -> AsyncSnapshots:
        """The snapshots of this client's principal: create, find, list, renew, release, load."""
        return AsyncSnapshots(self)

    step = awaited(steps.step)
    resume = awaited(steps.resume)
    prefill = awaited(calls.prefill)
    decode = awaited(calls.decode)
    verify = awaited(calls.verify)
    commit = awaited(commits.commit)
    close = awaited(sequences.close)
    describe = awaited(sequences.describe)
    move = awaited(moves.move)
    renew = awaited(sequences.renew)
    info = awaited(info)
    empty = awaited(empty)
    load = awaited(sequences.load)
    drain = awaited(sequences.drain)

    async def disconnect(self) -> None:
        """Close the channel. Sequences stay open on the server; shared memory goes.

        Calls under way and later ones raise Disconnected; a step that was under way has an unknown outcome.
        """
        await self._run(self._shared.end())
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.disconnect()


class AsyncAdapters(AdaptersRecord):
    """The adapters of a server: what `AsyncClient.adapters` is. Methods and arguments are those of Adapters."""

    load = awaited(adapter_calls.load)
    unload = awaited(adapter_calls.unload)
    list = awaited(adapter_calls.list_adapters)


class AsyncSequence(SequenceRecord):
    """One token stream whose state the server holds. Made by AsyncClient.open; `async with` closes it."""

    prefill = awaited(calls.prefill_one)
    decode = awaited(calls.decode_one)
    verify = awaited(calls.verify_one)
    resume = awaited(calls.resume_one)
    commit = awaited(calls.commit_one)
    close = awaited(calls.close_one)
    fork = awaited(snapshot_calls.fork)
    export = awaited(snapshot_files.export_sequence)
    save = awaited(snapshot_files.save_sequence)

    async def snapshot(
        self, *, key: bytes | None = None, pin: bool = False, lease_s: float | None = None
    ) -> AsyncSnapshot:
        """Capture the state now; the sequence goes on. As Snapshots.create of this one; key: that of its tokens so far,
        by which prompts find it (see Prefix)."""
        snapshots = cast("AsyncClient", self._client).snapshots
        [made] = await snapshots.create([self], pin=pin, lease_s=lease_s, keys=[key])
        return made

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, exception: BaseException | None, traceback: object) -> None:
        try:
            await self.close()
        except DeltalineError:
            if exception is None:  # else the body's error matters more; the lease frees the state
                raise


class AsyncSnapshot(SnapshotRecord[AsyncSequence]):
    """A state of a sequence that the server holds, to go on from any number of times. Made by AsyncClient.snapshots;
    `async with` releases it. Else it lives until its lease ends."""

    _make_sequence = AsyncSequence
    restore = awaited(snapshot_calls.restore)
    renew = awaited(snapshot_calls.renew_one)
    release = awaited(snapshot_calls.release_one)
    export = awaited(snapshot_files.export)
    save = awaited(snapshot_files.save)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, exception: BaseException | None, traceback: object) -> None:
        try:
            await self.release()
        except DeltalineError:
            if exception is None:  # else the body's error matters more; the lease frees the state
                raise


class AsyncSnapshots(SnapshotsRecord[AsyncSnapshot]):
    """The snapshots of a client's principal: what `AsyncClient.snapshots` is.

    Methods and arguments are those of Snapshots.
    """

    _make_snapshot = AsyncSnapshot
    create = awaited(snapshot_calls.create)
    find = awaited(snapshot_calls.find)
    list = awaited(snapshot_calls.list_snapshots)
    renew = awaited(snapshot_calls.renew)
    release = awaited(snapshot_calls.release)
    load = awaited(snapshot_files.load)
