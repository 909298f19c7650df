"""Replies and statuses as they go on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from numpy.typing import NDArray

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import prefix_pb2 as prefix_pb
from deltaline.v1 import state_service_pb2 as state_pb
from deltaline.v1 import tensor_pb2
from deltaline_server.errors import DOMAIN, Reason, Refusal
from deltaline_server.step import OutputMemory, StepResult, StepTiming
from deltaline_server.tables.captured.snapshot import SnapshotDescription, SnapshotState
from deltaline_server.tables.moved import Owner
from deltaline_server.tables.open_tokens import Opened
from deltaline_server.tables.prefixes.cost import Tier
from deltaline_server.tables.prefixes.match import Match
from deltaline_server.tables.sequence import SequenceDescription, SequenceState

Pieces: TypeAlias = list[wire.Buffer]
"""A serialised message as bytes and views of arrays, to be joined, or copied to where it goes."""
Reply: TypeAlias = bytes | Pieces
JOIN = b"".join
"""What makes bytes of pieces: the serialiser of the methods whose replies are such."""

TEXT_BYTES, ROW_TEXT_BYTES = 1024, 192
"""Most bytes of a status's text in UTF-8, of an RPC and of a row. An RPC's goes in trailers, of which gRPC's clients
take 8 KiB by default: twice there, escaped and in base64."""

_CORRELATION_ID = wire.varint(pb.StepStreamResponse.CORRELATION_ID_FIELD_NUMBER << 3)
_OUTCOME, _POSITION = pb.StepResponse.OUTCOME_FIELD_NUMBER, pb.StepResponse.POSITION_FIELD_NUMBER
_OUTPUT_START_LOC, _HIDDEN = pb.StepResponse.OUTPUT_START_LOC_FIELD_NUMBER, pb.StepResponse.HIDDEN_FIELD_NUMBER


def status(refusal: Refusal, text_bytes: int = TEXT_BYTES) -> status_pb2.Status:
    """Make the google.rpc.Status of a refusal: ErrorInfo always; BadRequest and RetryInfo where they apply.

    text_bytes: most bytes of its text, which is cut behind them.
    """
    text = refusal.message
    if len(text) > text_bytes // 4:  # bytes of a character
        text = text.encode()[:text_bytes].decode(errors="ignore")
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=refusal.reason.name, domain=DOMAIN, metadata=refusal.metadata)
    ]
    if refusal.field and refusal.reason.code == code_pb2.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(field=refusal.field, description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if refusal.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(refusal.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    made = status_pb2.Status(code=refusal.reason.code, message=text)
    for detail in details:
        made.details.add().Pack(detail)
    return made


def row_statuses(refusals: Mapping[int, Refusal]) -> list[pb.RowStatus]:
    """Make the statuses of refused rows, in row order."""
    return [pb.RowStatus(row=row, status=_row_status(row, refusals[row])) for row in sorted(refusals)]


def _row_status(row: int, refusal: Refusal) -> status_pb2.Status:
    if refusal.reason is Reason.STATE_ELSEWHERE:
        refusal = refusal.of_row(row)
    return status(refusal, ROW_TEXT_BYTES)


def moved_sequences(owners: Mapping[int, Owner]) -> list[pb.MovedSequence]:
    """Make the messages that tell where moved sequences live, in row order."""
    return [
        pb.MovedSequence(row=row, server=owner.server, server_epoch=owner.server_epoch, sequence=owner.handle)
        for row, owner in sorted(owners.items())
    ]


def _shared_tensor(hidden: NDArray[Any], memory: OutputMemory) -> bytes:
    """Serialise the Tensor of outputs that lie in shared memory."""
    shared = tensor_pb2.SharedSlice(region=memory.region, offset=memory.offset)
    return tensor_pb2.Tensor(dtype=wire.data_type(hidden.dtype), shape=hidden.shape, shared=shared).SerializeToString()


def step_response(result: StepResult) -> Pieces:
    """Serialise a StepResponse: the columns as they lie in their arrays, the outputs as a view."""
    memory, field_pieces = result.output_memory, wire.field_pieces
    tensor = wire.tensor_pieces(result.hidden) if memory is None else [_shared_tensor(result.hidden, memory)]
    rest = pb.StepResponse() if result.timing is None else pb.StepResponse(timing=_timing(result.timing))
    if result.refusals:
        rest.row_status.extend(row_statuses(result.refusals))
    for row, place in result.waypoints:
        rest.waypoints.add(row=row, position=place.position, snapshot_id=place.snapshot, skipped=place.skipped)
    return [
        # An outcome is below 128: a varint of one byte.
        *field_pieces(_OUTCOME, [result.outcome.tobytes()]),
        *field_pieces(_POSITION, [result.position.astype("<u8", copy=False).tobytes()]),
        *field_pieces(_OUTPUT_START_LOC, [result.output_start_loc.astype("<u4").tobytes()]),
        *field_pieces(_HIDDEN, tensor),
        rest.SerializeToString(),
    ]


def stream_response(correlation_id: int, result: StepResult) -> Pieces:
    """Serialise a StepStreamResponse for a step that was taken."""
    head = _CORRELATION_ID + wire.varint(correlation_id) if correlation_id else b""
    return [head, *wire.field_pieces(pb.StepStreamResponse.STEP_FIELD_NUMBER, step_response(result))]


def stream_status(correlation_id: int, refusal: Refusal) -> Pieces:
    """Serialise a StepStreamResponse for a step that was refused whole."""
    return [pb.StepStreamResponse(correlation_id=correlation_id, status=status(refusal)).SerializeToString()]


def commit_response(position: NDArray[np.int64], refusals: Mapping[int, Refusal]) -> bytes:
    """Serialise a CommitSequencesResponse."""
    response = pb.CommitSequencesResponse(position=position.tolist(), row_status=row_statuses(refusals))
    return response.SerializeToString()


def move_response(owners: Mapping[int, Owner], refusals: Mapping[int, Refusal]) -> bytes:
    """Serialise a MoveSequencesResponse. owners: by row, of those that were moved."""
    response = state_pb.MoveSequencesResponse(moved=moved_sequences(owners), row_status=row_statuses(refusals))
    return response.SerializeToString()


def close_response(states: Sequence[SequenceState], owners: Mapping[int, Owner]) -> bytes:
    """Serialise a CloseSequencesResponse. owners: by row, of those that were moved."""
    response = pb.CloseSequencesResponse(state=map(_wire_state, states), moved=moved_sequences(owners))
    return response.SerializeToString()


def renew_response(states: Sequence[SequenceState], owners: Mapping[int, Owner]) -> bytes:
    """Serialise a RenewLeasesResponse. owners: by row, of those that were moved."""
    response = pb.RenewLeasesResponse(state=map(_wire_state, states), moved=moved_sequences(owners))
    return response.SerializeToString()


def describe_response(
    handle: NDArray[np.uint64], descriptions: Sequence[SequenceDescription], owners: Mapping[int, Owner]
) -> bytes:
    """Serialise a DescribeSequencesResponse for the handles asked for, in their order. owners: by row, of those that
    were moved."""
    told = map(_description, handle.tolist(), descriptions)
    return pb.DescribeSequencesResponse(sequences=told, moved=moved_sequences(owners)).SerializeToString()


def _description(handle: int, description: SequenceDescription) -> pb.SequenceDescription:
    return pb.SequenceDescription(
        sequence=handle,
        state=_wire_state(description.state),
        lease_remaining_ms=max(0, round(description.lease_remaining_s * 1000)),
        spans=[
            pb.SpanProgress(
                step=span.step,
                position=span.position,
                steps_in_flight=span.steps_in_flight,
                pending_tokens=span.pending_tokens,
            )
            for span in description.spans
        ],
        adapter=description.adapter.name,
        adapter_hash=description.adapter.content_hash,
    )


def open_response(server_epoch: int, server: str, opened: Opened, restored: SequenceDescription | None = None) -> bytes:
    """Serialise an OpenSequencesResponse. restored: one of the sequences, where they begin with a snapshot."""
    return pb.OpenSequencesResponse(
        server_epoch=server_epoch,
        server=server,
        sequence=opened.handles.tolist(),
        lease_ms=round(opened.lease_s * 1000),
        adapter_hash=(opened if restored is None else restored).adapter.content_hash,
        position=0 if restored is None else restored.spans[0].position,
        adapter="" if restored is None else restored.adapter.name,
        match=None if opened.match is None else prefix_match(opened.match),
    ).SerializeToString()


def prefix_match(match: Match) -> prefix_pb.PrefixMatch:
    """Make the message of what was found of a prompt."""
    stored, miss = match.prefix, match.miss
    return prefix_pb.PrefixMatch(
        snapshot_id=b"" if stored is None else stored.snapshot,
        position=0 if stored is None else stored.position,
        tier=prefix_pb.TIER_UNSPECIFIED if stored is None else _tier(stored.tier),
        restore_us=round(match.restore_s * 1e6),
        compute_us=0 if match.compute_s is None else max(1, round(match.compute_s * 1e6)),
        # Enums here have the wire's numbers.
        miss=cast("prefix_pb.PrefixMiss.ValueType", 0 if miss is None else int(miss)),
        shared_position=match.shared_position,
    )


def fork_response(server_epoch: int, server: str, opened: Opened, first: Sequence[SequenceDescription]) -> bytes:
    """Serialise a ForkSequencesResponse. first: the first child of each parent."""
    return state_pb.ForkSequencesResponse(
        server_epoch=server_epoch,
        server=server,
        sequence=opened.handles.tolist(),
        position=[child.spans[0].position for child in first],
        lease_ms=round(opened.lease_s * 1000),
    ).SerializeToString()


def restore_response(
    server_epoch: int, server: str, opened: Opened, descriptions: Sequence[SequenceDescription]
) -> bytes:
    """Serialise a RestoreSequencesResponse. descriptions: of each sequence."""
    response = state_pb.RestoreSequencesResponse(
        server_epoch=server_epoch, server=server, lease_ms=round(opened.lease_s * 1000)
    )
    for handle, told in zip(opened.handles.tolist(), descriptions, strict=True):
        response.sequences.add(
            sequence=handle,
            position=told.spans[0].position,
            adapter=told.adapter.name,
            adapter_hash=told.adapter.content_hash,
        )
    return response.SerializeToString()


def imported_sequence(
    server_epoch: int, server: str, lease_s: float, handle: int, description: SequenceDescription
) -> bytes:
    """Serialise an ImportStateResponse for a sequence."""
    return state_pb.ImportStateResponse(
        sequence=_description(handle, description),
        server_epoch=server_epoch,
        lease_ms=round(lease_s * 1000),
        server=server,
    ).SerializeToString()


def snapshot(description: SnapshotDescription) -> state_pb.Snapshot:
    """Make the message of a snapshot."""
    return state_pb.Snapshot(
        snapshot_id=description.id,
        position=description.position,
        adapter=description.adapter,
        adapter_hash=description.adapter_hash,
        pinned=description.is_pinned,
        lease_remaining_ms=max(0, round(description.lease_s * 1000)),
        size_bytes=description.num_bytes,
        tier=_tier(description.tier),
        created_ms=round(description.created * 1000),
    )


def renew_snapshots_response(states: Sequence[SnapshotState]) -> bytes:
    """Serialise a RenewSnapshotsResponse."""
    return state_pb.RenewSnapshotsResponse(state=map(_snapshot_state, states)).SerializeToString()


def release_snapshots_response(states: Sequence[SnapshotState]) -> bytes:
    """Serialise a ReleaseSnapshotsResponse."""
    return state_pb.ReleaseSnapshotsResponse(state=map(_snapshot_state, states)).SerializeToString()


def _timing(timing: StepTiming) -> pb.StepTiming:
    """Whole nanoseconds of each stage."""
    return pb.StepTiming(
        queue_ns=max(0, round(timing.queue_s * 1e9)),
        copy_in_ns=max(0, round(timing.copy_in_s * 1e9)),
        compute_ns=max(0, round(timing.compute_s * 1e9)),
        copy_out_ns=max(0, round(timing.copy_out_s * 1e9)),
        batch_rows=timing.batch_rows,
        batch_tokens=timing.batch_tokens,
    )


def _wire_state(state: SequenceState) -> pb.SequenceState.ValueType:
    """The wire's value: the two enums have the same numbers."""
    return cast("pb.SequenceState.ValueType", int(state))


def _tier(tier: Tier) -> prefix_pb.Tier.ValueType:
    """The wire's value, likewise."""
    return cast("prefix_pb.Tier.ValueType", int(tier))


def _snapshot_state(state: SnapshotState) -> state_pb.SnapshotState.ValueType:
    """The wire's value, likewise."""
    return cast("state_pb.SnapshotState.ValueType", int(state))
