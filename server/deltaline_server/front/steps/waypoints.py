"""Waypoints as a step names them, turned into places that are checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deltaline.v1 import prefix_pb2 as pb
from deltaline_server.errors import Reason, RequestError
from deltaline_server.step import WAYPOINT_TOKENS, RowKind, RowWaypoints, StepForm
from deltaline_server.tables.prefixes.keys import MAX_KEYS, PrefixKeys

# Of all rows of a step together.
MAX_PLACES = 4096


def read_waypoints(
    messages: Sequence[pb.Waypoints], form: StepForm, position: NDArray[np.int64], max_lease_ms: int
) -> dict[int, RowWaypoints]:
    """Where rows of a step leave states, by row; form: the step without them, position int64 [N].

    An end that is a multiple of WAYPOINT_TOKENS is a place like others. Raises RequestError INVALID_WAYPOINT.
    """
    read: dict[int, RowWaypoints] = {}
    num_places = num_keys = 0
    for i, message in enumerate(messages):
        field, row = f"waypoints[{i}]", message.row
        if row >= form.num_rows:
            raise _invalid(f"{field}.row", f"must be below {form.num_rows}, the number of rows, got {row}")
        if form.kind[row] != RowKind.PREFILL:
            raise _invalid(f"{field}.row", f"must be of PREFILL, got row {row} of {RowKind(form.kind[row]).name}")
        if row in read:
            raise _invalid(f"{field}.row", f"must be none twice, got {row} again")
        if message.lease_ms > max_lease_ms:
            raise _invalid(f"{field}.lease_ms", f"must be in 0 .. {max_lease_ms}, got {message.lease_ms}")
        length = int(form.lengths[row])
        tokens, at_end = _places(message, field, length, MAX_PLACES - num_places), message.at_end
        if at_end and length % WAYPOINT_TOKENS == 0:
            tokens, at_end = tokens if tokens[-1:] == (length,) else (*tokens, length), False
        num_places += len(tokens) + at_end
        if num_places > MAX_PLACES:
            raise _invalid(field, f"must name at most {MAX_PLACES} places in all")
        num_keys += len(message.prefix.key)
        if num_keys > MAX_KEYS:
            raise _invalid(f"{field}.prefix", f"must bring the keys of all rows to at most {MAX_KEYS}, got {num_keys}")
        lease_s = message.lease_ms / 1000 if message.lease_ms else None
        keys = _keys(message.prefix, field) if message.HasField("prefix") else {}
        named = {int(position[row]) + place for place in (*tokens, *[length] * at_end)}
        keys = {at: key for at, key in keys.items() if at in named}
        read[row] = RowWaypoints(tokens, at_end, lease_s, message.pinned, keys)
    return read


def _places(message: pb.Waypoints, field: str, length: int, most: int) -> tuple[int, ...]:
    """The tokens of a row before each place, but for its end; at most one more than `most` of them are looked at."""
    if message.every:
        if message.tokens:
            raise _invalid(f"{field}.every", "must be 0 beside tokens, got both")
        if message.every % WAYPOINT_TOKENS:
            raise _invalid(f"{field}.every", f"must be a multiple of {WAYPOINT_TOKENS}, got {message.every}")
        return tuple(range(message.every, length + 1, message.every)[: most + 1])
    before, places = 0, tuple(message.tokens[: most + 1])
    for tokens in places:
        if tokens % WAYPOINT_TOKENS or not before < tokens <= length:
            what = f"multiples of {WAYPOINT_TOKENS}, increasing, at most {length}, the row's tokens"
            raise _invalid(f"{field}.tokens", f"must be {what}, got {tokens} behind {before}")
        before = tokens
    return places


def _keys(prefix: pb.PrefixKeys, field: str) -> dict[int, bytes]:
    """Keys by position."""
    try:
        PrefixKeys.of(prefix.key, prefix.position, prefix.prompt_tokens)
    except RequestError as error:
        wrong = error.refusal
        message = f"{field}.{wrong.message}"
        raise RequestError(Reason.INVALID_WAYPOINT, message, field=f"{field}.{wrong.field}") from error
    return dict(zip(prefix.position, prefix.key, strict=True))


def _invalid(field: str, message: str) -> RequestError:
    return RequestError(Reason.INVALID_WAYPOINT, f"{field}: {message}", field=field)
