"""What rank 0 tells, small enough for one message or not."""

from __future__ import annotations

import numpy as np
import pytest

from deltaline_server.batch import StepBatch
from deltaline_server.engine.rank_orders import (
    FIRST_INTEGERS,
    Order,
    batch_of,
    batch_order,
    messages_of,
    opened,
    transfer_order,
)


@pytest.mark.parametrize("rows", [1, 64, 300])
def test_batches_are_told_whole(rows: int) -> None:
    rng = np.random.default_rng(rows)
    control = rng.integers(0, 1 << 30, (7, rows + 1), dtype=np.int32)
    places, pages = rng.integers(-1, 9, rows, dtype=np.int32), rng.integers(0, 9, (3, 5), dtype=np.int32)
    batch = StepBatch(3, control, 1, (), None, adapter_places=places, new_pages=pages)
    first, *more = messages_of(*batch_order(batch))
    assert len(first) == FIRST_INTEGERS and len(more) == (rows == 300)
    header, integers, rest = opened(first)
    assert len(rest) == sum(map(len, more))
    if more:
        rest[:] = more[0]
    told = batch_of(header, integers)
    assert header[0] == Order.COMPUTE and (told.span, told.num_short, told.hidden) == (3, 1, ())
    assert told.adapter_places is not None and told.new_pages is not None and told.waypoints is None
    np.testing.assert_array_equal(told.control, control)
    np.testing.assert_array_equal(told.adapter_places, places)
    np.testing.assert_array_equal(told.new_pages, pages)


def test_a_transfer_is_told_as_it_is() -> None:
    told = np.arange(2000, dtype=np.int32)
    first, second = messages_of(*transfer_order(told))
    header, integers, rest = opened(first)
    rest[:] = second
    assert header[0] == Order.TRANSFER
    np.testing.assert_array_equal(integers, told)
