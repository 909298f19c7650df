"""Where rows' tokens lie."""

from __future__ import annotations

import numpy as np
import pytest

from deltaline_server.scheduling.scheduled_rows import token_range


@pytest.mark.parametrize(
    ("starts", "lengths", "expected"),
    [
        ([], [], slice(0, 0)),
        ([4], [3], slice(4, 7)),
        ([2, 4, 7, 8], [2, 3, 1, 1], slice(2, 9)),
        ([0, 2, 5], [2, 1, 2], [0, 1, 2, 5, 6]),
        ([5, 0], [2, 2], [5, 6, 0, 1]),
    ],
)
def test_tokens_side_by_side_are_a_slice_and_others_are_named(
    starts: list[int], lengths: list[int], expected: slice | list[int]
) -> None:
    found = token_range(np.array(starts, np.int64), np.array(lengths, np.int64))
    assert (found if isinstance(found, slice) else found.tolist()) == expected
