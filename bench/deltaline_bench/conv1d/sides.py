"""Our sides of a convolution case: the native call and the field's signature. Knows no figures and no bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.case import NotApplicable, Side, SideMaker
from deltaline_bench.conv1d.batch import Batch, Mode
from deltaline_bench.conv1d.field import vllm_prefill, vllm_update
from deltaline_kernels import Rows, causal_conv1d
from deltaline_kernels.compat import causal_conv1d_fn, causal_conv1d_update


def ours(batch: Batch, split: tuple[int, ...] | None = None) -> dict[str, SideMaker]:
    """Our sides: the native call, and the field's signature over it."""
    return {"deltaline": lambda: _native(batch, split), "deltaline compat": lambda: _compat(batch, split)}


def _compat(batch: Batch, split: tuple[int, ...] | None) -> Side:
    if split:
        raise NotApplicable("the field's signature has no split")
    if batch.shape.mode is Mode.PREFILL:
        return vllm_prefill(batch, causal_conv1d_fn)
    return vllm_update(batch, causal_conv1d_update)


def _native(batch: Batch, split: tuple[int, ...] | None) -> Side:
    shape = batch.shape
    owned = batch.line_index.tolist()
    zeros = [0] * shape.num_rows
    rows = Rows.build(
        shape.lengths,
        [0 if shape.is_fresh(row) else line for row, line in enumerate(owned)],
        owned,
        zeros if shape.mode is Mode.VERIFY else shape.lengths,
        [accepted - 1 for accepted in batch.accepted.tolist()],
        zeros,
        max_short=1 if shape.mode is Mode.PREFILL else shape.max_length,
        device=batch.device,
    )
    lines = batch.new_lines(shape.num_columns)

    def outputs(y: Any) -> Mapping[str, Tensor]:
        whole = torch.cat(list(y), dim=1) if split else y
        return {"y": whole, "line": lines[batch.line_index]}

    return Side(
        lambda: causal_conv1d(batch.x, batch.weight, batch.bias, lines, rows, split=split),
        outputs,
        lambda: batch.reset(lines),
    )
