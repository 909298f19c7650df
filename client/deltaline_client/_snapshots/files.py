"""States as files, or their bytes: snapshots' and whole sequences', brought from one server to another of a model."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from deltaline.v1 import state_service_pb2 as pb
from deltaline_client._exceptions import ProtocolError
from deltaline_client._seconds import MAX_SECONDS, milliseconds
from deltaline_client._snapshots.calls import while_held
from deltaline_client._snapshots.snapshot import (
    ID_BYTES,
    AnySequence,
    AnySnapshot,
    SnapshotRecord,
    SnapshotsRecord,
    holder_of,
)
from deltaline_client._state import ClientState, attempted, info
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._steps.sequences import Make, begin
from deltaline_client._table import PENDING, POSITION, STEP
from deltaline_client._transport.flow import Flow, Server, call, stream
from deltaline_client._transport.methods import EXPORT_STATE, IMPORT_STATE
from deltaline_client._transport.retry import Attempts

# As an adapter's: over the loopback 620 MiB/s, and with more no faster.
CHUNK_BYTES = 1 << 20


def export(snapshot: SnapshotRecord[Any], *, timeout_s: float | None = None) -> Flow[bytes]:
    """The snapshot's state as the bytes of a file, to be loaded into this or another server of the same model and
    settings (`Snapshots.load`); the snapshot stays.

    timeout_s: with all retries, default the client's. Raises SnapshotUnknown when it is held no more; HostTierOff;
    NoSnapshotLines when host memory has no room for it in time.
    """
    return (yield from _exported(*_of_snapshot(snapshot), timeout_s))


def save(snapshot: SnapshotRecord[Any], path: str | os.PathLike[str], *, timeout_s: float | None = None) -> Flow[None]:
    """Write the snapshot's state to a file of this machine, whole or not at all. As `export`; raises OSError too."""
    yield from _saved(*_of_snapshot(snapshot), path, timeout_s)


def export_sequence(sequence: SequenceRecord, *, timeout_s: float | None = None) -> Flow[bytes]:
    """The whole sequence as the bytes of a file, to be opened as another by this or another server of the same model
    and settings (`load_sequence`): with its steps, and a verify that waits for its count. A commit that waits for a
    step is made first. This sequence stays: close it, or step it no more, where the other is to take its place.

    timeout_s: with all retries, default the client's. Raises StepUnfinished, SequenceBusy; StateError; HostTierOff;
    NoSnapshotLines when host memory has no room for it in time.
    """
    client = sequence._client

    def work(at: Server, handles: list[int]) -> Flow[bytes]:
        return _exported(client, _of_sequence(at, handles), at, timeout_s)

    return (yield from while_held(client, [sequence], work))


def save_sequence(
    sequence: SequenceRecord, path: str | os.PathLike[str], *, timeout_s: float | None = None
) -> Flow[None]:
    """Write the whole sequence to a file of this machine, whole or not at all. As `export`; raises OSError too."""
    client = sequence._client

    def work(at: Server, handles: list[int]) -> Flow[None]:
        return _saved(client, _of_sequence(at, handles), at, path, timeout_s)

    yield from while_held(client, [sequence], work)


def load(
    snapshots: SnapshotsRecord[AnySnapshot],
    source: str | os.PathLike[str] | bytes,
    *,
    pin: bool = False,
    lease_s: float | None = None,
    timeout_s: float | None = None,
) -> Flow[AnySnapshot]:
    """Make a snapshot of a state that was saved or exported, for this client's principal. Sent again by itself, it is
    made once.

    Args: source, a file's path, or the bytes; pin, whether it stays when memory is short; lease_s, how long it lives,
    default the server's; timeout_s, with all retries, default the client's.
    Raises StateMismatch for one of another model or settings, or whose adapter the server has not loaded; StateDamaged
    for what is not whole, InvalidRequest for what is none; HostTierOff; NoSnapshotLines, QuotaExceeded when there is no
    room in time; OSError for a file that can't be read.
    """
    client = snapshots._client
    first = pb.ImportStateRequest(lease_ms=milliseconds("lease_s", lease_s), pinned=pin)
    response = yield from _loaded(client, first, source, timeout_s)
    return snapshots._make_snapshot(client, response.snapshot, Server(response.server_epoch, response.server))


def load_sequence(
    client: ClientState,
    make: Make[AnySequence],
    source: str | os.PathLike[str] | bytes,
    lease_s: float | None,
    timeout_s: float | None,
) -> Flow[AnySequence]:
    """Open a sequence that goes on where one stood that was saved or exported. Sent again by itself, it is opened once;
    `make` makes the object. Raises as `load`; NoFreeLines, PagesExhausted."""
    first = pb.ImportStateRequest(lease_ms=milliseconds("lease_s", lease_s), sequence=True)
    response = yield from _loaded(client, first, source, timeout_s)
    if not response.HasField("sequence"):
        raise ProtocolError("asked for a sequence, got none")
    told, at = response.sequence, Server(response.server_epoch, response.server)
    [sequence] = begin(client, make, at, [told.sequence], 0, told.adapter or None, told.adapter_hash)
    for span, progress in enumerate(told.spans):
        sequence.progress(span).write(
            {STEP: progress.step, POSITION: progress.position, PENDING: progress.pending_tokens}
        )
    return sequence


def _of_snapshot(snapshot: SnapshotRecord[Any]) -> tuple[ClientState, pb.ExportStateRequest, Server | None]:
    return snapshot._client, pb.ExportStateRequest(snapshot_id=snapshot.id), holder_of(snapshot)


def _of_sequence(at: Server, handles: list[int]) -> pb.ExportStateRequest:
    [handle] = handles
    return pb.ExportStateRequest(server_epoch=at.epoch, sequence=handle)


def _exported(
    client: ClientState, request: pb.ExportStateRequest, server: Server | None, timeout_s: float | None
) -> Flow[bytes]:
    content = io.BytesIO()
    yield from _export(client, request, server, content, timeout_s)
    return content.getvalue()


def _saved(
    client: ClientState,
    request: pb.ExportStateRequest,
    server: Server | None,
    path: str | os.PathLike[str],
    timeout_s: float | None,
) -> Flow[None]:
    part = Path(f"{os.fspath(path)}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            yield from _export(client, request, server, file, timeout_s)
        os.replace(part, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)


def _export(
    client: ClientState,
    request: pb.ExportStateRequest,
    server: Server | None,
    file: BinaryIO,
    timeout_s: float | None,
) -> Flow[None]:
    """Let a file have what is exported, from its beginning with each attempt."""

    def attempt(timeout_s: float) -> Flow[None]:
        file.seek(0)
        file.truncate()
        return stream(EXPORT_STATE, request, timeout_s, server, lambda response: file.write(response.chunk))

    yield from attempted(_attempts(client, timeout_s), attempt, server)


def _loaded(
    client: ClientState,
    first: pb.ImportStateRequest,
    source: str | os.PathLike[str] | bytes,
    timeout_s: float | None,
) -> Flow[pb.ImportStateResponse]:
    """What becomes of a state; first: the first message, but for its id."""
    # open would take a number for a file that is open, and close it.
    if not isinstance(source, bytes | str | os.PathLike):
        raise TypeError(f"source: expected a file's path, or the bytes, got {type(source).__name__}")
    first.request_id = secrets.token_bytes(ID_BYTES)
    chunk_bytes = min(CHUNK_BYTES, (yield from info(client)).inline_limit_bytes)

    def attempt(timeout_s: float) -> Flow[pb.ImportStateResponse]:
        errors: list[OSError] = []
        messages = _messages(first, source, chunk_bytes, errors)
        try:
            return (yield from call(IMPORT_STATE, messages, timeout_s))
        finally:
            with suppress(ValueError):  # a thread is reading just now, and closes the file when it is done
                messages.close()
            if errors:
                raise errors[0]

    return (yield from attempted(_attempts(client, timeout_s), attempt))


def _attempts(client: ClientState, timeout_s: float | None) -> Attempts:
    """No attempt is cut short to make another: that would send all of it again."""
    return client._attempts(timeout_s, replace(client._retry, attempt_timeout_s=MAX_SECONDS))


def _messages(
    first: pb.ImportStateRequest, source: str | os.PathLike[str] | bytes, chunk_bytes: int, errors: list[OSError]
) -> Generator[pb.ImportStateRequest, None, None]:
    """The messages of an attempt, read as they are asked for, in whichever thread.

    errors: gets why they ended too early, since an iterator that raises is something else to each gRPC; the server
    takes nothing that is cut short.
    """
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            yield first
            while chunk := file.read(chunk_bytes):
                yield pb.ImportStateRequest(chunk=chunk)
    except OSError as error:
        errors.append(error)
