"""The life of sequences: open, close, describe, renew; and the server as a whole. Flows; they know no channel."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._exceptions import ProtocolError
from deltaline_client._state import ClientState, retried
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._transport.flow import Flow
from deltaline_client._transport.methods import CLOSE, DESCRIBE, DRAIN, LOAD, OPEN, RENEW
from deltaline_client._types import SequenceDescription, SequenceState, ServerLoad

S = TypeVar("S", bound=SequenceRecord)
T = TypeVar("T")

_TOKEN_BYTES = 16


def open_sequences(
    client: ClientState,
    make: Callable[[int, int, str | None, bytes], S],
    count: int,
    lease_s: float | None,
    adapter: str | None,
) -> Flow[list[S]]:
    """Open `count` sequences, all or none; `make` makes the objects, of handle, server_epoch, adapter and its hash.

    Raises ProtocolError if the server has opened them without the adapter: it is too old to know any.
    """
    if not isinstance(adapter, str | None):
        raise TypeError(f"adapter: expected a name, or None for none, got {type(adapter).__name__}")
    if adapter == "":
        raise ValueError("adapter: expected a name, or None for none, got an empty name")
    request = layers.OpenSequencesRequest(
        count=count,
        lease_ms=_milliseconds(lease_s),
        open_token=secrets.token_bytes(_TOKEN_BYTES),
        adapter=adapter or "",
    )
    response = yield from retried(client, OPEN, request)
    if len(response.sequence) != count:
        raise ProtocolError(f"asked for {count} sequences, got {len(response.sequence)}")
    if client._info is not None and client._info.server_epoch != response.server_epoch:
        client._info = None  # another process answers now; it may serve something else
    sequences = [make(handle, response.server_epoch, adapter, response.adapter_hash) for handle in response.sequence]
    if (adapter is not None) != bool(response.adapter_hash):
        yield from close(client, sequences)  # nobody else could
        raise ProtocolError("the server has not opened the sequences with the adapter that was asked for")
    return sequences


def close(client: ClientState, sequences: Sequence[SequenceRecord]) -> Flow[list[SequenceState]]:
    """End sequences and free their state. Idempotent; returns what each is now."""
    states: dict[SequenceRecord, layers.SequenceState.ValueType] = {}
    for server_epoch, group in _by_epoch(sequences):
        request = layers.CloseSequencesRequest(server_epoch=server_epoch, sequence=[one.handle for one in group])
        states.update(_zip(group, (yield from retried(client, CLOSE, request)).state))
    return [SequenceState(states[sequence]) for sequence in sequences]


def renew(
    client: ClientState, sequences: Sequence[SequenceRecord], lease_s: float | None = None
) -> Flow[list[SequenceState]]:
    """Move lease deadlines to lease_s from now (default: the lease they were opened with); returns what each is now.

    Every step renews the lease as well: this is for sequences that pause for longer than their lease.
    """
    states: dict[SequenceRecord, layers.SequenceState.ValueType] = {}
    for server_epoch, group in _by_epoch(sequences):
        request = layers.RenewLeasesRequest(
            server_epoch=server_epoch, sequence=[one.handle for one in group], lease_ms=_milliseconds(lease_s)
        )
        states.update(_zip(group, (yield from retried(client, RENEW, request)).state))
    return [SequenceState(states[sequence]) for sequence in sequences]


def describe(client: ClientState, sequences: Sequence[SequenceRecord]) -> Flow[list[SequenceDescription]]:
    """What the server holds of each sequence. Changes nothing."""
    descriptions: dict[SequenceRecord, layers.SequenceDescription] = {}
    for server_epoch, group in _by_epoch(sequences):
        request = layers.DescribeSequencesRequest(server_epoch=server_epoch, sequence=[one.handle for one in group])
        descriptions.update(_zip(group, (yield from retried(client, DESCRIBE, request)).sequences))
    return [SequenceDescription.from_proto(descriptions[sequence]) for sequence in sequences]


def load(client: ClientState) -> Flow[ServerLoad]:
    """How full the server is now."""
    return ServerLoad.from_proto((yield from retried(client, LOAD, admin.GetLoadRequest())))


def drain(client: ClientState, timeout_s: float | None = None) -> Flow[int]:
    """Begin the server's drain and return how many sequences are still open.

    It opens no more sequences, steps the open ones for timeout_s (default: the server's own), then stops. Idempotent.
    """
    request = admin.DrainRequest(timeout_ms=_milliseconds(timeout_s))
    return (yield from retried(client, DRAIN, request)).sequences_open


def _milliseconds(seconds: float | None) -> int:
    if seconds is None:
        return 0
    if seconds <= 0:
        raise ValueError(f"expected a positive number of seconds, got {seconds}")
    return max(1, round(seconds * 1000))


def _by_epoch(sequences: Sequence[SequenceRecord]) -> Iterator[tuple[int, list[SequenceRecord]]]:
    """Sequences grouped by the server process that they belong to: a request is about one."""
    for server_epoch in dict.fromkeys(sequence.server_epoch for sequence in sequences):
        yield server_epoch, [sequence for sequence in sequences if sequence.server_epoch == server_epoch]


def _zip(sequences: list[SequenceRecord], answers: Sequence[T]) -> Iterator[tuple[SequenceRecord, T]]:
    if len(answers) != len(sequences):
        raise ProtocolError(f"asked about {len(sequences)} sequences, got {len(answers)} answers")
    return zip(sequences, answers, strict=True)
