"""Our sides of a convolution case: the native call and the field's signature. Knows no figures and no bars."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.case import NotApplicable, Side, SideMaker
from deltaline_bench.conv1d.batch import Batch, Mode
from deltaline_bench.conv1d.field import Function, vllm_prefill, vllm_update
from deltaline_kernels import Rows, causal_conv1d


def ours(batch: Batch, split: tuple[int, ...] | None = None) -> dict[str, SideMaker]:
    """Our sides: the native call, and the field's signature over it."""
    update = batch.shape.mode is not Mode.PREFILL
    return {
        "deltaline": lambda: _native(batch, split),
        "deltaline compat": lambda: (vllm_update if update else vllm_prefill)(batch, _compat(update, split)),
    }


def _compat(update: bool, split: tuple[int, ...] | None) -> Function:
    """Find our function of the field's name."""
    if split:
        raise NotApplicable("the field's signature has no split")
    try:
        compat = importlib.import_module("deltaline_kernels.compat")
    except ModuleNotFoundError as error:
        raise NotApplicable(str(error)) from error
    function: Function = getattr(compat, "causal_conv1d_update" if update else "causal_conv1d_fn")
    return function


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
