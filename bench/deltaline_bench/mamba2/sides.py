"""Our sides of a case of the Mamba2 recurrence. Knows no figures and no bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deltaline_bench.case import Side
from deltaline_bench.gated_delta.shape import Mode
from deltaline_bench.mamba2.batch import Batch
from deltaline_kernels import Rows, mamba2


def rows_of(batch: Batch) -> Rows:
    """Say what each row does: prefill and decode commit their tokens, a verify keeps them as drafts."""
    shape = batch.shape
    lines = batch.line_index.tolist()
    is_verify = shape.mode is Mode.VERIFY
    return Rows.build(
        shape.lengths,
        [0 if shape.is_fresh(row) else line for row, line in enumerate(lines)],
        lines,
        [0] * shape.num_rows if is_verify else shape.lengths,
        batch.accepted.tolist(),
        batch.half.tolist() if is_verify else [0] * shape.num_rows,
        max_short=shape.max_drafts,
        device=batch.device,
    )


def ours(batch: Batch) -> Side:
    """Make our side; lines are read and written in place."""
    shape = batch.shape
    rows, state, drafts = rows_of(batch), batch.new_state(), batch.new_drafts()
    weights = (batch.A_log, batch.D, batch.dt_bias)

    def call() -> Any:
        return mamba2(batch.xBC, batch.dt, *weights, state, drafts, rows, num_groups=shape.num_groups)

    def outputs(y: Any) -> Mapping[str, Tensor]:
        found = {"y": y, "state": state[batch.line_index]}
        if shape.mode is Mode.VERIFY:
            found["drafts"] = drafts[batch.line_index, 1 - batch.half, : shape.max_drafts]
        return found

    def reset() -> None:
        batch.reset_state(state)
        batch.reset_drafts(drafts)

    return Side(call, outputs, reset)
