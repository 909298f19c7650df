"""Our sides of a convolution case, and the field's, each called as its own engine calls it.

Ours are the native call and the field's signature over it. Knows no figures and no bars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.case import NotApplicable, Side, SideMaker
from deltaline_bench.conv1d.batch import Batch
from deltaline_bench.lines import Mode
from deltaline_bench.peers import Function, Peers
from deltaline_kernels import causal_conv1d
from deltaline_kernels.compat import causal_conv1d_fn, causal_conv1d_update

# Tokens per program of the field's prefill kernels: the unit of the tables that make them capturable.
FIELD_BLOCK = 8


def ours(batch: Batch) -> dict[str, SideMaker]:
    """Our sides: the native call, and the field's signature over it."""
    return {"deltaline": lambda: _native(batch), "deltaline compat": lambda: _compat(batch)}


def _native(batch: Batch) -> Side:
    shape = batch.shape
    rows = batch.rows(batch.offset, torch.zeros_like(batch.offset))
    lines = batch.new_lines(shape.num_columns)

    def outputs(y: Any) -> Mapping[str, Tensor]:
        whole = torch.cat(list(y), dim=1) if shape.split else y
        found = {"y": whole, "line": lines[batch.line_index]}
        return found | ({"waypoints": lines[batch.waypoint_index]} if shape.waypoints else {})

    call = partial(causal_conv1d, batch.x, batch.weight, batch.bias, lines, rows, split=shape.split)
    return Side(call, outputs, lambda: batch.reset(lines))


def _compat(batch: Batch) -> Side:
    if batch.shape.split:
        raise NotApplicable("the field's signature has no split")
    if batch.shape.mode is Mode.PREFILL:
        return _vllm_prefill(batch, causal_conv1d_fn)
    return _vllm_update(batch, causal_conv1d_update)


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for what the batch does."""
    sglang = "sglang.kernels.ops.mamba.causal_conv1d_triton"
    vllm = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
    fla = "fla.modules.causal_conv1d.ops"
    if batch.shape.mode is Mode.PREFILL:
        return {
            "SGLang": lambda: _sglang_prefill(batch, found.load(sglang, "causal_conv1d_fn")),
            "vLLM": lambda: _vllm_prefill(batch, found.load(vllm, "causal_conv1d_fn")),
            "fla": lambda: _fla_prefill(batch, found.load(fla, "causal_conv1d")),
            "causal-conv1d": lambda: _dao_prefill(batch, found.load("causal_conv1d", "causal_conv1d_fn")),
        }
    return {
        "SGLang": lambda: _sglang_update(batch, found.load(sglang, "causal_conv1d_update")),
        "vLLM": lambda: _vllm_update(batch, found.load(vllm, "causal_conv1d_update")),
        "causal-conv1d": lambda: _dao_update(batch, found.load("causal_conv1d", "causal_conv1d_update")),
    }


class _Pool:
    """A peer's pool of lines, and what every peer is told about rows, in int32 on the device."""

    def __init__(self, batch: Batch) -> None:
        shape = batch.shape
        num_columns = shape.history - 1 + shape.max_length if shape.mode is Mode.VERIFY else shape.history
        self.batch = batch
        self.lines = batch.new_lines(num_columns)
        # The field's view: [lines, D, columns], channels contiguous.
        self.view = self.lines.transpose(1, 2)
        self.index = batch.int32(batch.line_index)
        self.starts = batch.int32(shape.starts)

    def side(self, call: Callable[[], Any], y: Callable[[Any], Tensor]) -> Side:
        """Make a side whose packed output is `y(result)`."""
        return Side(
            call,
            lambda result: {"y": y(result), "window": self.lines[self.batch.line_index]},
            lambda: self.batch.reset(self.lines),
        )


def _chunks(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the row, and the number within its row, of every block of tokens."""
    pairs = [(row, i) for row, n in enumerate(batch.shape.lengths) for i in range(-(-n // FIELD_BLOCK))]
    return batch.int32([row for row, _ in pairs]), batch.int32([i for _, i in pairs])


def _packed_prefill(batch: Batch, function: Function, *tables: object, **named_tables: object) -> Side:
    """Make a side of a function with the engines' signature of `causal_conv1d_fn`, which differs in its tables."""
    pool = _Pool(batch)
    packed = (batch.x.t(), *batch.taps, pool.view, pool.starts, *tables)
    lines = {"cache_indices": pool.index, "has_initial_state": batch.continues}
    call = partial(function, *packed, **lines, activation="silu", **named_tables)
    return pool.side(call, lambda y: y.t())


def _sglang_prefill(batch: Batch, function: Function) -> Side:
    lengths = list(batch.shape.lengths)
    return _packed_prefill(batch, function, lengths, block_table=torch.stack(_chunks(batch), dim=1))


def _vllm_prefill(batch: Batch, function: Function) -> Side:
    """Make a side of a function with vLLM's signature of `causal_conv1d_fn`."""
    rows, numbers = _chunks(batch)
    tables = {"batch_ptr": rows, "token_chunk_offset_ptr": numbers}
    program = {"tot": len(rows), "mlist": rows, "mlist_len": len(rows), "offsetlist": numbers, **tables}
    # What the engine prepares once per step, outside the layers.
    metadata = SimpleNamespace(nums_dict={FIELD_BLOCK: program}, **tables)
    return _packed_prefill(batch, function, metadata=metadata)


def _initial_states(batch: Batch, columns: int) -> Tensor:
    """Gather `[N, columns, D]`, zero for fresh rows, the history in the last columns."""
    shape = batch.shape
    states = torch.zeros(shape.num_rows, columns, shape.channels, dtype=shape.dtype, device=batch.device)
    found = batch.first_lines[batch.line_index[batch.continues], : shape.history]
    states[batch.continues, columns - shape.history :] = found
    return states


def _fla_prefill(batch: Batch, function: Function) -> Side:
    weight, bias = batch.taps
    call = partial(
        function,
        batch.x.unsqueeze(0),
        weight=weight,
        bias=bias,
        # Its states are [N, D, W], one column more than the history, columns contiguous.
        initial_state=_initial_states(batch, batch.shape.width).transpose(1, 2).contiguous(),
        output_final_state=True,
        activation="silu",
        cu_seqlens=torch.tensor(batch.shape.starts, dtype=torch.int64, device=batch.device),
    )
    return Side(call, lambda done: {"y": done[0][0], "window": done[1][:, :, 1:].transpose(1, 2)}, lambda: None)


def _dense(batch: Batch) -> Tensor:
    """Return the tokens `[N, D, n]`, channels contiguous, for peers without packed rows."""
    shape = batch.shape
    if not shape.is_uniform:
        raise NotApplicable("takes rows of one length only")
    return batch.x.view(shape.num_rows, shape.max_length, shape.channels).transpose(1, 2)


def _undo_dense(batch: Batch, y: Tensor) -> Tensor:
    return y.transpose(1, 2).reshape(batch.x.shape)


def _dao_prefill(batch: Batch, function: Function) -> Side:
    if not batch.shape.is_uniform:
        raise NotApplicable("returns final states for rows of one length only")
    states = _initial_states(batch, batch.shape.history).transpose(1, 2)
    told = {"initial_states": states, "return_final_states": True}
    call = partial(function, _dense(batch), *batch.taps, **told, activation="silu")
    return Side(call, lambda done: {"y": _undo_dense(batch, done[0]), "window": done[1].transpose(1, 2)}, lambda: None)


def _sglang_update(batch: Batch, function: Function) -> Side:
    pool, shape = _Pool(batch), batch.shape
    x = batch.x if shape.max_length == 1 else _dense(batch)
    accepted = batch.int32(batch.accepted) if shape.mode is Mode.VERIFY else None
    told = {"conv_state_indices": pool.index, "num_accept_tokens": accepted}
    call = partial(function, x, pool.view, *batch.taps, "silu", **told)
    return pool.side(call, lambda y: y if y.ndim == 2 else _undo_dense(batch, y))


def _vllm_update(batch: Batch, function: Function) -> Side:
    """Make a side of a function with vLLM's signature of `causal_conv1d_update`."""
    pool = _Pool(batch)
    told: dict[str, Any] = {"conv_state_indices": pool.index, "out": torch.empty_like(batch.x)}
    if batch.shape.mode is Mode.VERIFY:
        told["num_accepted_tokens"] = batch.int32(batch.accepted)
        told["query_start_loc"] = pool.starts
        told["max_query_len"] = batch.shape.max_length
    call = partial(function, batch.x, pool.view, *batch.taps, activation="silu", **told)
    return pool.side(call, lambda done: done)


def _dao_update(batch: Batch, function: Function) -> Side:
    if batch.shape.mode is Mode.VERIFY:
        raise NotApplicable("cannot roll drafts back")
    pool = _Pool(batch)
    call = partial(function, batch.x, pool.view, *batch.taps, activation="silu", conv_state_indices=pool.index)
    return pool.side(call, lambda y: y)
