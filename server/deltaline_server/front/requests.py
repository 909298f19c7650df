"""Requests as they come from the wire, turned into checked arrays: every rule that refuses a whole request.

What is wrong with one row is the scheduler's to say. No Python loop over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import prefix_pb2 as prefix_pb
from deltaline.v1 import state_service_pb2 as state_pb
from deltaline_server.errors import Reason, RequestError, invalid
from deltaline_server.front import reply_bytes
from deltaline_server.front.steps.step_message import Column, Slice, StepMessage
from deltaline_server.front.steps.waypoints import read_waypoints
from deltaline_server.memory.regions import Owner, Regions
from deltaline_server.principal import ANONYMOUS, Principal
from deltaline_server.step import Limits, OutputMemory, OutputRows, RowKind, SpanShapes, StepForm, StepRequest
from deltaline_server.tables.captured.snapshots import ID_BYTES
from deltaline_server.tables.prefixes.cost import ReusePolicy
from deltaline_server.tables.prefixes.keys import MAX_KEY_BYTES, MAX_KEYS, MIN_KEY_BYTES, PrefixKeys

MIN_PRIORITY, MAX_PRIORITY = -8, 7
OPEN_TOKEN_BYTES = 16
# Of a request about snapshots, and of a page of their list.
MAX_SNAPSHOTS = 4096
# Of a request beside what it repeats: names, and fields of later versions.
OTHER_BYTES = 16 << 10
# uint64 counters from the wire are cut here, so that sums of them stay in int64; no server counts this far, so a cut
# value is still refused as a row's step or position.
MAX_COUNTER = np.uint64(2**62)
DECODE_KIND = bytes([RowKind.DECODE])

M = TypeVar("M")


@dataclass(frozen=True)
class Served:
    """What requests are read against: limits, what a token is on each span, its dtype, and where shared memory is."""

    limits: Limits
    shapes: Sequence[SpanShapes]
    dtype: np.dtype[Any]
    regions: Regions

    @cached_property
    def one_token_offsets(self) -> NDArray[np.int64]:
        """query_start_loc of rows of one token each, as many as a request may have; read-only."""
        offsets = np.arange(self.limits.max_sequences + 1)
        offsets.flags.writeable = False
        return offsets

    @cached_property
    def no_commits(self) -> NDArray[np.int32]:
        """`accepted` of rows without a commit, as many as a request may have; read-only."""
        accepted = np.full(self.limits.max_sequences, -1, np.int32)
        accepted.flags.writeable = False
        return accepted


@dataclass(frozen=True)
class CommitRequest:
    """N accepted counts for one span. handle uint64 [N]; step int64 [N], of the verifies; accepted int32 [N]."""

    server_epoch: int
    span: int
    handle: NDArray[np.uint64]
    step: NDArray[np.int64]
    accepted: NDArray[np.int32]


def most_bytes(max_sequences: int) -> int:
    """Most bytes that a message of a call with one request and no tensor needs: a handle and a key of each sequence, or
    keys and positions of a prompt, each with what stands before it; and all else."""
    return (9 + 2 + MAX_KEY_BYTES) * max(max_sequences, MAX_SNAPSHOTS, MAX_KEYS) + OTHER_BYTES


def parse(parser: Callable[[bytes], M], body: bytes, limit_bytes: int | None = None) -> M:
    """Parse a message. Raises: RequestError INVALID_REQUEST for bytes that are not one, MESSAGE_TOO_LARGE for more than
    the limit, None for none: parsing holds up the event loop, for tens of ms where there are millions of empty fields.
    """
    if limit_bytes is not None and len(body) > limit_bytes:
        message = f"expected a request of at most {limit_bytes} bytes, got {len(body)}"
        raise RequestError(Reason.MESSAGE_TOO_LARGE, message)
    try:
        return parser(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise RequestError(Reason.INVALID_REQUEST, "the message can't be parsed") from error


def read_count(message: pb.OpenSequencesRequest, served: Served) -> int:
    """Return how many sequences are asked for, 1 .. max_sequences, after checking what else the message has."""
    if not 1 <= message.count <= served.limits.max_sequences:
        raise invalid("count", f"must be in 1 .. {served.limits.max_sequences}, got {message.count}")
    reply_bytes.check("count", message.count, reply_bytes.HANDLE_BYTES)
    if len(message.open_token) not in (0, OPEN_TOKEN_BYTES):
        raise invalid("open_token", f"must have {OPEN_TOKEN_BYTES} bytes or none, got {len(message.open_token)}")
    if message.snapshot_id:
        _check_id("snapshot_id", message.snapshot_id)
        if message.adapter:
            raise invalid("adapter", "must be empty with a snapshot_id: its sequences have the snapshot's adapter")
        if message.HasField("prefix"):
            raise invalid("prefix", "must be absent with a snapshot_id, which the sequences begin with")
    return message.count


def read_prefix(prefix: prefix_pb.PrefixKeys) -> PrefixKeys:
    """Return the keys of a prompt."""
    return PrefixKeys.of(prefix.key, prefix.position, prefix.prompt_tokens)


def read_reuse(reuse: int) -> ReusePolicy:
    """Return when a state that is found is used; unspecified means always."""
    try:
        return ReusePolicy(reuse) if reuse else ReusePolicy.ALWAYS
    except ValueError as error:
        raise invalid("reuse", f"must be ALWAYS or IF_CHEAPER, got {reuse}") from error


def read_prefix_keys(prefix_key: Sequence[bytes], num_sequences: int) -> list[bytes]:
    """Return the key of each sequence's state, empty for none; as many as sequences, or none at all."""
    if len(prefix_key) not in (0, num_sequences):
        raise invalid("prefix_key", f"must have {num_sequences} entries or none, got {len(prefix_key)}")
    for key in prefix_key:
        if key and not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise invalid("prefix_key", f"must have {MIN_KEY_BYTES} .. {MAX_KEY_BYTES} bytes or none, got {len(key)}")
    return list(prefix_key)


def read_lease_s(lease_ms: int, served: Served) -> float | None:
    """Return a lease in seconds, None for the one that applies by default."""
    if lease_ms > served.limits.max_lease_ms:
        raise invalid("lease_ms", f"must be in 0 .. {served.limits.max_lease_ms}, got {lease_ms}")
    return lease_ms / 1000 if lease_ms else None


def read_epoch(server_epoch: int) -> int:
    """Return the epoch, which is never 0."""
    if server_epoch == 0:
        raise invalid("server_epoch", "must be set")
    return server_epoch


def read_handles(sequence: Column, served: Served, each_bytes: int = 0) -> NDArray[np.uint64]:
    """Return 1 .. max_sequences handles, uint64 [N], without repeats. each_bytes: what the reply tells of each."""
    if not 1 <= len(sequence) <= served.limits.max_sequences:
        raise _batch("sequence", f"must have 1 .. {served.limits.max_sequences} entries, got {len(sequence)}")
    reply_bytes.check("sequence", len(sequence), each_bytes)
    handle = _array(sequence, np.uint64)
    ordered = handle.copy()
    ordered.sort()
    if np.count_nonzero(ordered[1:] == ordered[:-1]):
        raise RequestError(Reason.DUPLICATE_SEQUENCE, "a sequence is named twice", field="sequence")
    return handle


def read_request_id(request_id: bytes) -> bytes:
    """Return the id that names a call."""
    _check_id("request_id", request_id)
    return request_id


def read_children(count: int, num_parents: int, served: Served) -> int:
    """Return how many children each parent gets: 1 or more, max_sequences in all."""
    most = served.limits.max_sequences // num_parents
    if not 1 <= count <= most:
        raise invalid("count", f"must be in 1 .. {most} for each of {num_parents} sequences, got {count}")
    reply_bytes.check("count", count * num_parents, reply_bytes.CHILD_BYTES)
    return count


def read_snapshot_ids(snapshot_id: Sequence[bytes], most: int) -> list[bytes]:
    """Return 1 .. `most` ids of snapshots, which may repeat."""
    if not 1 <= len(snapshot_id) <= most:
        raise _batch("snapshot_id", f"must have 1 .. {most} entries, got {len(snapshot_id)}")
    for one in snapshot_id:
        _check_id("snapshot_id", one)
    return list(snapshot_id)


def read_page(message: state_pb.ListSnapshotsRequest) -> tuple[bytes, int]:
    """Return the id that a page begins behind, b"" for the first, and how many snapshots it may have."""
    if message.after:
        _check_id("after", message.after)
    if message.limit > MAX_SNAPSHOTS:
        raise invalid("limit", f"must be in 0 .. {MAX_SNAPSHOTS}, got {message.limit}")
    return message.after, message.limit or MAX_SNAPSHOTS


def read_commit(message: pb.CommitSequencesRequest, served: Served) -> CommitRequest:
    """Return the arrays of a CommitSequencesRequest. Raises: RequestError."""
    epoch = read_epoch(message.server_epoch)
    span = _read_span(message.span, served)
    handle = read_handles(message.sequence, served, reply_bytes.COMMIT_BYTES)
    step = _read_counters("step", message.step, len(handle))
    accepted = _read_column("accepted", message.accepted, len(handle), np.int32)
    return CommitRequest(epoch, span, handle, step, accepted)


def read_step(
    message: StepMessage,
    served: Served,
    *,
    now_s: float,
    until_s: float | None,
    principal: Principal = ANONYMOUS,
    client: str = "",
) -> StepRequest:
    """Return the arrays of a StepRequest; hidden states are a view, of the message's bytes (read-only) or of a region.

    Args: now_s, the scheduler's clock; until_s, the RPC's own deadline on it, None for none; principal, who asks, by
    which connection (client).
    Raises: RequestError with the field at fault. What follows from the message's pattern is kept there.
    """
    pattern = message.pattern
    form: StepForm | None = None if pattern is None else pattern.form
    if form is None:
        form = _read_form(message, served, (principal.number, client))
        if pattern is not None:
            pattern.form = form
    hidden, limits = _read_hidden(message, form.shapes, served, (principal.number, client)), served.limits
    if hidden.nbytes > limits.queue_bytes:
        what = f"has {hidden.nbytes} bytes, expected at most {limits.queue_bytes}, all that may wait here"
        raise RequestError(Reason.MESSAGE_TOO_LARGE, f"hidden: {what}", field="hidden")
    request = StepRequest(
        form,
        _read_counters("step", message.step, form.num_rows),
        _read_counters("position", message.position, form.num_rows),
        hidden,
        _read_deadline_s(message.queue_timeout_us, now_s, until_s) if message.queue_timeout_us else until_s,
        principal,
        client,
        message.shared is not None,
    )
    if message.output_slice is not None:
        request.output_memory = _read_output_memory(message.output_slice, request, served.regions)
    elif not request.is_input_shared and form.output_bytes > limits.inline_limit_bytes:
        # Only of a span that makes tokens wider: others give no more than they were sent.
        what = f"outputs of {form.output_bytes} bytes, expected at most {limits.inline_limit_bytes} in a message"
        raise RequestError(Reason.MESSAGE_TOO_LARGE, f"hidden: has {what}", field="hidden")
    return request


def _read_form(message: StepMessage, served: Served, owners: Container[Owner]) -> StepForm:
    """What a step asks of its rows, apart from their numbers. Raises: RequestError."""
    epoch = read_epoch(message.server_epoch)
    span = _read_span(message.span, served)
    handle = read_handles(message.sequence, served)
    if len(handle) > served.limits.queue_rows:
        raise _batch(
            "sequence",
            f"must have at most {served.limits.queue_rows} entries, all that may wait here, got {len(handle)}",
        )
    kind = _read_kinds(message.kind, len(handle))
    accepted = served.no_commits[: len(handle)]
    if len(message.accepted):
        accepted = _read_column("accepted", message.accepted, len(handle), np.int32)
    shapes = served.shapes[span]
    num_tokens = len(_read_hidden(message, shapes, served, owners))
    query_start_loc = _read_offsets(message.query_start_loc, kind, num_tokens, served)
    if not MIN_PRIORITY <= message.priority <= MAX_PRIORITY:
        raise invalid("priority", f"must be in {MIN_PRIORITY} .. {MAX_PRIORITY}, got {message.priority}")
    output = _read_output(message.output)
    form = StepForm(epoch, span, handle, kind, accepted, query_start_loc, output, message.priority, shapes)
    if message.waypoints:
        positions = _read_counters("position", message.position, len(handle))
        form = replace(form, waypoints=read_waypoints(message.waypoints, form, positions, served.limits.max_lease_ms))
    most_bytes, is_inline = reply_bytes.most_step_bytes(served.limits.inline_limit_bytes), message.output_slice is None
    reply_bytes.check_step(form, message.max_reply_bytes, most_bytes, is_inline=is_inline)
    return form


def _check_id(field: str, value: bytes) -> None:
    if len(value) != ID_BYTES:
        raise invalid(field, f"must have {ID_BYTES} bytes, got {len(value)}")


def _read_span(span: int, served: Served) -> int:
    """The index of a declared span."""
    if span >= len(served.shapes):
        message = f"must be below {len(served.shapes)}, the number of spans, got {span}"
        raise RequestError(Reason.UNKNOWN_SPAN, f"span: {message}", field="span")
    return span


def _array(values: Column, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """A column as an array of a type; that of the message, if it is one of this type."""
    if isinstance(values, np.ndarray):
        return values.astype(dtype, copy=False)
    return np.fromiter(values, dtype, len(values))


def _read_column(field: str, values: Column, length: int, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """One entry per row as an array."""
    if len(values) != length:
        raise _batch(field, f"must have {length} entries, got {len(values)}")
    return _array(values, dtype)


def _read_counters(field: str, values: Column, length: int) -> NDArray[np.int64]:
    """One uint64 per row, cut at MAX_COUNTER."""
    if len(values) != length:
        raise _batch(field, f"must have {length} entries, got {len(values)}")
    counters = values if isinstance(values, np.ndarray) else np.fromiter(values, np.uint64, length)
    cut: NDArray[np.int64] = np.minimum(counters, MAX_COUNTER).view(np.int64)
    return cut


def _read_kinds(values: Column, length: int) -> NDArray[np.uint8]:
    """The kind of each row, uint8 [N]."""
    if isinstance(values, np.ndarray) and values.tobytes() == DECODE_KIND * length:
        return values
    kind = _read_column("kind", values, length, np.int64)
    if kind.min() < RowKind.PREFILL or kind.max() > RowKind.VERIFY:
        raise _batch("kind", "must be PREFILL, DECODE or VERIFY")
    return kind.astype(np.uint8)


def _read_hidden(message: StepMessage, shapes: SpanShapes, served: Served, owners: Container[Owner]) -> NDArray[Any]:
    """The packed hidden states [T, width] in the server's dtype. owners: of whom the memory has to be."""
    try:
        if message.shared is None:
            hidden = wire.view(
                message.dtype,
                message.shape,
                message.inline,
                limit_bytes=served.limits.inline_limit_bytes,
                field="hidden",
            )
        else:
            dtype, shape = wire.check_header(message.dtype, message.shape, field="hidden")
            region, offset = message.shared.region, message.shared.offset
            hidden = served.regions.tensor("hidden", region, offset, dtype, shape, owners)
    except wire.TensorTooLargeError as error:
        raise RequestError(Reason.MESSAGE_TOO_LARGE, str(error), field=error.field) from error
    except wire.WireError as error:
        raise RequestError(Reason.INVALID_TENSOR, str(error), field=error.field) from error
    if hidden.dtype != served.dtype:
        raise _tensor("hidden.dtype", f"must be {served.dtype.name}, got {hidden.dtype.name}")
    if hidden.shape[1:] != shapes.input_shape:
        expected = ", ".join(["tokens", *map(str, shapes.input_shape)])
        raise _tensor("hidden.shape", f"must be [{expected}], got {list(hidden.shape)}")
    return hidden if hidden.ndim == 2 else hidden.reshape(len(hidden), -1)


def _read_output_memory(place: Slice, request: StepRequest, regions: Regions) -> OutputMemory:
    """Where the outputs of a request go."""
    needed, owners = request.form.output_bytes, (request.principal.number, request.client)
    return regions.output("output_slice", place.region, place.offset, place.size_bytes, needed, request.hidden, owners)


def _read_offsets(values: Column, kind: NDArray[np.uint8], num_tokens: int, served: Served) -> NDArray[np.int64]:
    """query_start_loc, int64 [N + 1]: sound, and each row has as many tokens as its kind allows."""
    offsets: NDArray[np.int64] = _read_column("query_start_loc", values, len(kind) + 1, np.int64)
    one_token_each = served.one_token_offsets[: len(offsets)]
    if num_tokens == len(kind) and offsets.tobytes() == one_token_each.tobytes():
        return one_token_each
    length = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != num_tokens or length.min() < 1:
        raise _batch("query_start_loc", f"must start at 0, increase, and end at {num_tokens}, the number of tokens")
    if ((kind == RowKind.DECODE) & (length != 1)).any():
        raise _batch("query_start_loc", "a DECODE row has exactly one token")
    if ((kind == RowKind.VERIFY) & (length > served.limits.max_draft_tokens)).any():
        raise _batch("query_start_loc", f"a VERIFY row has at most {served.limits.max_draft_tokens} tokens")
    return offsets


def _read_output(output: int) -> OutputRows:
    """Which output rows are wanted; unspecified means all."""
    try:
        return OutputRows(output) if output else OutputRows.ALL
    except ValueError as error:
        raise invalid("output", f"must be ALL, LAST or NONE, got {output}") from error


def _read_deadline_s(queue_timeout_us: int, now_s: float, until_s: float | None) -> float:
    """The earlier of the request's own queue limit and the RPC's deadline, on the scheduler's clock."""
    queue_s = now_s + queue_timeout_us / 1e6
    return queue_s if until_s is None else min(queue_s, until_s)


def _batch(field: str, message: str) -> RequestError:
    return RequestError(Reason.INVALID_BATCH, f"{field}: {message}", field=field)


def _tensor(field: str, message: str) -> RequestError:
    return RequestError(Reason.INVALID_TENSOR, f"{field}: {message}", field=field)
