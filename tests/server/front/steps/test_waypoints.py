"""Waypoints as steps name them: what is read, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rigs.limits import make_limits

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import prefix_pb2
from deltaline_kernels import rows
from deltaline_server.errors import Reason, RequestError
from deltaline_server.front import replies
from deltaline_server.front.requests import Served, read_step
from deltaline_server.front.steps.step_parser import StepParser
from deltaline_server.memory.regions import Regions
from deltaline_server.step import WAYPOINT_TOKENS, LeftWaypoint, RowWaypoints, SpanShapes, StepRequest, StepResult

LENGTHS = [200, 1, 64, 2, 128]
KEY = b"k" * 16


def message(*waypoints: dict[str, Any]) -> pb.StepRequest:
    """Rows of PREFILL, DECODE, PREFILL, VERIFY, PREFILL, each behind 1,000 tokens."""
    hidden = np.zeros((sum(LENGTHS), 2), np.float32)
    made = pb.StepRequest(
        server_epoch=1,
        sequence=range(1, 6),
        kind=[pb.ROW_KIND_PREFILL, pb.ROW_KIND_DECODE, pb.ROW_KIND_PREFILL, pb.ROW_KIND_VERIFY, pb.ROW_KIND_PREFILL],
        step=[1] * 5,
        position=[1000] * 5,
        query_start_loc=[0, *np.cumsum(LENGTHS).tolist()],
    )
    made.hidden.MergeFrom(tensor(hidden))
    for one in waypoints:
        made.waypoints.add(**one)
    return made


def tensor(hidden: Any) -> Any:
    return type(pb.StepRequest().hidden)(
        dtype=wire.data_type(hidden.dtype), shape=hidden.shape, inline=hidden.tobytes()
    )


def read(made: pb.StepRequest) -> StepRequest:
    limits = make_limits(inline_limit_bytes=1 << 22, queue_bytes=1 << 22)
    regions = Regions(limit_bytes=0, default_lease_s=1.0, max_lease_s=1.0, clock=lambda: 0.0)
    served = Served(limits, [SpanShapes(made.hidden.shape[1], 4)], np.dtype(np.float32), regions)
    return read_step(
        StepParser(limits.max_sequences).parse_step(made.SerializeToString()), served, now_s=0.0, until_s=None
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"row": 0, "tokens": [64, 192]}, RowWaypoints((64, 192))),
        ({"row": 0, "every": 64}, RowWaypoints((64, 128, 192))),
        ({"row": 0, "every": 256}, RowWaypoints(())),
        ({"row": 0, "at_end": True}, RowWaypoints((), at_end=True)),
        ({"row": 2, "at_end": True}, RowWaypoints((64,))),
        ({"row": 4, "tokens": [128], "at_end": True}, RowWaypoints((128,))),
        ({"row": 4, "every": 64, "at_end": True}, RowWaypoints((64, 128))),
        ({"row": 4, "lease_ms": 1000, "pinned": True}, RowWaypoints((), lease_s=1.0, is_pinned=True)),
    ],
)
def test_places_are_read(asked: dict[str, Any], expected: RowWaypoints) -> None:
    assert read(message(asked)).form.waypoints == {asked["row"]: expected}
    assert read(message()).form.waypoints == {}
    assert read(message(asked, {"row": 2 if asked["row"] != 2 else 0})).form.waypoints[asked["row"]] == expected


def test_keys_of_places_are_kept_and_no_others() -> None:
    prefix = prefix_pb2.PrefixKeys(key=[KEY, b"l" * 16, b"m" * 64], position=[1064, 1065, 1200], prompt_tokens=1300)
    asked = {"row": 0, "tokens": [64, 128], "at_end": True, "prefix": prefix}
    assert read(message(asked)).form.waypoints[0].keys == {1064: KEY, 1200: b"m" * 64}


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("row", [{"row": 5}]),
        ("row", [{"row": 2**32 - 1}]),
        ("row", [{"row": 1}]),
        ("row", [{"row": 3, "at_end": True}]),
        ("tokens", [{"row": 0, "tokens": [63]}]),
        ("tokens", [{"row": 0, "tokens": [0]}]),
        ("tokens", [{"row": 0, "tokens": [64, 64]}]),
        ("tokens", [{"row": 0, "tokens": [128, 64]}]),
        ("tokens", [{"row": 0, "tokens": [256]}]),
        ("tokens", [{"row": 0, "tokens": [2**63]}]),
        ("every", [{"row": 0, "every": 1}]),
        ("every", [{"row": 0, "every": 2**64 - 1}]),
        ("every", [{"row": 0, "every": 64, "tokens": [64]}]),
        ("lease_ms", [{"row": 0, "lease_ms": 1001}]),
    ],
)
def test_what_is_wrong_is_named(field: str, asked: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match=rf"^waypoints\[0\]\.{field}: must be") as caught:
        read(message(*asked))
    refusal = caught.value.refusal
    assert (refusal.reason, refusal.field) == (Reason.INVALID_WAYPOINT, f"waypoints[0].{field}")


def test_a_row_is_named_once() -> None:
    with pytest.raises(RequestError, match=r"^waypoints\[1\]\.row: .*none twice"):
        read(message({"row": 0, "tokens": [64]}, {"row": 0}))


def test_keys_that_are_wrong_are_named_with_their_row_s_waypoints() -> None:
    prefix = prefix_pb2.PrefixKeys(key=[b"short"], position=[1], prompt_tokens=1)
    with pytest.raises(RequestError, match=r"^waypoints\[1\]\.prefix\.key: .*got 5 in key 0") as caught:
        read(message({"row": 0, "tokens": [64]}, {"row": 2, "prefix": prefix}))
    refusal = caught.value.refusal
    assert (refusal.reason, refusal.field) == (Reason.INVALID_WAYPOINT, "waypoints[1].prefix.key")


@pytest.mark.parametrize("num_rows", [1, 3])
def test_places_are_bounded_in_all(num_rows: int) -> None:
    """4,096 of them; those of a vast row are not even counted further."""
    length = 64 * 4096 // num_rows + 64
    made = pb.StepRequest(
        server_epoch=1,
        sequence=range(1, num_rows + 1),
        kind=[pb.ROW_KIND_PREFILL] * num_rows,
        step=[1] * num_rows,
        position=[0] * num_rows,
        query_start_loc=range(0, length * num_rows + 1, length),
    )
    hidden = np.zeros((length * num_rows, 1), np.float32)
    made.hidden.MergeFrom(tensor(hidden))
    for row in range(num_rows):
        made.waypoints.add(row=row, every=128)
    assert sum(one.num_places for one in read(made).form.waypoints.values()) in (2048, 2049)
    for one in made.waypoints:
        one.every = 64
    with pytest.raises(RequestError, match="at most 4096 places"):
        read(made)
    for one in made.waypoints:
        one.every = 0
        one.tokens.extend(range(64, length + 1, 64))
    made.waypoints[-1].tokens.append(7)  # no place, but behind too many
    with pytest.raises(RequestError, match="at most 4096 places"):
        read(made)


def test_keys_of_all_rows_are_bounded() -> None:
    one = prefix_pb2.PrefixKeys(key=[KEY], position=[1], prompt_tokens=1)
    many = prefix_pb2.PrefixKeys(key=[KEY] * 4096, position=range(1, 4097), prompt_tokens=4096)
    with pytest.raises(RequestError, match=r"^waypoints\[1\]\.prefix: .* at most 4096, got 4097"):
        read(message({"row": 0, "prefix": one}, {"row": 2, "prefix": many}))


def test_replies_tell_them_in_order() -> None:
    none = np.zeros(0, dtype=np.int64)
    result = StepResult(none.astype(np.uint8), none, np.zeros(1, np.int64), np.zeros((0, 2), np.float32))
    result.waypoints = [(0, LeftWaypoint(64, KEY)), (2, LeftWaypoint(1200, skipped="NO_SNAPSHOT_LINES"))]
    told = pb.StepResponse.FromString(b"".join(replies.step_response(result))).waypoints
    assert [(one.row, one.position, one.snapshot_id, one.skipped) for one in told] == [
        (0, 64, KEY, ""),
        (2, 1200, b"", "NO_SNAPSHOT_LINES"),
    ]


def test_the_grid_is_the_kernels() -> None:
    assert rows.WAYPOINT_TOKENS == WAYPOINT_TOKENS
