"""Rows: its layout, its views, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltaline_kernels import Rows

GOOD: dict[str, Any] = {
    "lengths": [1, 3, 9, 2],
    "read_line": [1, 2, 0, -1],
    "write_line": [1, 3, 4, -1],
    "num_committed": [1, 0, 9, 2],
    "num_replayed": [0, 2, 0, 0],
    "draft_half": [0, 1, 0, 0],
    "position": [7, 2, 0, 1],
}


def build(**changes: Any) -> Rows:
    return Rows.build(**{**GOOD, **changes}, max_short=4, device="cpu")


def test_rows_lays_out_the_control_tensor() -> None:
    rows = build()
    assert rows.control.dtype == torch.int32
    assert rows.query_start_loc.tolist() == [0, 1, 4, 13, 15]
    assert rows.read_line.tolist() == GOOD["read_line"]
    assert rows.write_line.tolist() == GOOD["write_line"]
    assert rows.num_committed.tolist() == GOOD["num_committed"]
    assert rows.num_replayed.tolist() == GOOD["num_replayed"]
    assert rows.draft_half.tolist() == GOOD["draft_half"]
    assert rows.position.tolist() == GOOD["position"]
    assert build(position=None).position.tolist() == GOOD["num_replayed"]
    assert (rows.num_rows, rows.num_short, rows.max_length) == (4, 2, 9)


def test_rows_views_share_memory_and_keep_absolute_offsets() -> None:
    rows = build()
    short, long = rows.short(), rows.long()
    assert short.query_start_loc.tolist() == [0, 1, 4]
    assert long.query_start_loc.tolist() == [4, 13, 15]
    assert long.read_line.tolist() == [0, -1]
    assert (short.num_short, short.max_length, long.num_short, long.max_length) == (2, 4, 0, 9)
    assert long.control.data_ptr() == rows.control[0, 2:].data_ptr()


def test_rows_may_be_none() -> None:
    rows = Rows.build([], [], [], [], [], [], max_short=1, device="cpu")
    assert (rows.num_rows, rows.max_length) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"read_line": [1]}, "read_line: expected 4 values, got 1"),
        ({"lengths": [-1, 3, 9, 2]}, r"lengths\[0\]: expected at least 0"),
        ({"num_committed": [1, 2, 9, 2]}, r"num_committed\[1\]: expected 0 or 3, got 2"),
        ({"num_committed": [1, 0, 0, 2]}, r"num_committed\[2\]: expected 9 \(a VERIFY row must be short\), got 0"),
        ({"num_replayed": [0, -1, 0, 0]}, r"num_replayed\[1\]: expected at least 0"),
        ({"draft_half": [0, 2, 0, 0]}, r"draft_half\[1\]: expected 0 or 1"),
        ({"position": [7, 1, 0, 1]}, r"position\[1\]: expected at least 2, got 1"),
        ({"read_line": [1, 2, 0, -2]}, r"read_line\[3\]"),
        ({"read_line": [1, 2, -1, -1]}, r"read_line\[2\]: expected a line, or -1 together with write_line -1"),
        ({"write_line": [1, 3, -2, -1]}, r"write_line\[2\]"),
        ({"write_line": [1, 1, 3, -1]}, "write_line: expected distinct lines"),
        ({"write_line": [1, 3, 2, -1]}, r"read_line\[1\]: expected a line that no other row writes, got 2"),
        ({"read_line": [4, 2, 0, -1]}, r"read_line\[0\]: expected a line that no other row writes, got 4"),
    ],
)
def test_rows_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        build(**changes)


def test_rows_refuses_a_wrong_control_tensor() -> None:
    with pytest.raises(TypeError, match=r"^control: expected torch.int32"):
        Rows(torch.zeros(7, 3, dtype=torch.int64), 0, 1, 1)
    with pytest.raises(ValueError, match=r"^control: expected shape"):
        Rows(torch.zeros(5, 3, dtype=torch.int32), 0, 1, 1)
    with pytest.raises(ValueError, match=r"^num_short: expected"):
        Rows(torch.zeros(7, 3, dtype=torch.int32), 3, 1, 1)
    with pytest.raises(ValueError, match=r"^max_short: expected"):
        Rows(torch.zeros(7, 3, dtype=torch.int32), 1, 0, 1)


# Rows of 1, 130, 0 and 200 tokens, the first one short.
LONG: dict[str, Any] = {
    "lengths": [1, 130, 0, 200],
    "read_line": [1, 2, 0, 0],
    "write_line": [1, 3, 4, 5],
    "num_committed": [1, 130, 0, 200],
    "num_replayed": [0, 0, 0, 0],
    "draft_half": [0, 0, 0, 0],
    "max_short": 4,
    "device": "cpu",
}


def test_a_waypoint_has_the_entry_of_the_chunk_that_it_ends() -> None:
    rows = Rows.build(**LONG, waypoints=[(3, 192, 9), (1, 128, 6), (3, 64, 7), (1, 64, 8)])
    assert rows.waypoints is not None
    # Row 1 begins at token 1, row 3 at token 131: their entries begin at 0 + 1 and 2 + 3.
    assert rows.waypoints.tolist() == [-1, 8, 6, -1, -1, 7, -1, 9, -1]
    assert rows.find_waypoints() == [{}, {64: 8, 128: 6}, {}, {64: 7, 192: 9}]
    assert rows.long().find_waypoints() == rows.find_waypoints()[1:]
    assert rows.short().waypoints is None
    bare = Rows.build(**LONG)
    assert bare.waypoints is None and bare.find_waypoints() == [{}] * 4
    empty = Rows.build(**LONG, waypoints=[])
    assert empty.waypoints is not None and empty.waypoints.tolist() == [-1] * 9


@pytest.mark.parametrize(
    ("waypoint", "message"),
    [
        ((0, 64, 9), "expected a row of 1..3, not a short one, got 0"),
        ((4, 64, 9), "expected a row of 1..3, not a short one, got 4"),
        ((1, 65, 9), "expected a multiple of 64 of at most 130 tokens, got 65"),
        ((1, 0, 9), "expected a multiple of 64 of at most 130 tokens, got 0"),
        ((1, 192, 9), "expected a multiple of 64 of at most 130 tokens, got 192"),
        ((2, 64, 9), "expected a multiple of 64 of at most 0 tokens, got 64"),
        ((1, 64, 0), "expected a line that nothing else reads or writes, got 0"),
        ((1, 64, 2), "expected a line that nothing else reads or writes, got 2"),
        ((1, 64, 5), "expected a line that nothing else reads or writes, got 5"),
        ((1, 64, 7), "expected a line that nothing else reads or writes, got 7"),
        ((3, 128, 9), "expected one at 128 tokens of row 3, got another"),
    ],
)
def test_a_waypoint_that_says_nothing_is_refused(waypoint: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^waypoints\[1\]: {message}"):
        Rows.build(**LONG, waypoints=[(3, 128, 7), waypoint])


def test_rows_refuses_a_wrong_table_of_waypoints() -> None:
    control, entries = torch.zeros(7, 3, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    for given, error, message in (
        (entries.long(), TypeError, "waypoints: expected torch.int32, got torch.int64"),
        (entries[None], ValueError, r"waypoints: expected shape \[\*\], got \[1, 8\]"),
        (entries[::2], ValueError, "waypoints: expected a contiguous tensor"),
        (entries.to("meta"), ValueError, "waypoints: expected device cpu, got meta"),
        ([1], TypeError, "waypoints: expected a tensor, got list"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            Rows(control, 0, 4, 100, waypoints=given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^max_short: expected below 64 beside waypoints, got 64"):
        Rows(control, 0, 64, 100, waypoints=entries)
