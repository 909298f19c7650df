"""The largest size of each reply, known before anything is done: what might not fit is refused.

A gRPC client takes 4 MiB unless it says otherwise, and a reply that it does not take is lost, its step applied.
Sizes are those of the largest message of each kind, serialised; what grows with a request is counted by row.
"""

from __future__ import annotations

import numpy as np

from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import prefix_pb2 as prefix_pb
from deltaline.v1 import state_service_pb2 as state_pb
from deltaline.v1 import tensor_pb2
from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.front import replies
from deltaline_server.front.grpc_port import MESSAGE_SLACK_BYTES
from deltaline_server.step import StepForm
from deltaline_server.tables.moved import Owner

DEFAULT_BYTES = 4 << 20
"""What a gRPC client takes by default."""

_U32, _U64 = 2**32 - 1, 2**64 - 1
# Tag and length of a field that holds bytes: the length of a message that can be sent is a varint of 5 bytes at most.
_HEAD_BYTES = 6
# Of an adapter: the longest name, and a hash.
_NAME, _HASH = "n" * 64, bytes(32)
# Of a server: a host's longest name, and a port.
_SERVER = "s" * 259
_ID = bytes(16)
_REASON = max(Reason, key=lambda reason: len(reason.name))
_COUNTS = {"step": str(2**63 - 1), "position": str(2**63 - 1), "pending_tokens": str(2**63 - 1)}
_WORST = Refusal(_REASON, "x" * replies.ROW_TEXT_BYTES, _COUNTS, retry_after_s=1e9 + 1e-9)
_OWNER = Owner(_SERVER, _U64, _U64)

ROW_STATUS_BYTES = max(
    pb.CommitSequencesResponse(row_status=replies.row_statuses({_U32: refusal})).ByteSize()
    for refusal in (_WORST, _OWNER.refusal())
)
# The state of a sequence that was closed or renewed, and where it lives instead.
STATE_BYTES = pb.CloseSequencesResponse(
    state=[pb.SEQUENCE_STATE_ELSEWHERE], moved=replies.moved_sequences({_U32: _OWNER})
).ByteSize()
COMMIT_BYTES = 8 + ROW_STATUS_BYTES
HANDLE_BYTES = 8
# A handle and, if each is the only one of its parent, a position.
CHILD_BYTES = 16
SNAPSHOT_BYTES = state_pb.ListSnapshotsResponse(
    snapshots=[
        state_pb.Snapshot(
            snapshot_id=_ID,
            position=_U64,
            adapter=_NAME,
            adapter_hash=_HASH,
            pinned=True,
            lease_remaining_ms=_U64,
            size_bytes=_U64,
            tier=prefix_pb.TIER_FILE,
            created_ms=_U64,
        )
    ]
).ByteSize()
RESTORED_BYTES = state_pb.RestoreSequencesResponse(
    sequences=[state_pb.RestoredSequence(sequence=_U64, position=_U64, adapter=_NAME, adapter_hash=_HASH)]
).ByteSize()
# What a reply has that does not grow with its rows: no reply of sequences or snapshots has more than an open's.
FIXED_BYTES = (
    2 * _HEAD_BYTES
    + pb.OpenSequencesResponse(
        server_epoch=_U64,
        lease_ms=_U64,
        adapter_hash=_HASH,
        position=_U64,
        adapter=_NAME,
        server=_SERVER,
        match=prefix_pb.PrefixMatch(
            snapshot_id=_ID,
            position=_U64,
            tier=prefix_pb.TIER_FILE,
            restore_us=_U64,
            compute_us=_U64,
            miss=prefix_pb.PREFIX_MISS_TOO_SHORT,
            shared_position=_U64,
        ),
    ).ByteSize()
)
_WAYPOINT_BYTES = max(
    pb.StepResponse(waypoints=[prefix_pb.Waypoint(row=_U32, position=_U64, **told)]).ByteSize()
    for told in ({"snapshot_id": _ID}, {"skipped": _REASON.name})
)
# An outcome, a position, where the outputs begin.
_ROW_BYTES = 1 + 8 + 4
# Of a step: heads of the stream's message, the response in it, three columns, the tensor and its elements.
_STEP_BYTES = (
    7 * _HEAD_BYTES
    + 4
    + pb.StepStreamResponse(correlation_id=_U64).ByteSize()
    + tensor_pb2.Tensor(
        dtype=tensor_pb2.DATA_TYPE_FLOAT16,
        shape=[2**31 - 1] * 3,
        shared=tensor_pb2.SharedSlice(region=_U64, offset=_U64),
    ).ByteSize()
    + pb.StepResponse(
        timing=pb.StepTiming(
            queue_ns=_U64, copy_in_ns=_U64, compute_ns=_U64, copy_out_ns=_U64, batch_rows=_U32, batch_tokens=_U32
        )
    ).ByteSize()
)


# Where a sequence lives that was moved, or why it was not.
MOVED_BYTES = max(
    ROW_STATUS_BYTES, state_pb.MoveSequencesResponse(moved=replies.moved_sequences({_U32: _OWNER})).ByteSize()
)


def describe_bytes(num_spans: int) -> int:
    """Bytes of what is told of a sequence on so many spans."""
    span = pb.SpanProgress(step=_U64, position=_U64, steps_in_flight=_U32, pending_tokens=_U32)
    told = pb.SequenceDescription(
        sequence=_U64,
        state=pb.SEQUENCE_STATE_UNKNOWN,
        lease_remaining_ms=_U64,
        spans=[span] * num_spans,
        adapter=_NAME,
        adapter_hash=_HASH,
    )
    moved = pb.SequenceDescription(sequence=_U64, state=pb.SEQUENCE_STATE_ELSEWHERE)
    return max(
        pb.DescribeSequencesResponse(sequences=[told]).ByteSize(),
        pb.DescribeSequencesResponse(sequences=[moved], moved=replies.moved_sequences({_U32: _OWNER})).ByteSize(),
    )


def step_bytes(form: StepForm, *, is_inline: bool) -> int:
    """Bytes of the reply to a step: of each row its outputs, or the status of its refusal, whatever is more.

    is_inline: whether the outputs go in the reply. Then a row that is refused has none there.
    """
    outputs = form.output_counts * (form.shapes.output_bytes if is_inline else 0)
    num_places = sum(asked.num_places for asked in form.waypoints.values())
    rows = int(np.maximum(outputs, ROW_STATUS_BYTES).sum()) + form.num_rows * _ROW_BYTES
    return _STEP_BYTES + rows + num_places * _WAYPOINT_BYTES


def most_step_bytes(inline_limit_bytes: int) -> int:
    """The most bytes of a step's reply, whatever more is taken: as many as a request may have, or the default."""
    return max(inline_limit_bytes + MESSAGE_SLACK_BYTES, DEFAULT_BYTES)


def check_step(form: StepForm, taken_bytes: int, most_bytes: int, *, is_inline: bool) -> None:
    """Refuse a step whose reply might not fit. taken_bytes: as its request says, 0 for the default; most_bytes: the
    server's own limit. Raises RequestError REPLY_TOO_LARGE."""
    num_bytes, taken_bytes = step_bytes(form, is_inline=is_inline), taken_bytes or DEFAULT_BYTES
    if num_bytes > min(taken_bytes, most_bytes):
        hint = "ask for fewer rows" if num_bytes > most_bytes else "say that more is taken, or ask for fewer rows"
        raise _too_large("max_reply_bytes", num_bytes, min(taken_bytes, most_bytes), hint)


def check(field: str, count: int, each_bytes: int) -> None:
    """Refuse a request for so many of something if they might not fit a reply. Raises RequestError REPLY_TOO_LARGE."""
    num_bytes = FIXED_BYTES + count * each_bytes
    if num_bytes > DEFAULT_BYTES:
        most = (DEFAULT_BYTES - FIXED_BYTES) // each_bytes
        raise _too_large(field, num_bytes, DEFAULT_BYTES, f"{most} would fit, got {count}")


def _too_large(field: str, num_bytes: int, most_bytes: int, hint: str) -> RequestError:
    return RequestError(
        Reason.REPLY_TOO_LARGE,
        f"{field}: the reply may have {num_bytes} bytes, expected at most {most_bytes}: {hint}",
        field=field,
        metadata={"reply_bytes": str(num_bytes), "max_reply_bytes": str(most_bytes)},
    )
