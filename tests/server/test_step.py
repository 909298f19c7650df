"""Step requests as arrays: which rows have a value that is not finite, and what their bytes are."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from deltaline_server.step import OutputRows, SpanShapes, StepForm, StepRequest


def make_request(
    starts: NDArray[np.int64], hidden: NDArray[Any], ends: SpanShapes, output: OutputRows = OutputRows.ALL
) -> StepRequest:
    column = np.zeros(len(starts) - 1, dtype=np.int64)
    form = StepForm(
        server_epoch=1,
        span=0,
        handle=column.astype(np.uint64),
        kind=column.astype(np.uint8),
        accepted=column.astype(np.int32),
        query_start_loc=starts,
        output=output,
        priority=0,
        shapes=ends,
    )
    return StepRequest(form, column, column, hidden)


@pytest.mark.parametrize(
    ("ends", "output", "message_bytes", "kept_bytes"),
    [
        (SpanShapes(8, 4), OutputRows.ALL, 6 * 32, [64, 128, 192]),
        (SpanShapes(8, 4, 0, 3), OutputRows.ALL, 6 * 96, [128, 256, 384]),
        (SpanShapes(8, 4, 3, 0), OutputRows.ALL, 6 * 96, [128, 256, 384]),
        (SpanShapes(8, 4, 3, 3), OutputRows.ALL, 6 * 96, [192, 384, 576]),
        (SpanShapes(8, 4, 0, 3), OutputRows.LAST, 3 * 96, [32 + 96, 64 + 96, 96 + 96]),
        (SpanShapes(8, 4, 3, 0), OutputRows.NONE, 6 * 96, [96, 192, 288]),
    ],
)
def test_bytes_count_the_streams_of_either_end(
    ends: SpanShapes, output: OutputRows, message_bytes: int, kept_bytes: list[int]
) -> None:
    hidden = np.zeros((6, ends.input_width), np.float32)
    request = make_request(np.array([0, 1, 3, 6]), hidden, ends, output)
    assert request.message_bytes == message_bytes
    assert request.form.kept_bytes.tolist() == kept_bytes


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rows_with_a_value_that_is_not_finite_are_found(dtype: type) -> None:
    hidden: Any = np.ones((6, 5), dtype=dtype)
    request = make_request(np.array([0, 1, 4, 6]), hidden, SpanShapes(5, hidden.dtype.itemsize))
    assert request.finite_rows() is None
    hidden[3, 4] = -np.inf
    finite = request.finite_rows()
    assert finite is not None and finite.tolist() == [True, False, True]
