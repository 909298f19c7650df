"""Step requests as arrays: which rows have a value that is not finite."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deltaline_server.step import OutputRows, StepForm, StepRequest


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_rows_with_a_value_that_is_not_finite_are_found(dtype: type, value: float) -> None:
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    hidden: Any = np.full((6, 5), info.max, dtype=dtype)
    hidden[::2] = -info.max
    hidden[1, 2] = info.smallest_subnormal
    starts = np.array([0, 1, 4, 6])
    column = np.zeros(3, dtype=np.int64)
    form = StepForm(
        server_epoch=1,
        span=0,
        handle=column.astype(np.uint64),
        kind=column.astype(np.uint8),
        accepted=column.astype(np.int32),
        query_start_loc=starts,
        output=OutputRows.ALL,
        priority=0,
        token_bytes=5 * hidden.dtype.itemsize,
    )
    request = StepRequest(form, column, column, hidden)
    assert request.finite_rows() is None
    hidden[3, 4] = value
    finite = request.finite_rows()
    assert finite is not None and finite.tolist() == [True, False, True]
