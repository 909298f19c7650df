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
