"""The field's selective state updates, each called as its own engine calls it. Knows no figures and no bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.case import Side, SideMaker
from deltaline_bench.gated_delta.shape import Mode
from deltaline_bench.mamba2.batch import Batch
from deltaline_bench.mamba2.field_prefill import prefill_peers
from deltaline_bench.peers import Peers

VLLM = "vllm.model_executor.layers.mamba.ops.mamba_ssm"
SGLANG = "sglang.kernels.ops.mamba.triton_ops.mamba_ssm"
UPDATE = "selective_state_update"

Function = Callable[..., Any]


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for what the batch does."""
    if batch.shape.mode is Mode.PREFILL:
        return prefill_peers(batch, found)
    if batch.shape.mode is Mode.VERIFY:
        return {"vLLM": lambda: _vllm_verify(batch, found.load(VLLM, UPDATE))}
    return {
        "vLLM": lambda: _decode(batch, found.load(VLLM, UPDATE)),
        "SGLang": lambda: _decode(batch, found.load(SGLANG, UPDATE)),
    }


def _arguments(batch: Batch, out: Tensor) -> dict[str, Any]:
    """Return what both engines pass, the heads' values as expanded views."""
    shape = batch.shape
    x, B, C = batch.split()
    size = (shape.num_heads, shape.head_dim)
    return {
        "x": x,
        "dt": batch.dt[..., None].expand(-1, -1, shape.head_dim),
        "A": (-batch.A_log.exp())[:, None, None].expand(*size, shape.state_dim),
        "B": B,
        "C": C,
        "D": batch.D[:, None].expand(*size),
        "z": None,
        "dt_bias": batch.dt_bias[:, None].expand(*size),
        "dt_softplus": True,
        "out": out,
    }


def _decode(batch: Batch, function: Function) -> Side:
    """Make a side of the decode, which has the same keywords in both engines."""
    state, index = batch.new_state(), batch.int32(batch.line_index)
    out = torch.empty(batch.split()[0].shape, dtype=batch.shape.dtype, device=batch.device)
    told = _arguments(batch, out)

    def call() -> Any:
        function(state, **told, state_batch_indices=index)
        return out

    return Side(call, lambda y: {"y": y, "state": state[batch.line_index]}, lambda: batch.reset_state(state))


def _vllm_verify(batch: Batch, function: Function) -> Side:
    """Make a side that keeps a state per token: a row has a line for each, and starts from the last accepted one's."""
    shape = batch.shape
    columns = shape.max_drafts
    # Line 0 is its null line.
    order = torch.arange(1, shape.num_rows * columns + 1, device=batch.device)
    table = order.view(columns, shape.num_rows).t().contiguous()
    index, accepted, starts = (batch.int32(x) for x in (table, batch.accepted, batch.starts()))
    size = (shape.num_rows * columns + 1, shape.num_heads, shape.head_dim, shape.state_dim)
    pool = torch.full(size, torch.nan, dtype=shape.state, device=batch.device)
    first = table.gather(1, batch.accepted[:, None] - 1)[:, 0]
    started = batch.started().to(shape.state)
    out = torch.empty(batch.split()[0].shape, dtype=shape.dtype, device=batch.device)
    told = _arguments(batch, out)

    def reset() -> None:
        pool.fill_(torch.nan)
        pool[first] = started

    def call() -> Any:
        function(
            pool,
            **told,
            state_batch_indices=index,
            dst_state_batch_indices=index,
            num_accepted_tokens=accepted,
            cu_seqlens=starts,
        )
        return out

    reset()
    return Side(call, lambda y: {"y": y, "token_states": pool[table]}, reset)
