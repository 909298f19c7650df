"""The field's convolutions, each called as its own engine calls it. Knows no figures and no bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.case import NotApplicable, Side, SideMaker
from deltaline_bench.conv1d.batch import Batch, Mode
from deltaline_bench.peers import Peers

# Tokens per program of the field's prefill kernels: the unit of the tables that make them capturable.
FIELD_BLOCK = 8

Function = Callable[..., Any]


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for what the batch does."""
    sglang = "sglang.kernels.ops.mamba.causal_conv1d_triton"
    vllm = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
    fla = "fla.modules.causal_conv1d.ops"
    if batch.shape.mode is Mode.PREFILL:
        return {
            "SGLang": lambda: _sglang_prefill(batch, found.load(sglang, "causal_conv1d_fn")),
            "vLLM": lambda: vllm_prefill(batch, found.load(vllm, "causal_conv1d_fn")),
            "fla": lambda: _fla_prefill(batch, found.load(fla, "causal_conv1d")),
            "causal-conv1d": lambda: _dao_prefill(batch, found.load("causal_conv1d", "causal_conv1d_fn")),
        }
    return {
        "SGLang": lambda: _sglang_update(batch, found.load(sglang, "causal_conv1d_update")),
        "vLLM": lambda: vllm_update(batch, found.load(vllm, "causal_conv1d_update")),
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
        self.starts = batch.int32(batch.starts)

    def side(self, call: Callable[[], Any], y: Callable[[Any], Tensor]) -> Side:
        """Make a side whose packed output is `y(result)`."""
        return Side(
            call,
            lambda result: {"y": y(result), "window": self.lines[self.batch.line_index]},
            lambda: self.batch.reset(self.lines),
        )


def _chunks(batch: Batch) -> tuple[list[int], list[int]]:
    """List the row and the number within its row of every block of tokens."""
    pairs = [(row, i) for row, n in enumerate(batch.shape.lengths) for i in range(-(-n // FIELD_BLOCK))]
    return [row for row, _ in pairs], [i for _, i in pairs]


def _sglang_prefill(batch: Batch, function: Function) -> Side:
    pool = _Pool(batch)
    rows, numbers = _chunks(batch)
    table = torch.stack((batch.int32(rows), batch.int32(numbers)), dim=1)
    lengths = list(batch.shape.lengths)

    def call() -> Any:
        return function(
            batch.x.t(),
            batch.weight_by_channel,
            batch.bias,
            pool.view,
            pool.starts,
            lengths,
            cache_indices=pool.index,
            has_initial_state=batch.continues,
            activation="silu",
            block_table=table,
        )

    return pool.side(call, lambda y: y.t())


def vllm_prefill(batch: Batch, function: Function) -> Side:
    """Make a side of a function with vLLM's signature of `causal_conv1d_fn`."""
    pool = _Pool(batch)
    rows, numbers = _chunks(batch)
    row_table, number_table = batch.int32(rows), batch.int32(numbers)
    program = {
        "tot": len(rows),
        "mlist": row_table,
        "mlist_len": len(rows),
        "offsetlist": number_table,
        "batch_ptr": row_table,
        "token_chunk_offset_ptr": number_table,
    }
    # What the engine prepares once per step, outside the layers.
    metadata = SimpleNamespace(
        nums_dict={FIELD_BLOCK: program}, batch_ptr=row_table, token_chunk_offset_ptr=number_table
    )

    def call() -> Any:
        return function(
            batch.x.t(),
            batch.weight_by_channel,
            batch.bias,
            pool.view,
            pool.starts,
            cache_indices=pool.index,
            has_initial_state=batch.continues,
            activation="silu",
            metadata=metadata,
        )

    return pool.side(call, lambda y: y.t())


def _initial_states(batch: Batch, columns: int) -> Tensor:
    """Gather `[N, columns, D]`, zero for fresh rows, the history in the last columns."""
    shape = batch.shape
    states = torch.zeros(shape.num_rows, columns, shape.channels, dtype=shape.dtype, device=batch.device)
    found = batch.first_lines[batch.line_index[batch.continues], : shape.history]
    states[batch.continues, columns - shape.history :] = found
    return states


def _fla_prefill(batch: Batch, function: Function) -> Side:
    # Its states are [N, D, W], one column more than the history, columns contiguous.
    states = _initial_states(batch, batch.shape.width).transpose(1, 2).contiguous()
    starts = torch.tensor(batch.starts, dtype=torch.int64, device=batch.device)
    x = batch.x.unsqueeze(0)

    def call() -> Any:
        return function(
            x,
            weight=batch.weight_by_channel,
            bias=batch.bias,
            initial_state=states,
            output_final_state=True,
            activation="silu",
            cu_seqlens=starts,
        )

    return Side(call, lambda done: {"y": done[0][0], "window": done[1][:, :, 1:].transpose(1, 2)}, lambda: None)


def _dao_prefill(batch: Batch, function: Function) -> Side:
    shape = batch.shape
    if not shape.is_uniform:
        raise NotApplicable("returns final states for rows of one length only")
    states = _initial_states(batch, shape.history).transpose(1, 2)
    x = batch.x.view(shape.num_rows, shape.max_length, shape.channels).transpose(1, 2)

    def call() -> Any:
        return function(
            x,
            batch.weight_by_channel,
            batch.bias,
            initial_states=states,
            return_final_states=True,
            activation="silu",
        )

    def outputs(done: Any) -> Mapping[str, Tensor]:
        return {"y": done[0].transpose(1, 2).reshape(batch.x.shape), "window": done[1].transpose(1, 2)}

    return Side(call, outputs, lambda: None)


def _dense(batch: Batch) -> Tensor:
    """Return the tokens as `[N, D]`, or `[N, D, n]` channels contiguous, for peers without packed rows."""
    shape = batch.shape
    if not shape.is_uniform:
        raise NotApplicable("takes rows of one length only")
    if shape.max_length == 1:
        return batch.x
    return batch.x.view(shape.num_rows, shape.max_length, shape.channels).transpose(1, 2)


def _packed(batch: Batch, y: Tensor) -> Tensor:
    """Undo `_dense` for an output."""
    return y if y.ndim == 2 else y.transpose(1, 2).reshape(batch.x.shape)


def _sglang_update(batch: Batch, function: Function) -> Side:
    pool = _Pool(batch)
    x = _dense(batch)
    accepted = batch.int32(batch.accepted) if batch.shape.mode is Mode.VERIFY else None

    def call() -> Any:
        return function(
            x,
            pool.view,
            batch.weight_by_channel,
            batch.bias,
            "silu",
            conv_state_indices=pool.index,
            num_accept_tokens=accepted,
        )

    return pool.side(call, lambda y: _packed(batch, y))


def vllm_update(batch: Batch, function: Function) -> Side:
    """Make a side of a function with vLLM's signature of `causal_conv1d_update`."""
    pool = _Pool(batch)
    y = torch.empty_like(batch.x)
    spec: dict[str, Any] = {}
    if batch.shape.mode is Mode.VERIFY:
        accepted = batch.int32(batch.accepted)
        spec = {
            "num_accepted_tokens": accepted,
            "query_start_loc": pool.starts,
            "max_query_len": batch.shape.max_length,
        }

    def call() -> Any:
        return function(
            batch.x,
            pool.view,
            batch.weight_by_channel,
            batch.bias,
            activation="silu",
            conv_state_indices=pool.index,
            out=y,
            **spec,
        )

    return pool.side(call, lambda done: done)


def _dao_update(batch: Batch, function: Function) -> Side:
    if batch.shape.mode is Mode.VERIFY:
        raise NotApplicable("cannot roll drafts back")
    pool = _Pool(batch)

    def call() -> Any:
        return function(
            batch.x,
            pool.view,
            batch.weight_by_channel,
            batch.bias,
            activation="silu",
            conv_state_indices=pool.index,
        )

    return pool.side(call, lambda y: y)
